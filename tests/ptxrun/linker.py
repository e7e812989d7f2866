"""Turns a kernel's instructions into closures over numpy vectors, and its operands into getters and setters.

A closure is called as ``run(rt, idx)``: ``rt`` is the Run (one batch of blocks), ``idx`` the array of lanes that take
part, or None when all do. None is worth its own case: a whole register is then read and written without indexing.
"""

from __future__ import annotations

import re

import numpy as np

from .instructions import BUILDERS
from .instructions.base import space_of, vet
from .parser import parse_imm
from .ptxtypes import DTYPE, PARAM_BASE, UINT, PtxError, size_of

SPECIAL_REGISTERS = {
    **{f"%{name}": name for name in ("tid", "ntid", "ctaid", "nctaid", "laneid", "warpid", "nwarpid", "smid", "nsmid")},
    **{f"%lanemask_{which}": f"lanemask_{which}" for which in ("eq", "lt", "le", "gt", "ge")},
    **{"%clock": "clock", "%clock64": "clock", "%globaltimer": "clock", "%gridid": "zero"},
    **{"%dynamic_smem_size": "dynamic_smem_size", "%total_smem_size": "total_smem_size"},
    # A launch without clusters is one cluster a block.
    **{"%cluster_ctarank": "zero", "%cluster_nctarank": "one", "%clusterid": "ctaid", "%nclusterid": "nctaid"},
    **{"%cluster_ctaid": "zero3", "%cluster_nctaid": "one3"},
}

# A value stored, an address, a branch condition must be defined; other operations hand the mark on.
_STRICT = ("st", "ld", "atom", "red", "bra", "brx", "cp")


class Linker:
    """Links one kernel in place; an instruction that cannot be linked becomes one that raises when it is reached."""

    def __init__(self, module_vars, kernel):
        self.module_vars, self.kernel, self.ins = module_vars, kernel, None
        self._lay_out()
        self._choose_granules()
        for pc, ins in enumerate(kernel.code):
            ins.pc = pc
            self.ins = ins
            build = BUILDERS.get(ins.op)
            try:
                if build is None:
                    raise PtxError("not supported")
                vet(ins)
                build(self, ins)
            except PtxError as e:
                ins.ctl, ins.why = "bad", str(e)
            except (
                KeyError,
                ValueError,
                IndexError,
                StopIteration,
            ) as e:  # an operand or modifier that the builder does not know
                ins.ctl, ins.why = "bad", f"not supported ({type(e).__name__}: {e})"
            if ins.guard:
                ins.gi = ins.scope[0][ins.guard[1]]
                ins.srcs.append(ins.gi)
            ins.strict = ins.op in _STRICT or (ins.ctl in ("warp", "bar") and ins.op != "shfl")

    def _lay_out(self):
        """Addresses of the shared and local variables; dynamic shared memory (size 0) comes last."""
        k, size = self.kernel, {"shared": 0, "local": 0}
        declared = [v for v in [*k.vars.values(), *self.module_vars.values()] if v.space in size]
        for v in sorted(declared, key=lambda v: v.size == 0):
            align = max(v.align, 1)
            v.addr = (size[v.space] + align - 1) // align * align
            size[v.space] = v.addr + v.size
        k.smem, k.local = size["shared"], (size["local"] + 15) // 16 * 16

    def _choose_granules(self):
        """The narrowest access to a space: what the race shadow counts in."""
        accesses = [i for i in self.kernel.code if i.op in ("ld", "st", "atom", "red") and i.types]
        self.kernel.granule = {
            space: min([4] + [size_of(i.types[-1]) for i in accesses if space_of(i, check=False) in (space, None)])
            for space in ("shared", "global")
        }

    # ---- operands
    def reg(self, name):
        """The number of register ``name``, or None."""
        return self.ins.scope[0].get(name)

    def symbol(self, text):
        """``name`` or ``name+offset`` of a variable -> (Var, offset in its space), or None."""
        m = re.fullmatch(r"([\w$.%]+?)\s*(?:\+\s*(-?\w+))?", text)
        v = (self.kernel.vars.get(m.group(1)) or self.module_vars.get(m.group(1))) if m else None
        if v is None:
            return None
        if v.addr is None:
            raise PtxError("call is not supported (its parameters; compile with everything inlined)")
        return v, v.addr + (int(m.group(2), 0) if m.group(2) else 0)

    def src(self, text, ty):
        """A closure that gives an operand as a numpy vector (or scalar) of type ``ty``."""
        if text.startswith("!") and self.reg(text[1:].strip()) is not None:
            inner = self.src(text[1:].strip(), "pred")
            return lambda rt, idx: ~inner(rt, idx)
        r = self.reg(text)
        if r is not None:
            return self._register(text, r, ty)
        dt, n_bits = DTYPE[ty], 8 * size_of(ty)
        base = text.split(".")[0]
        if base in SPECIAL_REGISTERS:
            key = SPECIAL_REGISTERS[base] + text[len(base) :]
            return lambda rt, idx: rt.special(key, idx, dt)
        found = self.symbol(text)
        if found is not None:
            v, addr = found
            c = dt((addr + (PARAM_BASE if v.space == "param" else 0)) & (2**n_bits - 1))
        elif text == "WARP_SZ":
            c = dt(32)
        else:
            c = _constant(text, ty)
        return lambda rt, idx: c

    def _register(self, text, r, ty):
        dt, have = DTYPE[ty], self.kernel.regs[r]
        self.ins.srcs.append(r)
        if have is np.bool_ or dt is np.bool_:
            if have is not dt:
                raise PtxError(f"operand {text} has the wrong type for .{ty}")
            return lambda rt, idx: rt.regs[r] if idx is None else rt.regs[r][idx]
        have_size, want_size = np.dtype(have).itemsize, size_of(ty)
        if have_size == want_size:
            return lambda rt, idx: (rt.regs[r] if idx is None else rt.regs[r][idx]).view(dt)
        if have_size < want_size:
            raise PtxError(f"register {text} is narrower than .{ty}")
        narrow = UINT[want_size]
        return lambda rt, idx: (rt.regs[r] if idx is None else rt.regs[r][idx]).astype(narrow).view(dt)

    def dst(self, text):
        """A closure put(rt, idx, value); the value may be a scalar, of the register's width or narrower."""
        if text == "_":
            return lambda rt, idx, v: None
        r = self.reg(text)
        if r is None:
            raise PtxError(f"destination {text} is not a register")
        self.ins.dsts.append(r)
        have = self.kernel.regs[r]
        width = np.dtype(have).itemsize

        def put(rt, idx, v):
            v = np.asarray(v)
            if have is np.bool_:
                v = v.astype(np.bool_, copy=False)
            elif v.dtype.itemsize == width:
                v = v.view(have)
            else:  # sign- or zero-extended by the value's own kind
                v = v.astype(have)
            if idx is None:
                rt.regs[r] = v if v.ndim else np.full(rt.n_lanes, v, have)
                return
            a = rt.regs[r]
            if a is None:
                rt.undefined(r)
                a = rt.regs[r]
            elif not a.flags.writeable or a.base is not None:  # another register's storage, seen through a view
                a = rt.regs[r] = a.copy()
            a[idx] = v

        return put

    def addr(self, text):
        """``[reg]``, ``[reg+imm]``, ``[sym+imm]``, ``[imm]`` -> (closure giving int64 addresses or one, space).

        The space is that of the symbol, else None.
        """
        text = text.strip()
        body = text[1:-1].strip()
        m = re.fullmatch(r"([\w$%.]+?)\s*(?:([+-])\s*(-?\w+))?", body)
        if not text.startswith("[") or not m:
            raise PtxError(f"address {text} is not supported")
        name, sign, offset = m.groups()
        off = int(offset, 0) * (-1 if sign == "-" else 1) if offset else 0
        r = self.reg(name)
        if r is not None:
            self.ins.srcs.append(r)
            wrap = 0xFFFFFFFF if self.kernel.regs[r] is np.uint32 else -1  # 32-bit (shared) addresses wrap

            def computed(rt, idx):
                return ((rt.regs[r] if idx is None else rt.regs[r][idx]).astype(np.int64) + off) & wrap

            return computed, None
        found = self.symbol(name)
        fixed = np.int64(int(body, 0) if found is None else found[1] + off)
        return (lambda rt, idx: fixed), (None if found is None else found[0].space)

    def target(self, name):
        """The pc of a label, looked up from the innermost braces outwards."""
        path = self.ins.scope[1]
        while True:
            if (path, name) in self.kernel.labels:
                return self.kernel.labels[path, name]
            if not path:
                raise PtxError(f"no label {name}")
            path = path[:-1]

    def table(self, name):
        """The pcs of a .branchtargets list."""
        path = self.ins.scope[1]
        key = next((path[:n], name) for n in range(len(path), -1, -1) if (path[:n], name) in self.kernel.tables)
        return [self.target(x) for x in self.kernel.tables[key]]


def _constant(text, ty):
    try:
        value = parse_imm(text, ty)
    except ValueError:
        raise PtxError(f"operand {text} is not supported") from None
    dt, size = DTYPE[ty], size_of(ty)
    is_float = isinstance(value, (np.floating, float))
    if dt is np.bool_:
        return np.bool_(value)
    if dt in (np.float32, np.float64):
        return dt(value) if is_float else UINT[size](value & (2 ** (8 * size) - 1)).view(dt)
    if is_float:  # a float literal for a b32/b64 (or half) operand: its bits
        return np.uint32(np.float32(value).view(np.uint32)) if size == 4 else np.float64(value).view(np.uint64)
    return UINT[size](value & (2 ** (8 * size) - 1)).view(dt)
