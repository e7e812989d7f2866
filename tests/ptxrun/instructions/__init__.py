"""The instruction families; importing them fills BUILDERS."""

from . import bitwise, compare, control, convert, floating, integer, matrix, memory, move, warp
from .base import BUILDERS

__all__ = [
    "BUILDERS",
    "bitwise",
    "compare",
    "control",
    "convert",
    "floating",
    "integer",
    "matrix",
    "memory",
    "move",
    "warp",
]
