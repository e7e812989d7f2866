"""Which registers a thread has written, through copies and computations.

``written[r]`` is None when register r is defined in every lane, else it gives for each lane which 16-bit quarters of
it are. Compilers move half-built words about, so only using an undefined value to decide something is an error: an
address, a branch, a guard, a stored value. Other instructions hand the mark on.

Nothing is tracked until the first read of a register that no thread has written: most kernels never pay for it.
"""

from __future__ import annotations

import numpy as np

from .access import Access
from .parser import split_args
from .ptxtypes import PACKED_FLOATS

_GARBAGE = 0xDEADBEEFDEADBEEF


class Definedness(Access):
    """Lanes that know what they have not written."""

    def all_quarters(self, r):
        """The mark of a wholly written register."""
        return (1 << max(1, np.dtype(self.kernel.regs[r]).itemsize // 2)) - 1

    def undefined(self, r):
        """Gives a register that no thread has written a value, and marks it."""
        have = self.kernel.regs[r]
        garbage = 0 if have is np.bool_ else _GARBAGE & (2 ** (8 * np.dtype(have).itemsize) - 1)
        self.regs[r] = np.full(self.n_lanes, garbage, have)
        self.written[r] = np.zeros(self.n_lanes, np.uint8)
        self.partial.add(r)

    def check_defined(self, ins, idx):
        """Fails if ``ins`` decides something by an undefined register."""
        if not self.options.check_uninit:
            return
        for r in ins.srcs:
            if r not in self.partial or not (ins.strict or r == ins.gi):
                continue
            ok = (self.written[r] if idx is None else self.written[r][idx]) == self.all_quarters(r)
            if ins.guard and r != ins.gi:
                guard = self.regs[ins.gi] if idx is None else self.regs[ins.gi][idx]
                ok = ok | (guard == ins.guard[0])
            if not ok.all():
                name = next((n for n, i in ins.scope[0].items() if i == r), "?")
                why = f"uses register {name}, which this thread has not written (or computed from such a one)"
                self.fail(ins, why, self.lane_number(idx, int(np.flatnonzero(~ok)[0])))

    def hand_on(self, ins, idx):
        """After ``ins`` ran: its destinations are as defined as its sources."""
        bad = [r for r in ins.srcs if r in self.partial and r != ins.gi]
        if not bad and not self.partial.intersection(ins.dsts):
            return
        lanes = slice(None) if idx is None else idx
        marks = self._marks(ins, bad, lanes) if bad else None
        ok = np.ones(self.count(idx), bool)
        for r in bad:
            ok &= self._mark(ins, r, lanes) == self.all_quarters(r)
        for i, d in enumerate(ins.dsts):
            full = self.all_quarters(d)
            mark = marks[i] if marks and i < len(marks) else np.where(ok, full, 0)
            if self.written[d] is None:
                self.written[d] = np.full(self.n_lanes, full, np.uint8)
            self.written[d][lanes] = np.asarray(mark).astype(np.uint8) & np.uint8(full)
            if (self.written[d] == full).all():
                self.written[d] = None
                self.partial.discard(d)
            else:
                self.partial.add(d)

    def _mark(self, ins, x, lanes):
        """The marks of a register, by number or by operand text; of anything else, all ones."""
        r = x if isinstance(x, int) else ins.scope[0].get(x)
        if r is None or self.written[r] is None:
            n = len(self.warp_of[lanes])
            return np.full(n, 15 if r is None else self.all_quarters(r), np.uint8)
        return self.written[r][lanes]

    def _marks(self, ins, bad, lanes):
        """The marks of the destinations where they are finer than all or nothing; else None."""
        if ins.op == "mov":
            return self._marks_of_mov(ins, lanes)
        if ins.op == "shfl":
            written = self.written[bad[0]]
            return [self._mark(ins, bad[0], lanes) if written is None else written[self.shfl_source]]
        if ins.op == "selp" and ins.args[3].startswith("%"):
            chosen = self.regs[ins.srcs[-1 if ins.gi is None else -2]][lanes]
            return [np.where(chosen, self._mark(ins, ins.args[1], lanes), self._mark(ins, ins.args[2], lanes))]
        packed = set(PACKED_FLOATS) & set(ins.mods) and ins.op not in ("cvt", "setp", "set")
        if ins.op in ("and", "or", "xor") or packed:
            m = np.bitwise_and.reduce([self._mark(ins, r, lanes) for r in bad])
            if "f32x2" in ins.mods:  # a float is defined if both of its halves are
                m = np.where(m & 3 == 3, 3, 0) | np.where(m & 12 == 12, 12, 0)
            return [m]
        return None

    def _marks_of_mov(self, ins, lanes):
        to, source = (split_args(x[1:-1]) if x.startswith("{") else x for x in ins.args)
        if isinstance(to, list):
            q = np.dtype(self.kernel.regs[ins.srcs[0]]).itemsize // 2 // len(to)
            return [self._mark(ins, source, lanes) >> (i * q) & ((1 << q) - 1) for i in range(len(to))]
        if isinstance(source, list):
            q = max(1, np.dtype(self.kernel.regs[ins.dsts[0]]).itemsize // 2 // len(source))
            parts = [(self._mark(ins, x, lanes) & ((1 << q) - 1)) << (i * q) for i, x in enumerate(source)]
            return [np.bitwise_or.reduce(parts)]
        return [self._mark(ins, source, lanes)]
