"""fusedaccum: exact gradient accumulation in fp32, and one fused pass at the window's boundary."""

from .optimizer import FusedAccumOptimizer

__version__ = "0.1.0"
__all__ = ["FusedAccumOptimizer", "__version__"]
