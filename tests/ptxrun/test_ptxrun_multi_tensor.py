"""CUDA kernels like an optimizer's, compiled by nvcc and run by the interpreter, against numpy and torch."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from . import Uninit
from .support import ARCHS, acc_and_grads, fmaf, from16, module, multi_tensor_meta, to16, to_float

pytestmark = [pytest.mark.usefixtures("nvcc"), pytest.mark.parametrize("arch", ARCHS)]
SIZES = [1, 3, 4, 1000, 4096, 5001, 2048, 777]
CHUNK = 2048


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "bf16_byval"])
def test_accumulate_is_bitwise_and_moves_the_least_bytes(arch, kind):
    mod, ty = module("multi_tensor", arch), kind.split("_")[0]
    tensors = acc_and_grads(ty, SIZES)
    misalign = {3: (4, 0), 5: (0, 4 if ty == "f32" else 2)}
    meta, n_blocks, addresses = multi_tensor_meta(mod, tensors, CHUNK, misalign)
    stats = mod.launch("acc_" + kind, n_blocks, 128, [meta, CHUNK, 0.37], check_races="all")
    for (acc, grad), address in zip(tensors, addresses, strict=True):
        want = fmaf(0.37, to_float(grad, ty), acc)
        got = mod.mem.read(address, np.float32, acc.size)
        assert np.array_equal(got.view(np.uint32), want.view(np.uint32))
    n = sum(SIZES)
    assert stats.global_read == n * (4 + tensors[0][1].itemsize)
    assert stats.global_written == 4 * n
    assert {("r", 16), ("w", 16)} <= set(stats.widths())
    assert not stats.approx


def block_sums_of_squares(tensors, ty):
    """What accnorm_bf16 sums in a block, in the same order: 256 lanes, trees within and across 8 warps."""
    lane = np.arange(32)
    sums = []
    for acc, grad in tensors:
        r = fmaf(0.5, to_float(grad, ty), acc)
        for start in range(0, acc.size, CHUNK):
            x = r[start : start + CHUNK]
            lanes = np.zeros(256, np.float32)
            for j in range(0, x.size, 256):
                part = x[j : j + 256]
                lanes[: part.size] = fmaf(part, part, lanes[: part.size])
            warps = lanes.reshape(8, 32)
            for step in (16, 8, 4, 2, 1):  # shfl.bfly
                warps = warps + warps[:, lane ^ step]
            v = np.zeros(32, np.float32)
            v[:8] = warps[:, 0]
            for step in (16, 8, 4, 2, 1):  # shfl.down: the highest lanes keep their own
                v = v + np.where(lane + step < 32, np.roll(v, -step), v)
            sums.append(v[0])
    return np.array(sums, np.float32)


BAD_BITS = {("bf16", "inf"): 0x7F80, ("f16", "inf"): 0x7C00, ("bf16", "nan"): 0x7FFF, ("f16", "nan"): 0x7FFF}


@pytest.mark.parametrize(("name", "ty"), [("accnorm_bf16", "bf16"), ("accnorm_f16_atomic", "f16")])
@pytest.mark.parametrize("bad", [None, "inf", "nan"])
def test_accumulate_with_norm_and_flag(arch, name, ty, bad):
    mod, atomic = module("multi_tensor", arch), name.endswith("atomic")
    tensors = acc_and_grads(ty, SIZES)
    if bad:
        tensors[3][1][17] = BAD_BITS[ty, bad]
    meta, n_blocks, addresses = multi_tensor_meta(mod, tensors, CHUNK)
    out, flag = np.zeros(1 if atomic else n_blocks, np.float32), np.zeros(1, np.int32)
    args = [meta, CHUNK, 0.5, out if atomic else Uninit(out), flag]
    mod.launch(name, n_blocks, 256, args, check_races="all")
    total = 0.0
    for (acc, grad), address in zip(tensors, addresses, strict=True):
        want = fmaf(0.5, to_float(grad, ty), acc)
        assert np.array_equal(mod.mem.read(address, np.float32, acc.size), want, equal_nan=True)
        total += float((want.astype(np.float64) ** 2).sum())
    assert flag[0] == bool(bad)
    if bad:
        return
    # fp32 sums of 18,000 squares in trees of depth < 25: 25 * 2**-24 is 1.5e-6 at worst, a tenth of it as it falls.
    assert abs(out.astype(np.float64).sum() / total - 1) < 1e-6
    if not atomic:
        assert np.array_equal(block_sums_of_squares(tensors, ty), out)


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_adamw_is_bitwise(arch, found_inf):
    mod, n, f32 = module("multi_tensor", arch), 10_003, np.float32
    r = np.random.default_rng(1)
    p, m = r.standard_normal(n).astype(f32), r.standard_normal(n).astype(f32) * f32(0.1)
    v = (r.random(n) * 1e-3).astype(f32)
    grad = to16(r.standard_normal(n).astype(f32) * 1024, "bf16")
    grad.flags.writeable = False
    hyper = [f32(x) for x in (1e-3, 0.9, 0.999, 1e-8, 0.01, 0.5, 0.25)]
    lr, b1, b2, eps, wd, bc1, bc2 = hyper
    inv, one = f32(1 / 1024), f32(1)
    got_p, got_m, got_v, got_bf16 = p.copy(), m.copy(), v.copy(), np.zeros(n, np.uint16)
    args = [got_p, got_m, got_v, grad, Uninit(got_bf16), np.array([inv]), np.array([f32(found_inf)])]
    stats = mod.launch("adamw", 5, 256, [*args, struct.pack("<7f", *hyper), n], check_races="all")
    if found_inf:
        assert np.array_equal(got_p, p)
        assert np.array_equal(got_m, m)
        assert stats.global_written == 0
        return
    x = from16(grad, "bf16") * inv
    want_m = b1 * m + (one - b1) * x
    want_v = b2 * v + ((one - b2) * x) * x
    want_p = p * fmaf(-lr, wd, one)  # nvcc contracts 1 - lr * wd
    want_p = want_p - (lr / bc1) * (want_m / (np.sqrt(want_v) / bc2 + eps))
    assert np.array_equal(got_p, want_p)
    assert np.array_equal(got_m, want_m)
    assert np.array_equal(got_v, want_v)
    assert np.array_equal(got_bf16, to16(want_p, "bf16"))
    assert stats.widths()["r", 16] == 3 * 16 * (n // 4)
    assert not stats.approx


def _hash32(v):
    v = (v ^ v >> 16) * np.uint32(0x7FEB352D)
    v = (v ^ v >> 15) * np.uint32(0x846CA68B)
    return v ^ v >> 16


def test_stochastic_rounding(arch):
    mod, n = module("multi_tensor", arch), 5000
    x = np.random.default_rng(2).standard_normal(n).astype(np.float32)
    x[:4] = [np.inf, -np.inf, np.nan, 0]
    y, seed = np.zeros(n, np.uint16), 0x123456789ABCDEF
    mod.launch("sr_bf16", (n + 255) // 256, 256, [x, Uninit(y), n, seed])
    low, high = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)
    random = _hash32(_hash32(np.arange(n, dtype=np.uint32) ^ low) + high)
    bits = x.view(np.uint32)
    want = ((bits + (random & np.uint32(0xFFFF))) >> 16).astype(np.uint16)
    special = ~np.isfinite(x)
    want[special] = np.where(np.isnan(x[special]), 0x7FFF, bits[special] >> 16)
    assert np.array_equal(y, want)
    error = from16(y, "bf16").astype(np.float64)[4:] - x[4:]
    assert error.min() < 0 < error.max()


def test_histogram_in_shared_memory(arch):
    mod, n = module("multi_tensor", arch), 3000
    x = np.random.default_rng(5).integers(0, 1000, n).astype(np.int32)
    counts, total = np.zeros(16, np.int32), np.zeros(1, np.uint64)
    mod.launch("hist", 4, 128, [x, counts, total, n])
    assert np.array_equal(counts, np.bincount(x & 15, minlength=16))
    assert total[0] == x.sum()


@pytest.mark.parametrize("order", [None, [3, 1, 0, 2]])
def test_last_block_sums_the_others(arch, order):
    mod, n = module("multi_tensor", arch), 3000
    x, part, out = np.arange(n, dtype=np.float32), np.zeros(4, np.float32), np.zeros(1, np.float32)
    args = [x, Uninit(part), Uninit(out), n]
    # Two blocks at a time: the count in device memory outlives a batch.
    options = {"shared_bytes": 512, "check_races": "all", "block_order": order, "batch_lanes": 256}
    mod.launch("two_phase", 4, 128, args, **options)
    assert out[0] == x.sum()
    assert part.sum() == x.sum()
