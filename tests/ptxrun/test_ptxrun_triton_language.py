"""More of Triton's language: pipelined loops, two dimensions, scans, sorts, atomics; what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from . import PtxError, Uninit
from .support import ARCHS
from .test_ptxrun_triton import launch

pytestmark = pytest.mark.usefixtures("triton_kernels")
each_arch = pytest.mark.parametrize("cc", ARCHS)


def integers(n, low, high, seed=0):
    return np.random.default_rng(seed).integers(low, high, n)


@each_arch
@pytest.mark.parametrize("stages", [1, 3])
def test_pipelined_sum(triton_kernels, cc, stages):
    signature = {"x_ptr": "*fp16", "o_ptr": "*fp32", "n": "i32"}
    constants = {"BLOCK": 512, "ST": stages}
    fn = triton_kernels.language.p_sum
    compiled = triton_kernels.aot(fn, signature, constants, cc, divisible=["x_ptr", "n"])
    x, out = integers(10_000, -8, 8).astype(np.float16), np.zeros(1, np.float32)
    launch(compiled, 3, [x, out, x.size], check_races="all")
    assert out[0] == x.astype(np.float64).sum()


@each_arch
def test_softmax_of_rows(triton_kernels, cc):
    signature = {"x_ptr": "*fp32", "o_ptr": "*fp32", "M": "i32", "N": "i32"}
    compiled = triton_kernels.aot(triton_kernels.language.softmax2d, signature, {"BM": 4, "BN": 128}, cc)
    x = np.random.default_rng(1).standard_normal((10, 100)).astype(np.float32)
    out = np.zeros_like(x)
    launch(compiled, 3, [x, Uninit(out), 10, 100], check_races="all")
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    # x times log2(e) is off by 2**-24 of at most 8, the sum by 7 roundings: below 16 ulps.
    assert np.allclose(out, e / e.sum(1, keepdims=True), rtol=16 * 2.0**-24, atol=0)


@each_arch
def test_cumulative_sum(triton_kernels, cc):
    signature = {"x_ptr": "*i32", "o_ptr": "*i32", "n": "i32"}
    compiled = triton_kernels.aot(triton_kernels.language.scan, signature, {"BLOCK": 1024}, cc)
    x, out = integers(1000, -99, 99).astype(np.int32), np.zeros(1000, np.int32)
    launch(compiled, 1, [x, Uninit(out), 1000], check_races="all")
    assert np.array_equal(out, np.cumsum(x))


@each_arch
def test_scattered_atomic_add(triton_kernels, cc):
    signature = {"i_ptr": "*i32", "v_ptr": "*i32", "o_ptr": "*i32", "n": "i32"}
    compiled = triton_kernels.aot(triton_kernels.language.scatter_add, signature, {"BLOCK": 256}, cc)
    index, value = integers(1000, 0, 7).astype(np.int32), integers(1000, -99, 99, seed=1).astype(np.int32)
    out, want = np.zeros(7, np.int32), np.zeros(7, np.int32)
    stats = launch(compiled, 4, [index, value, out, 1000], check_races="all")
    np.add.at(want, index, value)
    assert np.array_equal(out, want)
    assert stats.atomics == 1000


@each_arch
def test_sort(triton_kernels, cc):
    signature = {"x_ptr": "*i32", "o_ptr": "*i32"}
    compiled = triton_kernels.aot(triton_kernels.language.srt, signature, {"BLOCK": 256}, cc)
    x, out = integers(256, -999, 999).astype(np.int32), np.zeros(256, np.int32)
    launch(compiled, 1, [x, Uninit(out)], check_races="all")
    assert np.array_equal(out, np.sort(x))


@each_arch
def test_half_arithmetic(triton_kernels, cc):
    signature = {"x_ptr": "*fp16", "y_ptr": "*fp16", "o_ptr": "*fp16", "n": "i32"}
    compiled = triton_kernels.aot(triton_kernels.language.f16x, signature, {"BLOCK": 256}, cc)
    x, y = (np.random.default_rng(s).standard_normal(300).astype(np.float16) for s in (1, 2))
    out = np.zeros(300, np.float16)
    launch(compiled, 2, [x, y, Uninit(out), 300], check_races="all")
    assert np.array_equal(out, np.maximum(x * y + x, -x) - y)


@each_arch
def test_matrix_product_is_refused(triton_kernels, cc):
    signature = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32"}
    compiled = triton_kernels.aot(triton_kernels.language.mm, signature, {"B": 32}, cc)
    a, b, c = np.zeros((32, 32), np.float16), np.zeros((32, 32), np.float16), np.zeros((32, 32), np.float32)
    with pytest.raises(PtxError, match="not supported"):
        launch(compiled, 1, [a, b, c])


@pytest.mark.parametrize("cc", [cc for cc in ARCHS if cc >= 89])  # Triton itself has no fp8e4nv before
def test_fp8_is_refused(triton_kernels, cc):
    signature = {"x_ptr": "*fp32", "o_ptr": "*fp8e4nv", "n": "i32"}
    compiled = triton_kernels.aot(triton_kernels.language.fp8, signature, {"BLOCK": 128}, cc)
    with pytest.raises(PtxError, match="not supported"):
        launch(compiled, 1, [np.zeros(128, np.float32), np.zeros(128, np.uint8), 128])
