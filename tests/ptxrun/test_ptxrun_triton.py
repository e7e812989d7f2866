"""Triton kernels, compiled ahead of time with no GPU and run by the interpreter, against numpy and torch."""

from __future__ import annotations

import numpy as np
import pytest

from . import Module, PtxError, Uninit
from .support import ARCHS, fmaf, from16, to16, to_float

pytestmark = pytest.mark.usefixtures("triton_kernels")
each_arch = pytest.mark.parametrize("cc", ARCHS)
each_width = pytest.mark.parametrize("warps", [4, 8])
POINTER = {"f32": "*fp32", "f16": "*fp16", "bf16": "*bf16"}
BLOCK = 1024
N = 5003


def launch(compiled, grid, args, **options):
    """Launches what ``aot`` gave."""
    mod, name = Module(compiled.asm["ptx"]), compiled.metadata.name
    # Triton adds pointers to global and profile scratch space, which these kernels do not use.
    args = [*args, *[0] * (len(mod.kernels[name].params) - len(args))]
    block = compiled.metadata.num_warps * 32
    return mod.launch(name, grid, block, args, shared_bytes=compiled.metadata.shared, **options)


def n_blocks(n):
    return (n + BLOCK - 1) // BLOCK


def compile_acc(kernels, ty, cc, warps=4, divisible=()):
    signature = {"a_ptr": "*fp32", "g_ptr": POINTER[ty], "scale": "fp32", "n": "i32"}
    return kernels.aot(kernels.optim.t_acc, signature, {"BLOCK": BLOCK}, cc, warps, divisible=divisible)


@each_arch
@each_width
@pytest.mark.parametrize("ty", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("aligned", [True, False])
def test_accumulate(triton_kernels, cc, warps, ty, aligned):
    n = 5008 if aligned else N
    divisible = ["a_ptr", "g_ptr", "n"] if aligned else ["a_ptr", "g_ptr"]
    compiled = compile_acc(triton_kernels, ty, cc, warps, divisible)
    r = np.random.default_rng(0)
    acc, grad = r.standard_normal(n).astype(np.float32), r.standard_normal(n).astype(np.float32)
    grad = grad if ty == "f32" else to16(grad, ty)
    want = fmaf(0.37, to_float(grad, ty), acc)
    stats = launch(compiled, n_blocks(n), [acc, grad, 0.37, n], check_races="all")
    assert np.array_equal(acc, want)
    # Without a hint that n is divisible, the masks leave scalar accesses.
    assert (max(width for _, width in stats.widths()) == 16) == aligned
    assert stats.global_read == n * (4 + grad.itemsize)
    assert stats.global_written == 4 * n


@each_arch
@each_width
@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("bad", [True, False])
def test_accumulate_with_norm_and_flag(triton_kernels, cc, warps, atomic, bad):
    signature = {"a_ptr": "*fp32", "g_ptr": "*bf16", "part_ptr": "*fp32", "flag_ptr": "*i32"}
    signature |= {"scale": "fp32", "n": "i32"}
    constants = {"BLOCK": BLOCK, "ATOMIC": atomic}
    divisible = ["a_ptr", "g_ptr", "part_ptr"]
    fn = triton_kernels.optim.t_accnorm
    compiled = triton_kernels.aot(fn, signature, constants, cc, warps, divisible=divisible)
    r = np.random.default_rng(0)
    acc, grad = r.standard_normal(N).astype(np.float32), to16(r.standard_normal(N).astype(np.float32), "bf16")
    if bad:
        grad[4321] = 0x7FC0
    want = fmaf(0.37, from16(grad, "bf16"), acc)
    part, flag = np.zeros(1 if atomic else n_blocks(N), np.float32), np.zeros(1, np.int32)
    args = [acc, grad, part if atomic else Uninit(part), flag, 0.37, N]
    launch(compiled, n_blocks(N), args, check_races="all")
    assert np.array_equal(acc, want, equal_nan=True)
    assert flag[0] == bad
    if not bad:
        # fp32 sums of 5,000 squares in trees of depth 13: 13 * 2**-24 is below 1e-6.
        assert abs(part.astype(np.float64).sum() / (want.astype(np.float64) ** 2).sum() - 1) < 1e-6


@each_arch
@each_width
@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_adamw_is_bitwise_without_fusion(triton_kernels, cc, warps, found_inf, fusion):
    f32 = np.float32
    hyper = {"lr": 1e-3, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "wd": 0.01, "bc1": 0.5, "bc2": 0.25}
    hyper = {name: f32(x) for name, x in hyper.items()}
    pointers = {"p_ptr": "*fp32", "m_ptr": "*fp32", "v_ptr": "*fp32", "g_ptr": "*bf16", "pb_ptr": "*bf16"}
    signature = pointers | {"inv_scale_ptr": "*fp32", "found_ptr": "*fp32", "n": "i32"} | dict.fromkeys(hyper, "fp32")
    options = {"divisible": list(pointers), "enable_fp_fusion": fusion}
    compiled = triton_kernels.aot(triton_kernels.optim.t_adamw, signature, {"BLOCK": BLOCK}, cc, warps, **options)
    r = np.random.default_rng(1)
    p, m = r.standard_normal(N).astype(f32), (r.standard_normal(N) * 0.1).astype(f32)
    v, grad = (r.random(N) * 1e-3).astype(f32), to16((r.standard_normal(N) * 1024).astype(f32), "bf16")
    inv, one = f32(1 / 1024), f32(1)
    got_p, got_m, got_v, got_bf16 = p.copy(), m.copy(), v.copy(), np.zeros(N, np.uint16)
    args = [got_p, got_m, got_v, grad, Uninit(got_bf16), np.array([inv]), np.array([f32(found_inf)])]
    stats = launch(compiled, n_blocks(N), [*args, *hyper.values(), N], check_races="all")
    if found_inf:
        assert np.array_equal(got_p, p)
        assert stats.global_written == 0
        return
    lr, b1, b2, eps, wd, bc1, bc2 = hyper.values()
    x = from16(grad, "bf16") * inv
    want_m = b1 * m + (one - b1) * x
    want_v = b2 * v + (one - b2) * x * x
    want_p = p * (one - lr * wd)
    want_p = want_p - (lr / bc1) * (want_m / (np.sqrt(want_v) / bc2 + eps))
    if fusion:  # a few roundings fewer: some ulps, at most 2**-22 of the operands
        assert np.allclose(got_p, want_p, rtol=1e-6, atol=1e-6)
        assert np.allclose(got_m, want_m, rtol=1e-6, atol=1e-7)
        assert np.allclose(got_v, want_v, rtol=2e-6, atol=0)
    else:
        assert np.array_equal(got_m, want_m)
        assert np.array_equal(got_v, want_v)
        assert np.array_equal(got_p, want_p)
    assert stats.approx, "Triton's / is div.full, which a GPU does not round correctly"
    assert np.array_equal(got_bf16, to16(got_p, "bf16"))


def philox(seed, counters):
    """The first word of Philox 4x32-10."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c = [counters.astype(np.uint64), *(np.zeros(counters.size, np.uint64) for _ in range(3))]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> half) ^ c[1] ^ np.uint64(k0), b & low, (a >> half) ^ c[3] ^ np.uint64(k1), a & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c[0].astype(np.uint32)


@each_arch
@each_width
def test_stochastic_rounding(triton_kernels, cc, warps):
    signature = {"x_ptr": "*fp32", "y_ptr": "*u16", "n": "i32", "seed": "i32"}
    fn = triton_kernels.optim.t_sr
    compiled = triton_kernels.aot(fn, signature, {"BLOCK": BLOCK}, cc, warps, divisible=["x_ptr", "y_ptr"])
    x = np.random.default_rng(2).standard_normal(N).astype(np.float32)
    x[:4] = [np.inf, -np.inf, np.nan, 0]
    y, seed = np.zeros(N, np.uint16), 1234567
    launch(compiled, n_blocks(N), [x, Uninit(y), N, seed], check_races="all")
    bits = x.view(np.uint32)
    want = ((bits + (philox(seed, np.arange(N)) & np.uint32(0xFFFF))) >> 16).astype(np.uint16)
    special = ~np.isfinite(x)
    want[special] = np.where(np.isnan(x[special]), 0x7FFF, bits[special] >> 16)
    assert np.array_equal(y, want)


@each_arch
@each_width
def test_sum_of_rows(triton_kernels, cc, warps):
    signature = {"x_ptr": "*fp16", "o_ptr": "*fp32", "n": "i32", "stride": "i32"}
    fn, divisible = triton_kernels.optim.t_rowsum, ["x_ptr", "o_ptr", "stride"]
    compiled = triton_kernels.aot(fn, signature, {"BLOCK": 512}, cc, warps, divisible=divisible)
    x = np.random.default_rng(3).integers(-8, 8, (7, 1616)).astype(np.float32)
    out = np.zeros(7, np.float32)
    launch(compiled, 7, [to16(x, "f16"), Uninit(out), 1605, 1616], check_races="all")
    assert np.array_equal(out, x[:, :1605].sum(1))


def test_a_size_that_is_too_large_is_found(triton_kernels):
    compiled = compile_acc(triton_kernels, "bf16", 90)
    with pytest.raises(PtxError, match="out of bounds"):
        launch(compiled, 1, [np.zeros(100, np.float32), np.zeros(100, np.uint16), 1.0, 101])


def test_a_false_claim_of_alignment_is_found(triton_kernels):
    compiled = compile_acc(triton_kernels, "bf16", 90, divisible=["a_ptr", "g_ptr", "n"])
    mod = Module(compiled.asm["ptx"])
    acc = mod.mem.alloc(np.zeros(112, np.float32), misalign=4)
    args = [acc, np.zeros(112, np.uint16), 1.0, 112, *[0] * (len(mod.kernels["t_acc"].params) - 4)]
    with pytest.raises(PtxError, match="misaligned"):
        mod.launch("t_acc", 1, 128, args)
