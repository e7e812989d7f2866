"""Operations across the lanes of a warp: shfl, vote, match, redux, elect, activemask."""

from __future__ import annotations

import numpy as np

from ..bits import bitlen
from ..ptxtypes import PtxError
from .base import instruction


def _warp_level(link, ins, mask, run):
    """The scheduler parks lanes until all of the member mask are there, then calls run(rt, idx, lanes)."""
    ins.mask, ins.ctl, ins.run = link.src(mask, "u32"), "warp", run


def _destinations(link, ins):
    """``d`` or ``d|p`` -> setters of d and p (or None)."""
    names = [x.strip() for x in ins.args[0].split("|")]
    return link.dst(names[0]), link.dst(names[1]) if len(names) > 1 else None


@instruction("shfl")
def _shfl(link, ins):
    if ins.mods[0] != "sync":
        raise PtxError("not supported: shfl without .sync")
    mode = ins.mods[1]
    put, put_predicate = _destinations(link, ins)
    a, b, c = (link.src(x, "b32") for x in ins.args[1:4])

    def run(rt, idx, lanes):
        lane = rt.lane_of[lanes].astype(np.int64)
        v = np.broadcast_to(np.asarray(a(rt, idx)), lanes.shape)
        b_lanes = np.broadcast_to(np.asarray(b(rt, idx)).astype(np.int64) & 31, lanes.shape)
        c_bits = np.broadcast_to(np.asarray(c(rt, idx)).astype(np.int64), lanes.shape)
        segment, clamp = (c_bits >> 8) & 31, c_bits & 31
        low = lane & segment
        limit = low | (clamp & ~segment)
        if mode == "up":
            j = lane - b_lanes
            ok = j >= limit
        else:
            j = {"down": lane + b_lanes, "bfly": lane ^ b_lanes, "idx": low | (b_lanes & ~segment)}[mode]
            ok = j <= limit
        j = np.where(ok, j, lane)
        source = rt.warp_start[rt.warp_of[lanes]] + j
        # 32 more: the last warp of a block that is no multiple of 32 has lanes that do not exist.
        table, here = np.zeros(rt.n_lanes + 32, np.uint32), np.zeros(rt.n_lanes + 32, np.bool_)
        table[lanes], here[lanes] = v, True
        found = here[source] & (rt.warp_of[np.minimum(source, rt.n_lanes - 1)] == rt.warp_of[lanes])
        if not found.all():
            w = int(np.flatnonzero(~found)[0])
            rt.fail(ins, f"shfl reads lane {int(j[w])}, which does not take part", int(lanes[w]))
        rt.shfl_source = source
        put(rt, idx, table[source])
        if put_predicate:
            put_predicate(rt, idx, ok)

    _warp_level(link, ins, ins.args[4], run)


@instruction("activemask")
def _activemask(link, ins):
    put = link.dst(ins.args[0])
    ins.run = lambda rt, idx: put(rt, idx, rt.ballot(np.ones(rt.count(idx), bool), idx))


@instruction("elect")
def _elect(link, ins):
    if "sync" not in ins.mods:
        raise PtxError("not supported without .sync")
    put, put_predicate = _destinations(link, ins)

    def run(rt, idx, lanes):
        members = rt.ballot(np.ones(lanes.size, bool), lanes)
        lowest = members & (~members + np.uint32(1))
        first = (bitlen(lowest) - np.uint32(1)).astype(np.uint32)
        put(rt, idx, first)
        if put_predicate:
            put_predicate(rt, idx, rt.lane_of[lanes] == first)

    _warp_level(link, ins, ins.args[1], run)


@instruction("vote")
def _vote(link, ins):
    if "sync" not in ins.mods:
        raise PtxError("not supported without .sync")
    put, _ = _destinations(link, ins)
    a = link.src(ins.args[1], "pred")
    kind = next(m for m in ins.mods if m != "sync")

    def run(rt, idx, lanes):
        yes = rt.ballot(np.broadcast_to(np.asarray(a(rt, idx)), lanes.shape), lanes)
        members = rt.ballot(np.ones(lanes.size, bool), lanes)
        if kind == "ballot":
            r = yes
        elif kind == "any":
            r = yes != 0
        elif kind == "all":
            r = yes == members
        else:
            r = (yes == members) | (yes == 0)
        put(rt, idx, r)

    _warp_level(link, ins, ins.args[2], run)


_REDUCE = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@instruction("redux")
def _redux(link, ins):
    if "sync" not in ins.mods:
        raise PtxError("not supported without .sync")
    put, _ = _destinations(link, ins)
    a = link.src(ins.args[1], ins.types[-1])
    reduce = _REDUCE[next(m for m in ins.mods if m != "sync")].reduce

    def run(rt, idx, lanes):
        v = np.broadcast_to(np.asarray(a(rt, idx)), lanes.shape)
        warp, out = rt.warp_of[lanes], np.zeros(lanes.size, np.uint32)
        for w in np.unique(warp):
            mine = v[warp == w]
            out[warp == w] = np.asarray(reduce(mine)).astype(mine.dtype).view(np.uint32)
        put(rt, idx, out)

    _warp_level(link, ins, ins.args[2], run)


@instruction("match")
def _match(link, ins):
    if "sync" not in ins.mods:
        raise PtxError("not supported without .sync")
    put, put_predicate = _destinations(link, ins)
    a = link.src(ins.args[1], ins.types[-1])
    match_any = "any" in ins.mods

    def run(rt, idx, lanes):
        v = np.broadcast_to(np.asarray(a(rt, idx)), lanes.shape)
        warp, out, all_equal = rt.warp_of[lanes], np.zeros(lanes.size, np.uint32), np.zeros(lanes.size, bool)
        for w in np.unique(warp):
            here = warp == w
            mine = v[here]
            bits = np.uint32(1) << rt.lane_of[lanes[here]].astype(np.uint32)
            same = np.array([np.bitwise_or.reduce(bits[mine == x]) for x in mine], np.uint32)
            all_equal[here] = (mine == mine[0]).all()
            out[here] = same if match_any else np.where(all_equal[here], same, 0)
        put(rt, idx, out)
        if put_predicate:
            put_predicate(rt, idx, all_equal)

    _warp_level(link, ins, ins.args[2], run)
