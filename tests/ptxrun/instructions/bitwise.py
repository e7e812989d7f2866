"""Logic, shifts, bit fields and bit counts."""

from __future__ import annotations

import numpy as np

from ..bits import bitlen, popcount, shl, shr
from ..parser import parse_imm
from ..ptxtypes import DTYPE, UINT, size_of
from .base import instruction, only, simple


@instruction("and", "or", "xor", "not", "cnot")
def _logic(link, ins):
    ty = ins.types[-1]
    f = {
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "not": np.invert,
        "cnot": lambda a: (a == 0).astype(DTYPE[ty]),
    }[ins.op]
    simple(link, ins, f, [ty] * 2)


@instruction("shl", "shr")
def _shift(link, ins):
    f = shl if ins.op == "shl" else shr
    simple(link, ins, lambda a, n: f(np.asarray(a), np.asarray(n)), [ins.types[-1], "u32"])


@instruction("shf")
def _funnel_shift(link, ins):
    left, wrap = "l" in ins.mods, "wrap" in ins.mods

    def f(low, high, n):
        n = (n & np.uint32(31) if wrap else np.minimum(n, np.uint32(32))).astype(np.uint64)
        v = np.asarray(high).astype(np.uint64) << np.uint64(32) | np.asarray(low).astype(np.uint64)
        return ((v << n) >> np.uint64(32) if left else v >> n).astype(np.uint32)

    simple(link, ins, f, ["b32", "b32", "u32"])


@instruction("lop3")
def _lop3(link, ins):
    only(ins.mods)
    table = parse_imm(ins.args.pop(), "u32")

    def f(a, b, c):
        r = np.uint32(0)
        for i in range(8):
            if table >> i & 1:
                r = r | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return r

    simple(link, ins, f, ["b32"] * 3)


@instruction("prmt")
def _prmt(link, ins):
    only(ins.mods)

    def f(a, b, selector):
        v = np.asarray(b).astype(np.uint64) << np.uint64(32) | np.asarray(a).astype(np.uint64)
        r = np.uint32(0)
        for i in range(4):
            s = (np.asarray(selector) >> np.uint32(4 * i)) & np.uint32(15)
            byte = (v >> ((s & np.uint32(7)).astype(np.uint64) * np.uint64(8))).astype(np.uint8)
            sign = np.where(byte & 0x80, 0xFF, 0)
            r = r | np.where(s & np.uint32(8), sign, byte).astype(np.uint32) << np.uint32(8 * i)
        return r

    simple(link, ins, f, ["b32"] * 3)


def _low_ones(like, n):
    """n low bits set, n up to the width, as a vector of ``like``'s type and shape."""
    one = like.dtype.type(1)
    return shl(one + np.zeros_like(like), n) - one


@instruction("bfe")
def _bfe(link, ins):
    ty = ins.types[-1]
    bits, signed = 8 * size_of(ty), ty[0] == "s"
    u = UINT[bits // 8]

    def f(a, pos, length):
        a, pos, length = np.asarray(a).view(u), np.asarray(pos) & 255, np.asarray(length) & 255
        mask = np.where(length >= bits, ~u(0), _low_ones(a, length))
        r = shr(a, pos) & mask
        if signed:
            top = np.minimum(pos.astype(np.int64) + length - 1, bits - 1)
            negative = (shr(a, np.maximum(top, 0)) & u(1)).astype(bool) & (length > 0)
            available = np.maximum(bits - pos.astype(np.int64), 0)  # bits past the top are copies of the sign
            fill = np.where(length >= bits, u(0), ~mask)
            fill = np.where(available < length, ~_low_ones(a, available), fill)
            r = np.where(negative, r | fill, r)
        return r

    simple(link, ins, f, [ty, "u32", "u32"])


@instruction("bfi")
def _bfi(link, ins):
    ty = ins.types[-1]
    u, bits = DTYPE[ty], 8 * size_of(ty)

    def f(a, b, pos, length):
        pos, length, zero = (
            np.asarray(pos) & 255,
            np.asarray(length) & 255,
            np.zeros_like(np.asarray(a) + np.asarray(b)),
        )
        mask = shl(np.where(length >= bits, ~u(0), _low_ones(zero, length)), pos)
        return (shl(a + zero, pos) & mask) | (b & ~mask)

    simple(link, ins, f, [ty, ty, "u32", "u32"])


@instruction("popc", "clz", "brev", "bfind")
def _count(link, ins):
    ty = ins.types[-1]
    dt, bits = DTYPE[ty], 8 * size_of(ty)
    shift_amount = "shiftamt" in ins.mods

    def bfind(a):
        a = np.asarray(a)
        if a.dtype.kind == "i":
            a = np.where(a < 0, ~a, a)
        n = bitlen(a.view(UINT[bits // 8]))
        if shift_amount:
            return np.where(n == 0, np.uint32(0xFFFFFFFF), np.uint32(bits) - n)
        return n - np.uint32(1)

    def brev(a):
        r = np.zeros_like(np.asarray(a))
        for i in range(bits):
            r = r | ((a >> dt(i)) & dt(1)) << dt(bits - 1 - i)
        return r

    f = {"popc": popcount, "clz": lambda a: np.uint32(bits) - bitlen(a), "brev": brev, "bfind": bfind}[ins.op]
    simple(link, ins, f, [ty])
