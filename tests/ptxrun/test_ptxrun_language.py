"""Features of CUDA C++ beyond plain arithmetic, compiled by nvcc and run by the interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from . import PtxError, Uninit
from .support import ARCHS, module, to16

pytestmark = [pytest.mark.usefixtures("nvcc"), pytest.mark.parametrize("arch", ARCHS)]


def integers(n, high=1000):
    return np.random.default_rng(n).integers(0, high, n).astype(np.int32)


def normals(n):
    return np.random.default_rng(n).standard_normal(n).astype(np.float32)


def wrap32(v):
    return (v + 2**31) % 2**32 - 2**31


def test_local_array(arch):
    x, y = integers(300), np.zeros(300, np.int32)
    module("language", arch).launch("local_mem", 3, 128, [x, Uninit(y), 300])

    def one(v):
        a = [0] * 16
        for k in range(16):
            a[(k * 7 + v) & 15] = k
        s = 0
        for k in range(16):
            s = s * 3 + a[(k + v) & 15]
        return wrap32(s)

    assert y.tolist() == [one(v) for v in x.tolist()]


def test_initialised_device_variables(arch):
    x, y = integers(100), np.zeros(100, np.float32)
    module("language", arch).launch("tables", 1, 128, [x, Uninit(y), 100])
    assert np.array_equal(y, 2.0 ** (x & 7) + 10 * ((x & 3) + 1))


@pytest.mark.parametrize("pick", [0, 1])
def test_generic_pointer(arch, pick):
    x, y = normals(128), np.zeros(128, np.float32)
    module("language", arch).launch("generic", 1, 128, [x, Uninit(y), pick])
    assert np.array_equal(y, x[np.arange(128) ^ 1] * (2 if pick else 1))


def test_cp_async(arch):
    x, y = normals(1024), np.zeros(1024, np.float32)
    stats = module("language", arch).launch("cpasync", 2, 128, [x, Uninit(y)])
    assert np.array_equal(y.reshape(2, 128, 4), x.reshape(2, 128, 4)[:, ::-1])
    assert stats.global_read == 4096


def test_votes_matches_and_shuffles_of_part_of_a_warp(arch):
    x, y = integers(256), np.zeros(256, np.int32)
    module("language", arch).launch("warps", 2, 128, [x, Uninit(y)])
    want = []
    for warp in x.reshape(-1, 32).tolist():
        odd = [v for v in warp if v & 1]
        for v in warp:
            r = len(odd) + 100 * any(w > 990 for w in warp) + 1000 + max(warp)
            if v & 1:
                r += 7 * sum(o % 5 == v % 5 for o in odd) + 100000 + odd[0]
            want.append(r)
    assert y.tolist() == want


def test_tiles(arch):
    x, y = integers(256).astype(np.float32), np.zeros(32, np.float32)
    module("language", arch).launch("tiles", 2, 128, [x, Uninit(y)])
    assert np.array_equal(y, x.reshape(-1, 8).sum(1))


def _flow(v):
    s = 0
    for k in range(50):
        if k % 7 == v % 7:
            continue
        if k > (v & 31):
            break
        case = (k + v) % 6
        if case == 0:
            s += 1
        elif case == 1:
            s = (s + k) ^ 5
        elif case == 2:
            s ^= 5
        elif case == 3:
            s *= 3
        elif case == 4:
            s -= v
        else:
            s += 1000
        s = wrap32(s)
        w = v
        while w > 1:
            s = wrap32(s + (w & 1))
            w = 3 * w + 1 if w & 1 else w // 2
            if s > 1000000:
                break
    return s


def test_break_continue_switch_and_nested_divergence(arch):
    x, y = integers(500), np.zeros(500, np.int32)
    module("language", arch).launch("flow", 4, 128, [x, Uninit(y), 500])
    assert y.tolist() == [_flow(v) for v in x.tolist()]


def test_grid_of_three_dimensions(arch):
    y = np.zeros((37, 53), np.float32)
    options = {"args": [Uninit(y), 53, 37], "check_races": "all"}
    module("language", arch).launch("grid2d", (7, 10, 1), (8, 4), **options)
    assert np.array_equal(y, 1000 * np.arange(37)[:, None] + np.arange(53))
    with pytest.raises(PtxError, match="global memory race"):  # two z blocks write different values
        module("language", arch).launch("grid2d", (7, 10, 2), (8, 4), **options)


def test_atomics(arch):
    n = 400
    x, total, pair = normals(n), np.zeros(1), np.zeros(2, np.float16)
    largest, cas, last = np.zeros(1, np.int32), np.zeros(1, np.uint32), np.zeros(1, np.float32)
    module("language", arch).launch("atomics", 2, 256, [x, total, pair, largest, cas, last, n])
    assert abs(total[0] - x.astype(float).sum()) < 1e-9  # 400 additions of numbers near 1 in fp64: below 1e-12
    assert pair.tolist() == [400, 800]
    assert largest[0] == int((x * 1000).max())
    assert cas[0] == 3 * n
    assert last[0] in x


def test_threads_that_have_exited_at_a_barrier(arch):
    y = np.zeros(100, np.float32)
    with pytest.raises(PtxError, match="others have exited"):
        module("language", arch).launch("divergent_exit", 1, 128, [y, 100])
    mod = module("language", arch)
    stats = mod.launch("divergent_exit", 1, 128, [y, 100], allow_exited_at_barrier=True)
    assert np.array_equal(y, np.arange(100)[::-1])
    assert stats.warnings


@pytest.mark.parametrize("flags", [(), ("-use_fast_math",), ("-fmad=false",)])
def test_approximate_functions_are_counted(arch, flags):
    x, y = np.abs(normals(200)) + np.float32(0.1), np.zeros(200, np.float32)
    stats = module("language", arch, *flags).launch("fast", 1, 256, [x, Uninit(y), 200])
    d = x.astype(float)
    want = np.exp(d) + np.sin(d) / np.sqrt(d) / d + np.log(d) + np.clip(d, 0, 1)
    # __logf near 1 cancels, and the terms add up to at most 40: 2e-5 is what fast math's own error bounds give.
    assert np.allclose(y, want, rtol=2e-5)
    assert stats.approx


def test_shuffles_in_a_loop_with_uneven_warps(arch):
    x, y = integers(1777).astype(np.float32), np.zeros(1, np.float32)
    module("language", arch).launch("shuffle_loop", 3, 96, [x, y, 1777])
    assert y[0] == x.sum()


def test_vectors_and_sectors(arch):
    x, y, u, v = np.arange(64.0), np.zeros(64), integers(128).view(np.uint32), np.zeros(128, np.uint32)
    args = [x, Uninit(y), u, Uninit(v)]
    stats = module("language", arch).launch("vec64", 1, 32, args, count_sectors=True)
    assert np.array_equal(y.reshape(-1, 2), x.reshape(-1, 2)[:, ::-1])
    assert np.array_equal(v.reshape(-1, 4), u.reshape(-1, 4)[:, ::-1])
    rows = [row for row in stats.per_line.values() if row["space"] == "global"]
    assert {row["width"] for row in rows} == {16}
    assert all(row["sectors"] == row["bytes"] // 32 for row in rows)


def test_conversions(arch):
    f32 = np.float32
    edge = f32([1.99999, -0.0, 65504, 7.9999995, 1e-7, -1e-7, 100.5, 99.5])
    x = np.r_[normals(120) * 50, edge].astype(f32)
    n = x.size
    half, bf16, out = np.zeros(n, np.uint16), np.zeros(n, np.uint16), np.zeros((n, 4), f32)
    i8, u16, i64 = np.zeros(n, np.int8), np.zeros(n, np.uint16), np.zeros(n, np.int64)
    module("language", arch).launch("cvts", 1, n, [x, *(Uninit(a) for a in (half, bf16, out, i8, u16, i64))])
    assert np.array_equal(bf16, (x.view(np.uint32) >> 16).astype(np.uint16))
    toward_zero = to16(x, "f16")
    toward_zero -= np.abs(toward_zero.view(np.float16).astype(f32)) > np.abs(x)  # bits of a magnitude: one ulp less
    assert np.array_equal(half, toward_zero)
    small = np.abs(x) < 127
    assert np.array_equal(i8[small], np.trunc(x[small]).astype(np.int8))
    assert np.array_equal(u16, np.trunc(np.abs(x)).astype(np.uint16))
    assert np.array_equal(i64, np.trunc(x * f32(1e6)).astype(np.int64))
    assert np.array_equal(out[:, 0], x.astype(np.float16).astype(f32))
    assert np.array_equal(out[:, 1], x + ((123456789 + np.arange(n)) // 8 * 8).astype(f32))  # __int2float_rz
    assert np.array_equal(out[:, 2], np.rint(x))
    third = x.astype(float) / 3
    assert (out[:, 3] >= third).all()
    assert (np.nextafter(out[:, 3], f32(-np.inf)) < third).all()


def test_call_is_refused(arch):
    x, y = np.zeros(32, np.float32), np.zeros(32, np.float32)
    with pytest.raises(PtxError, match="call is not supported"):
        module("language", arch).launch("callee", 1, 32, [x, y])
