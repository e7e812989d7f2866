"""Integer and bit instructions, run from PTX, against Python's integers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from .floats import bf2f
from .snippets import STORE_R6, run_snippet, words

M32, M64 = 2**32 - 1, 2**64 - 1


def signed(v, bits=32):
    return v - (1 << bits) if v >> (bits - 1) else v


def divide(a, b):
    """Truncating."""
    return int(Fraction(a, b))


def extract_field(a, pos, length, is_signed):
    pos, length = pos & 255, length & 255
    sign = (a >> min(pos + length - 1, 31)) & 1 if is_signed and length else 0
    return sum(((a >> (pos + i) & 1) if i < length and pos + i < 32 else sign) << i for i in range(32))


def insert_field(a, b, pos, length):
    pos, length = pos & 255, length & 255
    for i in range(min(length, 32 - pos)):
        b = b & ~(1 << pos + i) | (a >> i & 1) << pos + i
    return b


def permute_bytes(a, b, selector):
    v, r = (b << 32) | a, 0
    for i in range(4):
        s = selector >> 4 * i & 15
        byte = v >> 8 * (s & 7) & 255
        r |= (255 * (byte >> 7) if s & 8 else byte) << 8 * i
    return r


# PTX that leaves its result in %r6, and what that is for the row a, b, c, d.
ON_32_BITS = [
    ("bfe.u32 %r6, %r2, %r4, %r5;", lambda a, b, c, d: extract_field(a, c, d, False)),
    ("bfe.s32 %r6, %r2, %r4, %r5;", lambda a, b, c, d: extract_field(a, c, d, True)),
    ("bfi.b32 %r6, %r2, %r3, %r4, %r5;", insert_field),
    ("prmt.b32 %r6, %r2, %r3, %r4;", lambda a, b, c, d: permute_bytes(a, b, c)),
    ("lop3.b32 %r6, %r2, %r3, %r4, 0xCA;", lambda a, b, c, d: (a & b) | (~a & M32 & c)),
    ("lop3.b32 %r6, %r2, %r3, %r4, 0x96;", lambda a, b, c, d: a ^ b ^ c),
    ("shl.b32 %r6, %r2, %r4;", lambda a, b, c, d: (a << c) & M32 if c < 32 else 0),
    ("shr.u32 %r6, %r2, %r4;", lambda a, b, c, d: a >> c if c < 32 else 0),
    ("shr.s32 %r6, %r2, %r4;", lambda a, b, c, d: (signed(a) >> min(c, 31)) & M32),
    ("shf.l.wrap.b32 %r6, %r2, %r3, %r4;", lambda a, b, c, d: (((b << 32 | a) << (c & 31)) >> 32) & M32),
    ("shf.r.clamp.b32 %r6, %r2, %r3, %r4;", lambda a, b, c, d: ((b << 32 | a) >> min(c, 32)) & M32),
    ("popc.b32 %r6, %r2;", lambda a, b, c, d: bin(a).count("1")),
    ("clz.b32 %r6, %r4;", lambda a, b, c, d: 32 - c.bit_length()),
    ("brev.b32 %r6, %r2;", lambda a, b, c, d: int(f"{a:032b}"[::-1], 2)),
    ("bfind.s32 %r6, %r2;", lambda a, b, c, d: ((~a & M32 if a >> 31 else a).bit_length() - 1) & M32),
    ("mul.hi.s32 %r6, %r2, %r3;", lambda a, b, c, d: (signed(a) * signed(b) >> 32) & M32),
    ("mul.hi.u32 %r6, %r2, %r3;", lambda a, b, c, d: a * b >> 32),
    ("mad.lo.s32 %r6, %r2, %r3, %r4;", lambda a, b, c, d: (a * b + c) & M32),
    ("max.s32 %r6, %r2, %r3;", lambda a, b, c, d: max(signed(a), signed(b)) & M32),
    ("min.u32 %r6, %r2, %r3;", lambda a, b, c, d: min(a, b)),
    ("div.s32 %r6, %r2, %r3;", lambda a, b, c, d: divide(signed(a), signed(b)) & M32),
    (
        "rem.s32 %r6, %r2, %r3;",
        lambda a, b, c, d: (signed(a) - divide(signed(a), signed(b)) * signed(b)) & M32,
    ),
    ("sad.u32 %r6, %r2, %r3, %r4;", lambda a, b, c, d: (abs(a - b) + c) & M32),
    ("cvt.s32.s8 %r6, %r2;", lambda a, b, c, d: signed(a & 255, 8) & M32),
    ("cvt.u32.u16 %r6, %r2;", lambda a, b, c, d: a & 0xFFFF),
    ("cvt.sat.u8.s32 %r6, %r2;", lambda a, b, c, d: max(0, min(255, signed(a)))),
    (
        "add.cc.u32 %r6, %r2, %r3; addc.u32 %r6, %r4, %r5;",
        lambda a, b, c, d: (c + d + (a + b >> 32)) & M32,
    ),
    ("sub.cc.u32 %r6, %r2, %r3; subc.u32 %r6, %r4, %r5;", lambda a, b, c, d: (c - d - (a < b)) & M32),
    (
        "setp.lt.s32 %p1|%p2, %r2, %r3; selp.u32 %r6, 5, 9, %p1; @%p2 add.u32 %r6, %r6, 100;",
        lambda a, b, c, d: 5 if signed(a) < signed(b) else 109,
    ),
    (
        "{ .reg .pred p; setp.lo.u32 p, %r2, %r3; selp.u32 %r6, 1, 2, !p; }",
        lambda a, b, c, d: 2 if a < b else 1,
    ),
    (
        "mov.b32 {%h1, %h2}, %r2; mov.b32 %r6, {%h2, %h1};",
        lambda a, b, c, d: (a >> 16) | (a & 0xFFFF) << 16,
    ),
    (
        "and.b32 %r7, %r2, 3; brx.idx %r7, T;\n T: .branchtargets L0, L1, L1, L2;\n"
        " L0: mov.u32 %r6, 10; bra E;\n L1: mov.u32 %r6, 20; bra E;\n L2: mov.u32 %r6, 30;\n E:",
        lambda a, b, c, d: (10, 20, 20, 30)[a & 3],
    ),
    (
        "mov.u32 %r6, 0; and.b32 %r7, %r2, 15; \n LP: setp.eq.u32 %p1, %r7, 0; @%p1 bra DN;"
        " add.u32 %r6, %r6, %r7; sub.u32 %r7, %r7, 1; bra LP;\n DN:",
        lambda a, b, c, d: sum(range((a & 15) + 1)),
    ),
]


def first_words(cases):
    return [body.split(";")[0][:40] for body, _ in cases]


@pytest.mark.parametrize(("body", "reference"), ON_32_BITS, ids=first_words(ON_32_BITS))
def test_32_bits(body, reference):
    rows = words()
    got = run_snippet(body + STORE_R6, rows)
    assert got.tolist() == [reference(*row) for row in rows.tolist()]


ON_64_BITS = [
    ("mul.hi.u64 %d9, %d5, %d6;", lambda a, b: a * b >> 64),
    ("mul.hi.s64 %d9, %d5, %d6;", lambda a, b: (signed(a, 64) * signed(b, 64) >> 64) & M64),
    ("mul.lo.s64 %d9, %d5, %d6;", lambda a, b: a * b & M64),
    ("mul.wide.s32 %d9, %r2, %r4;", lambda a, b: signed(a & M32) * signed(b & M32) & M64),
    ("bfe.u64 %d9, %d5, 13, 40;", lambda a, b: a >> 13 & (1 << 40) - 1),
    ("shr.s64 %d9, %d5, 70;", lambda a, b: M64 if a >> 63 else 0),
    ("div.u64 %d9, %d5, %d6;", lambda a, b: a // b),
]


@pytest.mark.parametrize(("body", "reference"), ON_64_BITS, ids=first_words(ON_64_BITS))
def test_64_bits(body, reference):
    rows = words(seed=6)
    got = run_snippet("mov.b64 %d5, {%r2, %r3}; mov.b64 %d6, {%r4, %r5};" + body, rows)
    assert got.tolist() == [reference(a + (b << 32), c + (d << 32)) for a, b, c, d in rows.tolist()]


def test_float_to_integer_clamps():
    rows = words()
    edges = np.float32([0, -0.0, 1.5, 2.5, -2.5, 1e10, -1e10, np.inf, -np.inf, np.nan, 255.5, -1])
    rows[: len(edges), 0] = edges.view(np.uint32)
    with np.errstate(invalid="ignore"):  # signalling NaNs among the random bits
        x = rows[:, 0].view(np.float32).astype(np.float64)
    for rounding, whole in (("rzi", np.trunc), ("rni", np.rint), ("rmi", np.floor), ("rpi", np.ceil)):
        got = run_snippet(f"mov.b32 %f1, %r2; cvt.{rounding}.s32.f32 %r6, %f1;" + STORE_R6, rows)
        want = [0 if np.isnan(v) else int(max(-(2**31), min(2**31 - 1, v))) & M32 for v in whole(x)]
        assert got.tolist() == want


def test_integer_to_float_rounds_as_told():
    rows = words()
    i = rows[:, 0].view(np.int32)

    def convert(rounding):
        body = f"cvt.{rounding}.f32.s32 %f1, %r2; mov.b32 %r6, %f1;" + STORE_R6
        return run_snippet(body, rows).astype(np.uint32).view(np.float32)

    assert np.array_equal(convert("rn"), i.astype(np.float32))
    exact = i.astype(np.float64)
    assert (convert("rm") <= exact).all()
    assert (convert("rp") >= exact).all()
    assert (np.abs(convert("rz")) <= np.abs(exact)).all()


@pytest.mark.parametrize("ty", ["s64", "u64"])
def test_64_bit_integer_to_float_rounds_once(ty):
    # Just above halfway between two bf16, and above an fp32: a first rounding to fp64 loses the last bit.
    rows = words(64)
    top = np.arange(64, dtype=np.uint64) << np.uint64(55) | np.uint64(0x4040000000000001)
    rows[:, 0], rows[:, 1] = top & np.uint64(M32), top >> np.uint64(32)
    value = [signed(v, 64) if ty == "s64" else v for v in top.tolist()]
    body = f"mov.b64 %d5, {{%r2, %r3}}; cvt.rn.bf16.{ty} %h1, %d5; cvt.rp.f32.{ty} %f1, %d5;"
    got = run_snippet(body + " mov.b32 %r6, {%h1, %h1}; mov.b32 %r7, %f1; mov.b64 %d9, {%r6, %r7};", rows)
    nearest, up = bf2f(got & np.uint64(0xFFFF)), (got >> np.uint64(32)).astype(np.uint32).view(np.float32)
    for v, n, u in zip(value, nearest, up, strict=True):
        neighbours = [bf2f(np.uint32(int(n.view(np.uint32) >> 16) + d)) for d in (1, -1)]
        error = abs(int(n) - v)
        assert all(error < abs(int(other) - v) for other in neighbours)
        assert int(np.nextafter(u, np.float32(-np.inf))) < v <= int(u)
