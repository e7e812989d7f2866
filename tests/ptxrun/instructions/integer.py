"""Integer arithmetic: add, sub, mul, mad, min, max, abs, neg, carries, div, rem, sad."""

from __future__ import annotations

import numpy as np

from ..bits import idiv, mulhi64
from ..ptxtypes import DTYPE, SINT, UINT, PtxError, size_of
from .base import instruction, only, simple


def build_integer(link, ins, kind, ty):
    """add, sub, mul, mad, min, max, abs and neg on integer types."""
    if "x2" in ty:
        raise PtxError(f"not supported: .{ty}")
    if kind in ("mul", "mad"):
        _multiply(link, ins, kind, ty)
        return
    only(ins.mods, "sat", "cc")
    if "sat" in ins.mods or ("cc" in ins.mods and kind not in ("add", "sub")):
        raise PtxError("not supported: modifier .sat/.cc on integers")
    if "cc" in ins.mods:
        _carry(link, ins, ty, kind == "sub", carry_in=False)
        return
    f = {
        "add": np.add,
        "sub": np.subtract,
        "min": np.minimum,
        "max": np.maximum,
        "abs": np.abs,
        "neg": np.negative,
    }[kind]
    simple(link, ins, f, [ty] * 2)


def _multiply(link, ins, kind, ty):
    only(ins.mods, "lo", "hi", "wide")
    dt, n, signed = DTYPE[ty], size_of(ty), ty[0] == "s"
    wide, sum_ty = (SINT if signed else UINT)[min(2 * n, 8)], ty
    if "wide" in ins.mods:
        if n == 8:
            raise PtxError("not supported: .wide on 64 bits")
        sum_ty = ty[0] + str(16 * n)

        def product(a, b):
            return np.multiply(a, b, dtype=wide)

    elif "hi" not in ins.mods:
        product = np.multiply
    elif n == 8:

        def product(a, b):
            return mulhi64(a, b, signed)

    else:

        def product(a, b):
            return (np.multiply(a, b, dtype=wide) >> wide(8 * n)).astype(dt)

    if kind == "mad":
        simple(link, ins, lambda a, b, c: product(a, b) + c, [ty, ty, sum_ty])
    else:
        simple(link, ins, product, [ty, ty])


@instruction("addc", "subc")
def _addc(link, ins):
    _carry(link, ins, ins.types[-1], ins.op == "subc", carry_in=True)


def _carry(link, ins, ty, sub, carry_in):
    u = UINT[size_of(ty)]
    a, b, put = link.src(ins.args[1], ty), link.src(ins.args[2], ty), link.dst(ins.args[0])

    def run(rt, idx):
        x, y = np.asarray(a(rt, idx)).view(u), np.asarray(b(rt, idx)).view(u)
        c = (rt.carry if idx is None else rt.carry[idx]).astype(u) if carry_in else u(0)
        r = x - y - c if sub else x + y + c
        if "cc" in ins.mods:
            out = (x < y) | ((x == y) & (c != 0)) if sub else (r < x) | ((r == x) & (c != 0))
            rt.carry[slice(None) if idx is None else idx] = out
        put(rt, idx, r)

    ins.run = run


def build_divide(link, ins):
    """div and rem; a division by zero is an error here, and undefined on a GPU."""

    def f(a, b):
        if np.any(b == 0):
            raise PtxError("integer division by zero")
        q = idiv(np.asarray(a), np.asarray(b))
        return q if ins.op == "div" else a - q * b

    simple(link, ins, f, [ins.types[-1]] * 2)


@instruction("sad")
def _sad(link, ins):
    simple(link, ins, lambda a, b, c: np.where(a > b, a - b, b - a) + c, [ins.types[-1]] * 3)
