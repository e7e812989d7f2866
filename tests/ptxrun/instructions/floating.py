"""Float arithmetic: add, sub, mul, fma, min, max, abs, neg, div, roots and the transcendental functions."""

from __future__ import annotations

import numpy as np

from ..floats import canon, d2f, d2h, flush32, fma32, fma64, fma_odd, fmin_max, h2d
from ..ptxtypes import DTYPE, FLOATS, HALF, PACKED_FLOATS, ROUNDINGS, UINT, PtxError, size_of
from .base import approximate, instruction, only, simple
from .integer import build_divide, build_integer


def packed(fn, ty):
    """Lifts ``fn`` over 16-bit patterns to x2 words if ``ty`` is packed."""
    if not ty.endswith("x2"):
        return fn

    def lifted(*xs):
        xs = [np.asarray(x, np.uint32) for x in xs]
        low = np.asarray(fn(*[x.astype(np.uint16) for x in xs])).astype(np.uint32)
        high = np.asarray(fn(*[(x >> 16).astype(np.uint16) for x in xs])).astype(np.uint32)
        return low | high << 16

    return lifted


def _packed_f32(fn):
    def lifted(*xs):
        xs = [np.asarray(x, np.uint64) for x in xs]
        halves = ([(x >> np.uint64(shift)).astype(np.uint32).view(np.float32) for x in xs] for shift in (0, 32))
        low, high = (fn(*half).view(np.uint32).astype(np.uint64) for half in halves)
        return low | high << np.uint64(32)

    return lifted


def saturate(r):
    """.sat: clamped to [0, 1], NaN to 0."""
    return np.where(np.isnan(r), r.dtype.type(0), np.clip(r, r.dtype.type(0), r.dtype.type(1)))


def float_op(kind, ty, mods):
    """The function for add/sub/mul/fma/min/max/abs/neg on float type ``ty``, as the modifiers ask."""
    only(mods, *ROUNDINGS, "ftz", "sat", "relu", "NaN")
    mode = next((m for m in mods if m in ROUNDINGS), "rn")
    if ty == "f32x2":
        return _packed_f32(float_op(kind, "f32", [m for m in mods if m != "f32x2"]))
    if ty.removesuffix("x2") in HALF:
        return packed(_half_op(kind, ty.removesuffix("x2"), mods, mode), ty)
    if kind in ("abs", "neg"):
        return _sign_op(kind, ty, "ftz" in mods)
    if ty == "f64":
        if mode != "rn":
            raise PtxError(f"not supported: .{mode} on f64")
        if kind in ("min", "max"):
            return lambda a, b: fmin_max(a, b, kind == "max", "NaN" in mods)
        return {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": fma64}[kind]
    return _single_op(kind, mods, mode)


def _sign_op(kind, ty, ftz):
    dt, u = DTYPE[ty], UINT[size_of(ty)]
    bit = u(1 << (8 * size_of(ty) - 1))
    post = flush32 if ftz else np.asarray
    if kind == "abs":
        return lambda a: post((np.asarray(a).view(u) & ~bit).view(dt))
    return lambda a: post((np.asarray(a).view(u) ^ bit).view(dt))


def _half_op(kind, ty, mods, mode):
    if kind == "abs":
        return lambda a: a & np.uint16(0x7FFF)
    if kind == "neg":
        return lambda a: a ^ np.uint16(0x8000)
    ftz, sat, relu, nan = ("ftz" in mods), ("sat" in mods), ("relu" in mods), ("NaN" in mods)

    def half(*bits):
        d = [h2d(x, ty) for x in bits]
        if ftz:
            d = [np.where(np.abs(x) < 2.0**-14, np.copysign(0.0, x), x) for x in d]
        if kind in ("min", "max"):
            r = fmin_max(d[0], d[1], kind == "max", nan)
        elif kind == "mul":
            r = d[0] * d[1] if ty == "f16" else fma_odd(d[0], d[1], -0.0)
        elif kind == "fma":
            r = fma_odd(*d)
        else:
            r = fma_odd(d[0], 1.0, d[1] if kind == "add" else -d[1])
        if sat:
            r = saturate(r)
        elif relu:
            r = np.where(r < 0, 0, r)
        return d2h(r, ty, mode)

    return half


def _single_op(kind, mods, mode):
    ftz, sat = "ftz" in mods, "sat" in mods

    def pre(x):
        return flush32(np.asarray(x)) if ftz else x

    def post(r):
        r = canon(r)
        r = flush32(r) if ftz else r
        return saturate(r) if sat else r

    if kind in ("min", "max"):
        nan, largest = "NaN" in mods, kind == "max"
        return lambda a, b: post(fmin_max(pre(a), pre(b), largest, nan))
    if kind == "fma":
        return lambda a, b, c: post(fma32(pre(a), pre(b), pre(c), mode))
    if mode != "rn":
        exact = {
            "add": lambda a, b: fma_odd(np.float64(a), 1.0, np.float64(b)),
            "sub": lambda a, b: fma_odd(np.float64(a), 1.0, -np.float64(b)),
            "mul": lambda a, b: np.float64(a) * np.float64(b),
        }[kind]
        return lambda a, b: post(d2f(exact(pre(a), pre(b)), mode))
    f = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[kind]
    if ftz or sat:
        return lambda a, b: post(f(pre(a), pre(b)))
    return lambda a, b: canon(f(a, b))


@instruction("add", "sub", "mul", "mad", "fma", "min", "max", "abs", "neg")
def _arithmetic(link, ins):
    ty, kind = ins.types[-1], ins.op
    if kind == "mad" and ty in FLOATS:
        kind = "fma"
    if len(ins.types) == 2:
        _mixed(link, ins, kind, ty)
    elif ty in FLOATS or ty in PACKED_FLOATS:
        simple(link, ins, float_op(kind, ty, ins.mods), [ty] * 3)
    else:
        build_integer(link, ins, kind, ty)


def _mixed(link, ins, kind, ty):
    """add/sub.f32.f16 d, a, c and fma.f32.f16 d, a, b, c (sm_100): c and d are f32."""
    if ins.types[0] != "f32" or ty not in HALF or len(ins.args) != (4 if kind == "fma" else 3):
        raise PtxError("not supported: these types")
    f = float_op(kind, "f32", [m for m in ins.mods if m not in HALF])

    def wide(bits):
        return h2d(bits, ty).astype(np.float32)

    if kind == "fma":
        simple(link, ins, lambda a, b, c: f(wide(a), wide(b), c), [ty, ty, "f32"])
    else:
        simple(link, ins, lambda a, c: f(wide(a), c), [ty, "f32"])


@instruction("div", "rem")
def _divide(link, ins):
    """On floats, .approx and .full are given correctly rounded, and counted."""
    ty = ins.types[-1]
    if ty not in ("f32", "f64"):
        build_divide(link, ins)
        return
    only(ins.mods, "rn", "full", "approx", "ftz")
    if ins.op == "rem":
        raise PtxError("not supported")
    ftz = "ftz" in ins.mods

    def divide(a, b):
        if ftz:
            return canon(flush32(flush32(np.asarray(a)) / flush32(np.asarray(b))))
        return canon(np.divide(a, b))

    simple(link, ins, divide, [ty] * 2)
    if "approx" in ins.mods or "full" in ins.mods:
        approximate(ins)


_UNARY = {
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rcp": lambda x: 1 / x,
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@instruction("sqrt", "rsqrt", "rcp", "ex2", "lg2", "sin", "cos", "tanh")
def _unary(link, ins):
    ty, f = ins.types[-1], _UNARY[ins.op]
    only(ins.mods, "rn", "approx", "ftz")
    if ty == "f64":
        g = f
    elif ty == "f32":
        # sqrt and 1/x are correctly rounded in float32 as they are; the others need the wider format to be.
        wide = np.float32 if ins.op in ("sqrt", "rcp") and "rn" in ins.mods else np.float64

        def single(x):
            return canon(f(np.asarray(x).astype(wide)).astype(np.float32))

        g = (lambda x: flush32(single(flush32(np.asarray(x))))) if "ftz" in ins.mods else single
    else:
        half = ty.removesuffix("x2")
        g = packed(lambda bits: d2h(f(h2d(bits, half)), half), ty)
    simple(link, ins, g, [ty])
    if "approx" in ins.mods:
        approximate(ins)


@instruction("copysign")
def _copysign(link, ins):
    simple(link, ins, lambda a, b: np.copysign(b, a), [ins.types[-1]] * 2)


@instruction("testp")
def _testp(link, ins):
    ty = ins.types[-1]
    tiny = np.finfo(DTYPE[ty]).tiny
    f = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        "normal": lambda a: np.isfinite(a) & ((np.abs(a) >= tiny) | (a == 0)),
        "subnormal": lambda a: (np.abs(a) < tiny) & (a != 0),
    }[ins.mods[0]]
    simple(link, ins, f, [ty])
