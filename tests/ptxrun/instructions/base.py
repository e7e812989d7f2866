"""What every instruction family uses: the registry, the check of modifiers, and the common shape of an operation."""

from __future__ import annotations

import re

from ..ptxtypes import DTYPE, SPACES, PtxError

BUILDERS = {}
"""Mnemonic -> builder(link, ins), which sets ``ins.run`` or ``ins.ctl`` or raises PtxError."""


def instruction(*mnemonics):
    """Registers a builder."""

    def register(build):
        for name in mnemonics:
            BUILDERS[name] = build
        return build

    return register


# Every modifier has to be known: one that is passed over in silence would give a wrong result.
_SCOPES = (
    "cta cluster gpu sys relaxed acquire release acq_rel weak volatile mmio global shared shared~cta local const param "
    "param~entry param~func v2 v4 v8"
)
_COMPARISONS = "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan and or xor ftz"
_SPACES = "global shared shared~cta local const param"
# The builders of these check their own modifiers, or the instruction has no effect on values.
_SELF_CHECKED = (
    "bar barrier membar fence nanosleep prefetch prefetchu discard applypriority griddepcontrol setmaxnreg pmevent "
    "createpolicy bra brx ret exit trap brkpt call cp "
    "ldmatrix"
)
_MODIFIERS = {
    "ld": _SCOPES + " nc ca cg cs lu cv",
    "ldu": _SCOPES,
    "st": _SCOPES + " wb wt cg cs",
    "atom": _SCOPES + " noftz add exch cas min max and or xor inc dec",
    "red": _SCOPES + " noftz add min max and or xor inc dec",
    "setp": _COMPARISONS,
    "set": _COMPARISONS,
    "slct": "ftz",
    "shf": "l r wrap clamp",
    "bfind": "shiftamt",
    "addc": "cc",
    "subc": "cc",
    "cvta": "to " + _SPACES,
    "isspacep": _SPACES,
    "shfl": "sync up down bfly idx",
    "vote": "sync all any uni ballot",
    "match": "sync any all",
    "redux": "sync add min max and or xor",
    "elect": "sync",
    "testp": "finite infinite number notanumber normal subnormal",
}
_PLAIN = "bfe bfi copysign mov selp and or xor not cnot shl shr popc clz brev sad activemask"
_MODIFIERS = {op: frozenset(mods.split()) for op, mods in _MODIFIERS.items()} | {
    op: frozenset() for op in _PLAIN.split()
}
_N_TYPES = {"cvt": (2,), "set": (2,), "slct": (2,), "add": (1, 2), "sub": (1, 2), "fma": (1, 2), "elect": (0,)}


def vet(ins):
    """Refuses an instruction with a modifier, or a number of types, that its builder does not expect."""
    if ins.op in _SELF_CHECKED.split():
        return
    n = len(ins.types)
    if ins.op != "isspacep" and n not in _N_TYPES.get(ins.op, (1,)):
        raise PtxError(f"not supported: {n} types")
    known = _MODIFIERS.get(ins.op)
    if known is not None:
        bad = [m for m in ins.mods if m not in DTYPE and m not in known and not re.match(r"L[12]~", m)]
        if bad:
            raise PtxError(f"not supported: modifier .{' .'.join(bad)}")


def only(mods, *allowed):
    """Refuses modifiers other than types and ``allowed``."""
    extra = [m for m in mods if m not in allowed and m not in DTYPE]
    if extra:
        raise PtxError(f"not supported: modifier .{' .'.join(extra)}")


def space_of(ins, check=True):
    """The state space an access names, None for a generic one; ``check`` refuses another block's shared memory."""
    for m in ins.mods:
        base = m.split("~")[0]
        if base in SPACES:
            if check and "~cluster" in m:
                raise PtxError("not supported: shared::cluster")
            return base
    return None


def vector_length(ins):
    """1, or that of .v2, .v4, .v8."""
    return int(next((m[1] for m in ins.mods if m in ("v2", "v4", "v8")), 1))


def simple(link, ins, fn, src_types):
    """``ins`` is: destination = fn(sources of these types). ``fn`` is a ufunc or a function of vectors."""
    sources = [link.src(x, t) for x, t in zip(ins.args[1:], src_types, strict=False)]
    # A function of *xs has an argument count of 0: it takes what there is.
    takes = fn.__code__.co_argcount or len(sources) if hasattr(fn, "__code__") else fn.nin
    if not len(sources) == len(ins.args) - 1 == takes:
        raise PtxError("not supported: number of operands")
    put = link.dst(ins.args[0])
    # The closures call their getters by name: unpacking a list costs a tenth of a short operation.
    if len(sources) == 1:
        f0 = sources[0]
        ins.run = lambda rt, idx: put(rt, idx, fn(f0(rt, idx)))
    elif len(sources) == 2:
        f0, f1 = sources
        ins.run = lambda rt, idx: put(rt, idx, fn(f0(rt, idx), f1(rt, idx)))
    else:
        ins.run = lambda rt, idx: put(rt, idx, fn(*[f(rt, idx) for f in sources]))


def approximate(ins):
    """Makes ``ins`` count itself in Stats.approx: a GPU's result may differ in the last places."""
    inner = ins.run
    key = ins.op + "." + ".".join(ins.mods)

    def run(rt, idx):
        rt.stats.approx[key] += 1
        inner(rt, idx)

    ins.run = run
