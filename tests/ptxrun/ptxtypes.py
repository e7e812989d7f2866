"""PTX types as numpy types, the address windows of the state spaces, and the one exception."""

from __future__ import annotations

import numpy as np

UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SINT = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}

# 16-bit floats and packed types are carried as their bits: numpy has no bfloat16, and a bit pattern keeps NaN payloads.
DTYPE = {
    f"{kind}{8 * n_bytes}": table[n_bytes]
    for kind, table in (("u", UINT), ("b", UINT), ("s", SINT))
    for n_bytes in UINT
}
DTYPE |= {"pred": np.bool_, "f16": np.uint16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64}
DTYPE |= {"f16x2": np.uint32, "bf16x2": np.uint32, "u16x2": np.uint32, "s16x2": np.uint32, "f32x2": np.uint64}

HALF = ("f16", "bf16")
FLOATS = ("f16", "bf16", "f32", "f64")
PACKED_FLOATS = ("f16x2", "bf16x2", "f32x2")
ROUNDINGS = ("rn", "rz", "rm", "rp")

SPACES = ("global", "shared", "local", "const", "param")
GLOBAL_BASE = 0x7F0000000000
SHARED_BASE = 0x010000000000
LOCAL_BASE = 0x020000000000
PARAM_BASE = 0x030000000000
# From the highest base down, so that the first base at or below a generic address names its space.
WINDOWS = (("global", GLOBAL_BASE), ("param", PARAM_BASE), ("local", LOCAL_BASE), ("shared", SHARED_BASE))


class PtxError(Exception):
    """Anything wrong with the program: unsupported PTX, a bad access, a race, divergence at a barrier."""


def size_of(ty: str) -> int:
    """Bytes of a value of PTX type ``ty``."""
    return np.dtype(DTYPE[ty]).itemsize


def window(addresses):
    """Index into WINDOWS of each generic address, -1 where it belongs to none."""
    return np.select([addresses >= base for _, base in WINDOWS], np.arange(len(WINDOWS)), -1)
