"""fusedaccum: exact gradient accumulation in fp32, and one fused pass at the window's boundary."""

from .deepspeed import from_deepspeed_config
from .optimizer import FusedAccumOptimizer
from .scaler import GradScaler
from .scaling import LossScale
from .stats import scale_lr

__version__ = "0.1.0"
__all__ = ["FusedAccumOptimizer", "GradScaler", "LossScale", "__version__", "from_deepspeed_config", "scale_lr"]
