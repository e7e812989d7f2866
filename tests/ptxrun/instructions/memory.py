"""Loads, stores, cp.async and atomics."""

from __future__ import annotations

import numpy as np

from ..parser import parse_imm, split_args
from ..ptxtypes import DTYPE, FLOATS, UINT, PtxError, size_of
from .base import instruction, space_of, vector_length
from .floating import float_op


def elements(text):
    return split_args(text[1:-1]) if text.startswith("{") else [text]


@instruction("ld", "ldu", "st")
def _load_store(link, ins):
    ty, space, store = ins.types[-1], space_of(ins), ins.op == "st"
    # Threads may race on these by intent: they are how threads wait for each other.
    ins.sync = any(m in ("volatile", "relaxed", "acquire", "release", "mmio") for m in ins.mods)
    addr, symbol_space = link.addr(ins.args[0 if store else 1])
    if symbol_space and space in (None, "param"):
        space = symbol_space
    values = elements(ins.args[1 if store else 0])
    n = vector_length(ins)
    if len(values) != n:
        raise PtxError("not supported: vector length")
    size = size_of(ty)
    if store:
        sources, u = [link.src(v, ty) for v in values], UINT[size]

        def run(rt, idx):
            cols = [np.broadcast_to(np.asarray(f(rt, idx)), rt.count(idx)).view(u) for f in sources]
            rt.store(ins, space, addr(rt, idx), size, cols, idx)

    else:
        puts, dt = [link.dst(v) for v in values], DTYPE[ty]

        def run(rt, idx):
            for put, v in zip(puts, rt.load(ins, space, addr(rt, idx), size, n, idx), strict=True):
                put(rt, idx, v.view(dt))

    ins.run = run


@instruction("cp")
def _cp_async(link, ins):
    """cp.async, done at once: a wait that is missing is not found."""
    if ins.mods[0] != "async" or "bulk" in ins.mods or "mbarrier" in ins.mods:
        raise PtxError("not supported")
    if any(m in ("commit_group", "wait_group", "wait_all") for m in ins.mods):
        ins.run = lambda rt, idx: None
        return
    (to, _), (source, _) = link.addr(ins.args[0]), link.addr(ins.args[1])
    n = parse_imm(ins.args[2], "u32")
    count = link.src(ins.args[3], "u32") if len(ins.args) > 3 else None

    def run(rt, idx):
        i = np.arange(rt.n_lanes) if idx is None else idx
        d, s = (np.broadcast_to(f(rt, idx), i.shape) for f in (to, source))
        have = np.broadcast_to(np.asarray(count(rt, idx) if count else n), i.shape)
        if n % 4 or np.any((have != n) & (have != 0)):
            raise PtxError("not supported: cp.async with a partial source size")
        cols = [np.zeros(i.size, np.uint32) for _ in range(n // 4)]
        full = have == n
        if full.any():
            for c, v in zip(cols, rt.load(ins, "global", s[full], 4, n // 4, i[full]), strict=True):
                c[full] = v
        rt.store(ins, "shared", d, 4, cols, i)

    ins.run = run


_ATOMIC = {
    "add": lambda dt: np.add,
    "min": lambda dt: np.minimum,
    "max": lambda dt: np.maximum,
    "and": lambda dt: np.bitwise_and,
    "or": lambda dt: np.bitwise_or,
    "xor": lambda dt: np.bitwise_xor,
    "exch": lambda dt: lambda a, b: b,
    "inc": lambda dt: lambda a, b: np.where(a >= b, 0, a + 1).astype(dt),
    "dec": lambda dt: lambda a, b: np.where((a == 0) | (a > b), b, a - 1).astype(dt),
}


def _atomic_op(kind, ty):
    """What an atomic other than cas does to the bits in memory and the operand's."""
    dt, u = DTYPE[ty], UINT[size_of(ty)]
    if ty in (*FLOATS, "f16x2", "bf16x2") and kind in ("add", "min", "max"):
        g = float_op(kind, ty, [])
        return (lambda a, b: g(a.view(dt), b.view(dt)).view(u)) if ty in ("f32", "f64") else g
    if ty in FLOATS and kind != "exch":
        raise PtxError("not supported")
    h = _ATOMIC[kind](dt)
    return lambda a, b: np.asarray(h(a.view(dt), b.view(dt))).view(u)


@instruction("atom", "red")
def _atomic(link, ins):
    ty, space = ins.types[-1], space_of(ins)
    kind = next(m for m in ins.mods if m in _ATOMIC or m == "cas")
    args = list(ins.args)
    puts = [link.dst(x) for x in elements(args.pop(0))] if ins.op == "atom" else []
    addr, _ = link.addr(args[0])
    sources = [link.src(v, ty) for v in elements(args[1])]
    swap = link.src(args[2], ty) if kind == "cas" else None
    f = None if swap else _atomic_op(kind, ty)
    size, u = size_of(ty), UINT[size_of(ty)]
    if len(sources) != vector_length(ins):
        raise PtxError("not supported: vector length")

    def run(rt, idx):
        n = rt.count(idx)
        cols = [np.array(np.broadcast_to(np.asarray(s(rt, idx)), n)).view(u) for s in sources]
        new = np.array(np.broadcast_to(np.asarray(swap(rt, idx)), n)).view(u) if swap else None
        old = rt.atomic(ins, space, np.array(np.broadcast_to(addr(rt, idx), n)), size, cols, idx, f, new)
        for put, c in zip(puts, old, strict=False):  # red has no destination
            put(rt, idx, c)

    ins.run = run
