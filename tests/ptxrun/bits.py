"""Integer helpers on numpy vectors where numpy's own operations differ from PTX's."""

from __future__ import annotations

import numpy as np

from .ptxtypes import UINT


def mulhi64(a, b, signed):
    """The upper 64 bits of the 128-bit product."""
    ua, ub = np.asarray(a).view(np.uint64), np.asarray(b).view(np.uint64)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    al, ah, bl, bh = ua & low, ua >> half, ub & low, ub >> half
    t = al * bl
    u = ah * bl + (t >> half)
    v = al * bh + (u & low)
    high = ah * bh + (u >> half) + (v >> half)
    if not signed:
        return high
    zero = np.uint64(0)
    high = high - np.where(np.asarray(a).view(np.int64) < 0, ub, zero)
    return (high - np.where(np.asarray(b).view(np.int64) < 0, ua, zero)).view(np.int64)


def popcount(x):
    """Set bits of each element."""
    return np.bitwise_count(x).astype(np.uint32)


def bitlen(x):
    """Index of the highest set bit plus 1; 0 for 0."""
    x = np.asarray(x).astype(np.uint64)
    r = np.zeros(x.shape, np.uint32)
    for k in (32, 16, 8, 4, 2, 1):
        big = x >= (np.uint64(1) << np.uint64(k))
        r += np.where(big, k, 0).astype(np.uint32)
        x = np.where(big, x >> np.uint64(k), x)
    return r + (x != 0)


def shl(a, n):
    """PTX clamps shift counts; C and numpy leave those of the width or more undefined."""
    bits = a.dtype.itemsize * 8
    return np.where(n >= bits, a.dtype.type(0), a << np.minimum(n, bits - 1).astype(a.dtype))


def shr(a, n):
    """As ``shl``: logical for unsigned dtypes, arithmetic for signed ones."""
    bits = a.dtype.itemsize * 8
    r = a >> np.minimum(n, bits - 1).astype(a.dtype)
    return r if a.dtype.kind == "i" else np.where(n >= bits, a.dtype.type(0), r)


def idiv(a, b):
    """Division that truncates toward zero; numpy's rounds down."""
    if a.dtype.kind == "u":
        return a // b
    u = UINT[a.dtype.itemsize]
    q = np.abs(a).astype(a.dtype).view(u) // np.abs(b).astype(a.dtype).view(u)
    return np.where((a < 0) != (b < 0), (~q + u(1)), q).view(a.dtype)
