"""Branches, exits, barriers of a block, and what has no effect on values.

``ins.ctl`` tells the scheduler what to do: bra, brx, exit, bar, warp (a warp-level .sync), bad (raises).
"""

from __future__ import annotations

import numpy as np

from ..ptxtypes import PtxError
from .base import instruction


@instruction("bra")
def _bra(link, ins):
    ins.ctl, ins.target = "bra", link.target(ins.args[0])


@instruction("brx")
def _brx(link, ins):
    ins.table = link.table(ins.args[1])
    ins.index, ins.ctl = link.src(ins.args[0], "u32"), "brx"


@instruction("ret", "exit")
def _exit(link, ins):
    ins.ctl = "exit"


@instruction("trap", "brkpt")
def _trap(link, ins):
    ins.ctl, ins.why = "bad", "the kernel executed trap"


@instruction("call")
def _call(link, ins):
    if "__assertfail" in ins.text:
        raise PtxError("the kernel called __assertfail")
    raise PtxError("call is not supported (compile with everything inlined)")


@instruction("membar", "fence", "nanosleep", "prefetch", "prefetchu", "discard", "applypriority")
@instruction("griddepcontrol", "setmaxnreg", "pmevent")
def _no_effect(link, ins):
    ins.run = lambda rt, idx: None


@instruction("createpolicy")
def _createpolicy(link, ins):
    put = link.dst(ins.args[0])
    ins.run = lambda rt, idx: put(rt, idx, np.uint64(0))


@instruction("bar", "barrier")
def _bar(link, ins):
    mods = [m for m in ins.mods if m not in ("cta", "aligned")]
    if mods[0] == "warp":
        _warp_barrier(link, ins)
        return
    if "cluster" in ins.mods:
        raise PtxError("not supported: barrier.cluster")
    args = list(ins.args)
    ins.reduce, ins.arrive = None, mods[0] == "arrive"
    if mods[0] == "red":
        ins.reduce = mods[1]
        ins.put = link.dst(args.pop(0))
        ins.predicate = link.src(args.pop(), "pred")
    elif mods[0] not in ("sync", "arrive"):
        raise PtxError("not supported")
    ins.barrier = link.src(args[0], "u32")
    ins.n_expected = link.src(args[1], "u32") if len(args) > 1 else None
    ins.ctl = "bar"


def _warp_barrier(link, ins):
    ins.mask, ins.ctl = link.src(ins.args[0], "u32"), "warp"

    def run(rt, idx, lanes):
        rt.warp_epoch[np.unique(rt.warp_of[lanes])] += 1

    ins.run = run
