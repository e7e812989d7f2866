"""cvt."""

from __future__ import annotations

import numpy as np

from ..floats import d2f, d2h, flush32, h2d, int_odd
from ..ptxtypes import DTYPE, FLOATS, HALF, ROUNDINGS, PtxError, size_of
from .base import instruction, only, simple
from .floating import saturate

_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@instruction("cvt")
def _cvt(link, ins):
    to, source = ins.types
    only(ins.mods, *ROUNDINGS, *_TO_INTEGER, "sat", "ftz", "relu")
    if to in ("f16x2", "bf16x2"):
        _to_packed(link, ins, to, source)
        return
    if source in FLOATS and to in FLOATS:
        f = _float_to_float(to, source, ins.mods)
    elif source in FLOATS:
        f = _float_to_integer(to, source, ins.mods)
    elif to in FLOATS:
        f = _integer_to_float(to, ins.mods)
    else:
        f = _integer_to_integer(to, ins.mods)
    a, put = link.src(ins.args[1], source), link.dst(ins.args[0])
    ins.run = lambda rt, idx: put(rt, idx, f(a(rt, idx)))


def _rounding(mods):
    return next((m for m in mods if m in ROUNDINGS or m in _TO_INTEGER), None)


def _relu(x):
    return np.where(x < 0, x.dtype.type(0), x)


def _reader(source, mods):
    if source in HALF:
        return lambda x: h2d(x, source)
    if "ftz" in mods:
        return lambda x: flush32(np.asarray(x))
    return np.asarray


def _to_packed(link, ins, to, source):
    if "sat" in ins.mods or source != "f32":
        raise PtxError("not supported")
    half, mode, relu = to[:-2], _rounding(ins.mods), "relu" in ins.mods

    def f(a, b):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        high, low = (d2h(_relu(x) if relu else x, half, mode).astype(np.uint32) for x in (a, b))
        return high << 16 | low

    simple(link, ins, f, ["f32", "f32"])


def _float_to_float(to, source, mods):
    read, dt, rounding = _reader(source, mods), DTYPE[to], _rounding(mods)
    integral = _TO_INTEGER.get(rounding)
    mode = "rn" if integral or rounding is None else rounding
    sat, relu, flush = "sat" in mods, "relu" in mods, "ftz" in mods and to == "f32"

    def f(x):
        x = read(x)
        v = integral(x) if integral else x
        v = saturate(v) if sat else v
        v = _relu(v) if relu else v
        if to in HALF:
            r = d2h(v, to, mode)
        elif to == "f64" or v.dtype == dt:
            r = v.astype(dt)
        else:
            r = d2f(v, mode)
        return np.array(flush32(r) if flush else r)

    return f


def _float_to_integer(to, source, mods):
    """Out of range clamps, NaN gives 0, as on a GPU."""
    read, dt, integral = _reader(source, mods), DTYPE[to], _TO_INTEGER[_rounding(mods)]
    low, high = int(np.iinfo(dt).min), int(np.iinfo(dt).max)
    # 2**63-1 and 2**64-1 are no float64: the clamp stops one float64 short of them, and the larger are put in after.
    wide = size_of(to) == 8
    top = np.nextafter(float(high), 0) if wide else float(high)

    def f(x):
        v = integral(read(x).astype(np.float64))
        r = np.clip(np.where(np.isnan(v), 0, v), low, top).astype(dt)
        return np.where(v >= float(high), dt(high), r) if wide else r

    return f


def _integer_to_float(to, mods):
    dt, mode = DTYPE[to], _rounding(mods) or "rn"

    def f(x):
        x = np.asarray(x)
        if to in HALF:
            return d2h(int_odd(x), to, mode)
        if to == "f32" and mode != "rn":
            return d2f(int_odd(x), mode)
        return x.astype(dt)

    return f


def _integer_to_integer(to, mods):
    dt, sat = DTYPE[to], "sat" in mods
    limits = np.iinfo(dt)

    def f(x):
        x = np.asarray(x)
        if sat:  # as Python integers: no numpy type holds both int64 and uint64
            x = np.clip(x.astype(object), limits.min, limits.max)
        return np.array(x.astype(dt))

    return f
