"""Float instructions run from PTX: rounding modes, NaN, packed and mixed types, comparisons; what is refused."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from .floats import bf2f, d2h, h2d
from .instructions import memory as memory_instructions
from .snippets import STORE_R6, run_snippet, snippet_module, words
from .support import fmaf

F32_IN = "mov.b32 %f1, %r4; mov.b32 %f2, %r5; "
F32_OUT = " mov.b32 %r6, %f3;" + STORE_R6


def normal_bits(seed, n=256, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32).view(np.uint32)


def as_float(got):
    return got.astype(np.uint32).view(np.float32)


@pytest.fixture
def mixed_rows():
    """Columns: an f16, a bf16, two f32."""
    rows = words(256, 9)
    r = np.random.default_rng(8)
    rows[:, 0] = d2h(r.standard_normal(256) * 100, "f16")
    rows[:, 1] = d2h(r.standard_normal(256), "bf16")
    rows[:, 2], rows[:, 3] = normal_bits(1, scale=10), normal_bits(2)
    return rows


MIXED_IN = "mov.b32 {%h1, %h3}, %r2; mov.b32 {%h2, %h3}, %r3; " + F32_IN


def test_mixed_precision(mixed_rows):
    f = mixed_rows[:, 2].view(np.float32)
    half = h2d(mixed_rows[:, 0].astype(np.uint16), "f16").astype(np.float32)
    bf16 = bf2f(mixed_rows[:, 1].astype(np.uint16))
    for body, want in (
        ("add.rn.f32.f16 %f3, %h1, %f1;", half + f),
        ("sub.f32.bf16 %f3, %h2, %f1;", bf16 - f),
        ("fma.rn.f32.f16 %f3, %h1, %h1, %f1;", fmaf(half, half, f)),
    ):
        assert np.array_equal(as_float(run_snippet(MIXED_IN + body + F32_OUT, mixed_rows)), want)


def test_packed_f32(mixed_rows):
    f, g = mixed_rows[:, 2].view(np.float32), mixed_rows[:, 3].view(np.float32)
    body = "mov.b64 %d5, {%r4, %r5}; mov.b64 %d6, {%r5, %r4}; fma.rn.f32x2 %d9, %d5, %d6, %d5;"
    got = run_snippet(body, mixed_rows)
    assert np.array_equal(as_float(got & np.uint64(0xFFFFFFFF)), fmaf(f, g, f))
    assert np.array_equal(as_float(got >> np.uint64(32)), fmaf(g, f, g))


def test_conversion_to_packed_halves(mixed_rows):
    f, g = mixed_rows[:, 2].view(np.float32), mixed_rows[:, 3].view(np.float32)
    body = "cvt.rn.bf16x2.f32 %r6, %f1, %f2; cvt.rn.f16x2.f32 %r7, %f2, %f1; mov.b64 %d9, {%r6, %r7};"
    got = run_snippet(MIXED_IN + body, mixed_rows).view(np.uint16).reshape(-1, 4)
    # The first source goes to the upper half.
    want = [d2h(g, "bf16"), d2h(f, "bf16"), d2h(f, "f16"), d2h(g, "f16")]
    assert np.array_equal(got, np.stack(want, 1))


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("op", ["mul", "add", "sub"])
def test_directed_rounding(op, mode):
    rows = words(256, 11)
    rows[:, 2], rows[:, 3] = normal_bits(3), normal_bits(4)
    exact = {"mul": Fraction.__mul__, "add": Fraction.__add__, "sub": Fraction.__sub__}[op]
    got = as_float(run_snippet(F32_IN + f"{op}.{mode}.f32 %f3, %f1, %f2;" + F32_OUT, rows))
    f, g = rows[:, 2].view(np.float32), rows[:, 3].view(np.float32)
    for a, b, v in zip(f.tolist(), g.tolist(), got, strict=True):
        e = exact(Fraction(a), Fraction(b))
        up = mode == "rp" or (mode == "rz" and e < 0)
        beyond = Fraction(float(np.nextafter(v, np.float32(-np.inf if up else np.inf))))
        if up:
            assert beyond < e <= Fraction(float(v))
        else:
            assert Fraction(float(v)) <= e < beyond


@pytest.mark.parametrize(
    "body",
    [
        "sub.f32 %f3, %f1, %f1;",
        "mul.rn.f32 %f3, %f1, 0f00000000;",
        "fma.rn.f32 %f3, %f1, 0f00000000, %f2;",
        "neg.f32 %f2, %f1; sqrt.rn.f32 %f3, %f2;",
        "div.rn.f32 %f3, %f1, %f1;",
    ],
)
def test_nan_is_a_gpus(body):
    rows = words(256, 11)
    rows[:, 2] = 0x7F800000
    assert (run_snippet(F32_IN + body + F32_OUT, rows) == 0x7FFFFFFF).all()


@pytest.mark.parametrize(
    "body",
    [
        "add.rn.f32.foo %f3, %f1, %f1;",
        "ld.global.weird.u32 %r6, [%d3];",
        "setp.lt.bogus.u32 %p1, %r2, %r3;",
        "setp.bogus.u32 %p1, %r2, %r3;",
        "min.xorsign.abs.f32 %f3, %f1, %f1;",
        "cvt.rna.tf32.f32 %r6, %f1;",
        "cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f1;",
        "shl.b32.b32 %r6, %r2, %r3;",
        "add.u32 %r6, %r2, %r3, %r4;",
        "mul.f32 %f3, %f1;",
        "mul.wide.u64 %d9, %d1, %d1;",
        "cvt.pack.sat.u8.s32.b32 %r6, %r2, %r3, %r4;",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 %f1, %f1, %f1, %f1;",
        "atom.global.add.noftz.f16.x %h1, [%d3], %h2;",
        "atom.global.u32 %r6, [%d3], %r2;",
        "fma.rn.f32.f16 %f3, %h1, %f1;",
        "mul.rn.f32.f16 %f3, %h1, %f1;",
    ],
)
def test_what_is_not_known_is_refused(body):
    assert len(snippet_module(body + " mov.u64 %d9, 0;").unsupported("k")) == 1


class TestSpecialValues:
    """On zeros, infinities, NaN and subnormals as well as normal numbers."""

    @pytest.fixture(autouse=True)
    def _rows(self):
        self.rows = words(128, 13)
        self.rows[:, 0] = normal_bits(1, 128)
        special = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 1])
        self.rows[:8, 0] = special.view(np.uint32)
        self.x, self.y = self.rows[:, 0].view(np.float32), self.rows[:, 3].view(np.float32)

    def run(self, body):
        body = "mov.b32 %f1, %r2; mov.b32 %f2, %r5; " + body + STORE_R6
        return run_snippet(body, self.rows).astype(np.uint32)

    def run_float(self, instruction):
        return self.run(instruction + " mov.b32 %r6, %f3;")

    @pytest.mark.parametrize("kind", ["finite", "infinite", "notanumber", "subnormal"])
    def test_testp(self, kind):
        got = self.run(f"testp.{kind}.f32 %p1, %f1; selp.u32 %r6, 1, 0, %p1;")
        tiny = (self.x != 0) & (np.abs(self.x) < np.finfo(np.float32).tiny)
        want = {"finite": np.isfinite(self.x), "infinite": np.isinf(self.x), "notanumber": np.isnan(self.x)}
        assert np.array_equal(got, want.get(kind, tiny))

    def test_copysign(self):
        want = (self.rows[:, 0] & 0x80000000) | (self.rows[:, 3] & 0x7FFFFFFF)
        assert np.array_equal(self.run_float("copysign.f32 %f3, %f1, %f2;"), want)

    def test_set_and_slct(self):
        got = self.run("set.lt.u32.f32 %r6, %f1, 0f00000000;")
        assert np.array_equal(got, np.where(self.x < 0, 0xFFFFFFFF, 0))
        got = self.run("slct.u32.s32 %r6, 3, 4, %r3;")
        assert np.array_equal(got, np.where(self.rows[:, 1].view(np.int32) >= 0, 3, 4))

    def test_isspacep(self):
        body = "isspacep.global %p1, %d1; isspacep.shared %p2, %d1; selp.u32 %r6, 1, 0, %p1; "
        assert (self.run(body + "@%p2 add.u32 %r6, %r6, 2;") == 1).all()

    def test_comparisons_with_nan(self):
        body = "setp.nan.f32 %p1, %f1, %f1; setp.num.f32 %p2, %f1, %f1; setp.equ.or.f32 %p3, %f1, 0f3F800000, %p1; "
        got = self.run(body + "selp.u32 %r6, 1, 0, %p3; @!%p2 add.u32 %r6, %r6, 2;")
        assert np.array_equal(got, np.where(np.isnan(self.x), 3, self.x == 1))

    def test_half_tanh(self):
        got = self.run("cvt.rn.f16.f32 %h1, %f1; tanh.approx.f16 %h2, %h1; mov.b32 %r6, {%h2, %h1};")
        half = self.x[8:].astype(np.float16).astype(float)
        tanh = got[8:].astype(np.uint16).view(np.float16)
        assert np.abs(tanh - np.tanh(half)).max() <= 2.0**-12  # half an ulp below 1

    def test_flush_saturate_min_max(self):
        assert np.array_equal(self.run_float("add.ftz.f32 %f3, %f1, 0f00000000;")[5:7], [0, 0])
        assert self.run_float("max.NaN.f32 %f3, %f1, 0f00000000;")[4] == 0x7FFFFFFF
        assert self.run_float("max.f32 %f3, %f1, 0f80000000;")[4] == 0x80000000
        assert self.run_float("min.f32 %f3, %f1, 0f00000000;")[:2].tolist() == [0, 0x80000000]
        got = self.run_float("add.sat.f32 %f3, %f1, 0f3F000000;").view(np.float32)
        want = np.where(np.isnan(self.x), 0, np.clip(self.x + np.float32(0.5), 0, 1))
        assert np.array_equal(got, want)


def test_every_atomic_on_integers_is_known():
    for kind in memory_instructions._ATOMIC:
        assert not snippet_module(f"atom.global.{kind}.u32 %r6, [%d3], %r2;" + STORE_R6).unsupported("k"), kind


def test_inner_registers_hide_outer_ones_and_names_are_not_copied():
    # A copy of all names for each instruction took 7 GB for an nvcc kernel of 18,000 instructions.
    body = "add.u32 %r6, %r2, 1; { .reg .b32 %r6; add.u32 %r6, %r2, 5; mov.u32 %r7, %r6; } add.u32 %r6, %r6, %r7;"
    assert run_snippet(body + STORE_R6, [[10, 0, 0, 0]]).tolist() == [26]
    kernel = snippet_module("mov.u64 %d9, 1;" * 50).kernels["k"]
    assert len({id(ins.scope[0]) for ins in kernel.code}) == 1
