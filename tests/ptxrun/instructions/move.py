"""mov, with packing and unpacking, and what concerns state spaces: cvta, isspacep."""

from __future__ import annotations

import numpy as np

from ..parser import split_args
from ..ptxtypes import LOCAL_BASE, SHARED_BASE, SPACES, UINT, WINDOWS, size_of, window
from .base import instruction


@instruction("mov")
def _mov(link, ins):
    ty = ins.types[-1]
    to, source = ins.args
    if to.startswith("{"):
        _unpack(link, ins, split_args(to[1:-1]), source, size_of(ty))
    elif source.startswith("{"):
        _pack(link, ins, to, split_args(source[1:-1]), size_of(ty))
    else:
        a, put = link.src(source, ty), link.dst(to)
        ins.run = lambda rt, idx: put(rt, idx, np.array(a(rt, idx)))  # a copy: registers never share storage


def _unpack(link, ins, names, source, size):
    part = size // len(names)
    a, puts = link.src(source, f"b{8 * size}"), [link.dst(x) for x in names]

    def run(rt, idx):
        v = np.asarray(a(rt, idx))
        for i, put in enumerate(puts):
            put(rt, idx, (v >> v.dtype.type(8 * part * i)).astype(UINT[part]))

    ins.run = run


def _pack(link, ins, to, names, size):
    part, u = size // len(names), UINT[size]
    sources, put = [link.src(x, f"b{8 * part}") for x in names], link.dst(to)

    def run(rt, idx):
        v = u(0)
        for i, f in enumerate(sources):
            v = v | np.asarray(f(rt, idx)).astype(u) << u(8 * part * i)
        put(rt, idx, v)

    ins.run = run


@instruction("cvta")
def _cvta(link, ins):
    space = next(m.replace("~cta", "") for m in ins.mods if m.replace("~cta", "") in SPACES)
    # Global and param addresses are generic ones already.
    base = {"shared": SHARED_BASE, "local": LOCAL_BASE}.get(space, 0)
    a, put = link.src(ins.args[1], ins.types[-1]), link.dst(ins.args[0])
    delta = np.uint64((-base if "to" in ins.mods else base) % 2**64)
    ins.run = lambda rt, idx: put(rt, idx, np.array(np.asarray(a(rt, idx)).astype(np.uint64) + delta))


@instruction("isspacep")
def _isspacep(link, ins):
    names = [w for w, _ in WINDOWS]
    want = names.index(ins.mods[0].replace("~cta", "").replace("const", "global"))
    a, put = link.src(ins.args[1], "u64"), link.dst(ins.args[0])
    ins.run = lambda rt, idx: put(rt, idx, window(np.asarray(a(rt, idx)).astype(np.int64)) == want)
