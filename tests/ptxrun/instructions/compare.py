"""Predicates and selection: setp, set, selp, slct."""

from __future__ import annotations

import numpy as np

from ..floats import flush32, h2d
from ..ptxtypes import DTYPE, FLOATS, HALF, UINT, PtxError, size_of
from .base import instruction, simple

_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_UNORDERED = ("equ", "neu", "ltu", "leu", "gtu", "geu")
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(ty, mods):
    """The comparison that the modifiers name, on values of type ``ty``."""
    name = next(m for m in mods if m in _COMPARE or m in _UNSIGNED or m in _UNORDERED or m in ("num", "nan"))
    if ty not in FLOATS:
        return _COMPARE[_UNSIGNED.get(name, name)]
    ftz = "ftz" in mods

    def conv(x):
        if ty in HALF:
            return h2d(x, ty)
        return flush32(np.asarray(x)) if ftz else x

    def either_nan(a, b):
        return np.isnan(conv(a)) | np.isnan(conv(b))

    if name in ("num", "nan"):
        return lambda a, b: either_nan(a, b) == (name == "nan")
    if name in _UNORDERED:
        unordered = _COMPARE[name[:-1]]
        return lambda a, b: unordered(conv(a), conv(b)) | either_nan(a, b)
    if name == "ne":  # numpy's is true for NaN, PTX's is not
        return lambda a, b: np.not_equal(conv(a), conv(b)) & ~either_nan(a, b)
    compare = _COMPARE[name]
    return lambda a, b: compare(conv(a), conv(b))


@instruction("setp", "set")
def _set(link, ins):
    ty = ins.types[-1]
    combine = next((m for m in ins.mods if m in _COMBINE), None)
    if "x2" in ty:
        raise PtxError("not supported")
    f = comparison(ty, ins.mods)
    a, b = link.src(ins.args[1], ty), link.src(ins.args[2], ty)
    if ins.op == "set":
        _set_value(link, ins, f, a, b, combine)
        return
    c = link.src(ins.args[3], "pred") if combine else None
    g = _COMBINE.get(combine)
    puts = [link.dst(x.strip()) for x in ins.args[0].split("|")]

    def run(rt, idx):
        r = np.asarray(f(a(rt, idx), b(rt, idx)))
        first = g(r, c(rt, idx)) if g else r
        if len(puts) > 1:  # before the first is written: it may be the operand c
            puts[1](rt, idx, g(~r, c(rt, idx)) if g else ~r)
        puts[0](rt, idx, first)

    ins.run = run


def _set_value(link, ins, f, a, b, combine):
    to = ins.types[0]
    if combine or len(ins.types) != 2:
        raise PtxError("not supported")
    put, dt = link.dst(ins.args[0]), DTYPE[to]
    yes = np.float32(1) if to == "f32" else UINT[size_of(to)](2 ** (8 * size_of(to)) - 1).view(dt)
    ins.run = lambda rt, idx: put(rt, idx, np.where(f(a(rt, idx), b(rt, idx)), yes, dt(0)))


@instruction("selp")
def _selp(link, ins):
    ty = ins.types[-1]
    simple(link, ins, lambda a, b, p: np.where(p, a, b), [ty, ty, "pred"])


@instruction("slct")
def _slct(link, ins):
    ty, by = ins.types
    simple(link, ins, lambda a, b, c: np.where(c >= 0, a, b), [ty, ty, by])
