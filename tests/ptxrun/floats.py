"""Correctly rounded float arithmetic on numpy vectors, with a GPU's NaNs.

A fused operation on float32 or narrower is done in float64 *rounded to odd*, then rounded once more: with more than
two spare bits, the second rounding gives what a single one would have (Boldo and Melquiond, "Emulation of a FMA and
correctly rounded sums: proved algorithms using rounding to odd").
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from .ptxtypes import PtxError

FLOAT32_TINY = np.float32(1.17549435e-38)  # the smallest normal number
NAN32 = np.uint32(0x7FFFFFFF)
NAN16 = np.uint16(0x7FFF)


def bf2f(bits):
    """bf16 bits -> float32, exact."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def h2d(bits, ty):
    """Bits of ``ty`` (f16 or bf16) -> float64, exact."""
    bits = np.asarray(bits, np.uint16)
    return (bf2f(bits) if ty == "bf16" else bits.view(np.float16)).astype(np.float64)


def _to_odd(rounded, error):
    """``rounded + error`` is the exact value, the error below half an ulp: it rounded to odd (float64)."""
    bits = rounded.view(np.int64)
    fix = (error != 0) & ((bits & 1) == 0) & np.isfinite(rounded) & np.isfinite(error)
    return np.where(fix, bits + np.where((error > 0) == (rounded > 0), 1, -1), bits).view(np.float64)


def two_sum(a, b):
    """Sum and its exact error (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def fma_odd(a, b, c):
    """a*b+c in float64 rounded to odd, for a, b whose product is exact in float64 (float32 or narrower)."""
    product = np.asarray(a * b, np.float64)
    s, error = two_sum(product, np.asarray(c, np.float64))
    return _to_odd(np.asarray(s), np.asarray(error))


def int_odd(x):
    """Integers of up to 64 bits -> float64 rounded to odd; exact below 54 bits."""
    x = np.asarray(x)
    if x.dtype.itemsize < 8:
        return x.astype(np.float64)
    half = x.dtype.type(32)
    high, low = (x >> half).astype(np.float64) * 2.0**32, (x & x.dtype.type(0xFFFFFFFF)).astype(np.float64)
    return _to_odd(*two_sum(high, low))


def d2f(d, mode="rn"):
    """float64, exact or rounded to odd -> float32."""
    r = np.asarray(d).astype(np.float32)
    if mode == "rn":
        return r
    wide = r.astype(np.float64)
    up, down = np.nextafter(r, np.float32(np.inf)), np.nextafter(r, np.float32(-np.inf))
    low, high = np.where(wide > d, down, r), np.where(wide < d, up, r)
    return {"rm": low, "rp": high, "rz": np.where(np.signbit(d), high, low)}[mode]


def d2h(d, ty, mode="rn"):
    """float64, exact or rounded to odd -> bits of ``ty`` (f16 or bf16)."""
    if mode not in ("rn", "rz"):
        raise PtxError(f"rounding .{mode} to {ty} is not supported")
    d = np.asarray(d, np.float64)
    if ty == "bf16":
        f = d.astype(np.float32)
        bits, wide = f.view(np.uint32), f.astype(np.float64)
        inexact = (wide != d) & ~np.isnan(d) & ((bits & 1) == 0)  # to odd in float32 first
        odd = np.where(inexact, np.where(np.isinf(f) | (np.abs(wide) > np.abs(d)), bits - 1, bits + 1), bits)
        odd = odd.astype(np.uint32)
        r = odd >> 16 if mode == "rz" else (odd + 0x7FFF + ((odd >> 16) & 1)) >> 16
        return np.where(np.isnan(d), NAN16, r).astype(np.uint16)
    h = d.astype(np.float16)
    if mode == "rz":
        h = np.where(np.abs(h.astype(np.float64)) > np.abs(d), np.nextafter(h, np.float16(0)), h)
    return np.where(np.isnan(d), NAN16, h.view(np.uint16))


def fma32(a, b, c, mode="rn"):
    """float32 a*b+c, rounded once."""
    product = np.multiply(a, b, dtype=np.float64)
    s = np.asarray(product + c)
    if mode != "rn":
        return d2f(fma_odd(product, 1.0, c), mode)
    r = s.astype(np.float32)
    # Rounding twice differs from once only where the float64 sum lies halfway between floats, or is subnormal: the
    # slow way for those lanes alone.
    bad = ((s.view(np.uint64) & np.uint64(0x1FFFFFFF)) == 0x10000000) | (np.abs(r) < 1.2e-38)
    if bad.any():
        p, c = (np.broadcast_to(x, s.shape)[bad] for x in (product, c))
        r = np.array(r)
        r[bad] = fma_odd(p, 1.0, c.astype(np.float64)).astype(np.float32)
    return r


def _split(x):
    """Veltkamp: x as the sum of two numbers of 26 bits."""
    t = x * 134217729.0
    high = t - (t - x)
    return high, x - high


def fma64(a, b, c):
    """float64 a*b+c, rounded once.

    Boldo and Melquiond's algorithm; where the error of a product may under- or overflow, exact rationals.
    """
    a, b, c = np.broadcast_arrays(*(np.atleast_1d(np.asarray(x, np.float64)) for x in (a, b, c)))
    p = a * b
    (ah, al), (bh, bl) = _split(a), _split(b)
    p_error = al * bl - (((p - ah * bh) - al * bh) - ah * bl)
    t_high, t_low = two_sum(c, p_error)
    v_high, v_low = two_sum(p, t_high)
    r = v_high + _to_odd(*two_sum(t_low, v_low))
    magnitudes = [np.abs(x) for x in (a, b, p, c)]
    risky = (np.maximum.reduce(magnitudes) > 1e290) | ((magnitudes[2] < 1e-270) & (a != 0) & (b != 0))
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    r = np.where(finite & (a != 0) & (b != 0), r, p + c)
    for i in np.flatnonzero(risky & finite):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        try:
            r[i] = float(exact) if exact else p[i] + c[i]
        except OverflowError:
            r[i] = np.inf if exact > 0 else -np.inf
    return r


def flush32(x):
    """.ftz: float32 subnormals to zero of their sign; other types unchanged."""
    if x.dtype != np.float32:
        return x
    return np.where(np.abs(x) < FLOAT32_TINY, np.copysign(np.float32(0), x), x)


def canon(r):
    """float32 NaN results as a GPU gives them, 0x7fffffff: code that rounds by hand on the bits depends on it."""
    r = np.asarray(r)
    if r.dtype == np.float32 and r.size and np.isnan(r.min()):
        return np.where(np.isnan(r), NAN32, r.view(np.uint32)).view(np.float32)
    return r


def fmin_max(a, b, largest, nan):
    """min or max; -0 counts as below +0; ``nan``: a NaN operand gives NaN instead of the other operand."""
    r = (np.fmax if largest else np.fmin)(a, b)
    negative = np.signbit(a) & np.signbit(b) if largest else np.signbit(a) | np.signbit(b)
    r = np.where((a == 0) & (b == 0), np.where(negative, -0.0, 0.0), r).astype(r.dtype)
    return np.where(np.isnan(a) | np.isnan(b), np.asarray(np.nan, r.dtype), r) if nan else r
