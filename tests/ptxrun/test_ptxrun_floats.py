"""The float helpers against exact references: Fraction, the C library, torch."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from .floats import d2h, fma32, fma64, h2d
from .instructions.floating import float_op
from .support import fma, fmaf


def float32_patterns(r, n):
    """Random bits: every exponent, and many short mantissas, which make halfway cases."""
    bits = r.integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32)
    cut = (np.uint32(1) << r.integers(0, 24, n).astype(np.uint32)) - np.uint32(1)
    return np.where(r.random(n) < 0.6, bits & ~cut, bits).view(np.float32)


def differing(a, b):
    same = (a.view(f"u{a.itemsize}") == b.view(f"u{b.itemsize}")) | (np.isnan(a) & np.isnan(b))
    return np.flatnonzero(~same)


def test_fma32():
    r = np.random.default_rng(0)
    n = 300_000
    a, b, c = (float32_patterns(r, n) for _ in range(3))
    k = n // 2  # c near the product, so that cancellation and ties happen
    with np.errstate(all="ignore"):
        near = a[:k].astype(float) * b[:k] * r.choice([1, -1, 2.0**-24, 2.0**24, -(2.0**-23), 2.0**23], k)
        c[:k] = near.astype(np.float32)
        got = fma32(a, b, c)
    assert not differing(got, fmaf(a, b, c)).size


def test_fma64():
    r = np.random.default_rng(1)
    n = 100_000
    a, b, c = (r.standard_normal(n) * 2.0 ** r.integers(-60, 60, n) for _ in range(3))
    c[:50000] = -a[:50000] * b[:50000]
    a[:20] = [0, np.inf, np.nan, 1e308, 1e-308] * 4
    b[:20] = [np.inf, 1, 2, 1e10, 1e-10] * 4
    with np.errstate(all="ignore"):
        got = fma64(a, b, c)
    assert not differing(got, fma(a, b, c)).size


@pytest.mark.parametrize(("ty", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_float32_to_half(ty, dtype):
    edges = [0, -0.0, np.inf, -np.inf, 65504, 65519.996, 65520, 2.0**-25, 2.0**-24, 3e38, 3.4e38]
    x = np.r_[float32_patterns(np.random.default_rng(2), 400_000), np.float32(edges)]
    want = torch.from_numpy(x).to(dtype).view(torch.int16).numpy().view(np.uint16)
    with np.errstate(all="ignore"):
        got = d2h(x, ty)
    nan = np.isnan(x)
    assert np.array_equal(got[~nan], want[~nan])
    assert (got[nan] == 0x7FFF).all()


def half_triples(ty, n):
    """Random bits; in the first half, c is near the product."""
    r = np.random.default_rng(3)
    a, b, c = (r.integers(0, 65536, n).astype(np.uint16) for _ in range(3))
    k = n // 2
    c[:k] = d2h(h2d(a[:k], ty) * h2d(b[:k], ty) * r.choice([-1, 1, 2.0**-11, 2.0**11, 2.0**-8], k), ty)
    return a, b, c


@pytest.mark.parametrize("ty", ["f16", "bf16"])
def test_half_fma_is_the_nearest_value(ty):
    with np.errstate(all="ignore"):
        triples = half_triples(ty, 60_000)
        got = h2d(float_op("fma", ty, ["rn", ty])(*triples), ty)
        values = np.unique(h2d(np.arange(65536, dtype=np.uint16), ty))
        a, b, c = (h2d(x, ty) for x in triples)
    values = values[np.isfinite(values)]
    largest, step = Fraction(float(values[-1])), Fraction(float(values[-1])) - Fraction(float(values[-2]))
    n_checked = 0
    for i in np.flatnonzero(np.isfinite(a) & np.isfinite(b) & np.isfinite(c)):
        exact = Fraction(a[i]) * Fraction(b[i]) + Fraction(c[i])
        g = got[i]
        if np.isinf(g):
            assert abs(exact) >= largest + step / 2
            continue
        j = np.searchsorted(values, g)
        error = abs(Fraction(float(g)) - exact)
        even = d2h(np.array([g]), ty)[0] & 1 == 0
        for q in (j - 1, j + 1):
            if 0 <= q < len(values):
                other = abs(Fraction(float(values[q])) - exact)
                assert error < other or (error == other and even), (a[i], b[i], c[i], g)
        n_checked += 1
    assert n_checked > 40_000
