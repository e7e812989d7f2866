"""ptxrun: runs PTX kernels on the CPU, functionally, with memory checking. Needs only numpy.

    module = Module(open("k.ptx").read())
    stats = module.launch("kernel", grid=8, block=256, args=[x, y, 1.5, 1000])

``ptxrun.cuda`` compiles .cu files and launches them with explicit parameter blocks. README.md tells the use, the
limits and how to add an instruction.
"""

from .memory import Memory, Uninit
from .module import Module
from .ptxtypes import PtxError
from .stats import Stats

__all__ = ["Memory", "Module", "PtxError", "Stats", "Uninit"]
