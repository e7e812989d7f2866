"""Runs one batch of blocks.

Lanes at the same instruction run together as a group. Of the groups that can run, the one with the lowest pc goes
first, and it stops when it meets another: so lanes that diverged join again at the first instruction they share, as
long as compilers lay out code in its order, which nvcc and Triton do.
"""

from __future__ import annotations

import numpy as np

from .barriers import Barriers
from .ptxtypes import PtxError


class Run(Barriers):
    """One batch of blocks, from entry to exit."""

    def go(self):
        """Runs until every lane has exited."""
        code = self.kernel.code
        self.groups = {0: [np.arange(self.n_lanes)]}  # pc -> parts, arrays of lanes
        self.parked, self.waiting, self.arrived = {}, {}, {}
        if len(code) == 0 or code[-1].ctl not in ("exit", "bra", "bad", "brx"):
            raise PtxError(f"{self.kernel.name}: the code does not end in ret")
        while self.groups or self.unstick():
            pc = min(self.groups)
            lanes = self._take(pc)
            self._straight(code, pc, lanes, min(self.groups) if self.groups else -1)

    def add(self, pc, lanes):
        """Lanes can go on at ``pc``."""
        self.groups.setdefault(pc, []).append(lanes)

    def _take(self, pc):
        parts = self.groups.pop(pc)
        if len(parts) == 1:
            return parts[0]
        mask = np.zeros(self.n_lanes, bool)  # in lane order, which sorting would cost more for
        for part in parts:
            mask[part] = True
        return np.flatnonzero(mask)

    def _straight(self, code, pc, lanes, stop):
        """Runs a group until it meets another (the lowest is at ``stop``), diverges, waits or exits."""
        idx = None if len(lanes) == self.n_lanes else lanes
        stats, max_steps, n = self.stats, self.options.max_steps, len(lanes)
        while True:
            ins = code[pc]
            stats.steps += 1
            stats.lane_insts += n
            if stats.steps > max_steps:
                why = f"stopped after {max_steps} instructions (endless loop, or a wait that the schedule cannot serve)"
                self.fail(ins, why, int(lanes[0]))
            try:
                if self.partial:
                    self.check_defined(ins, idx)
                active_idx, active, rest = self._guarded(ins, idx, lanes)
                if ins.ctl is None:
                    if len(active):
                        ins.run(self, active_idx)
                        if self.partial:
                            self.hand_on(ins, active_idx)
                elif ins.ctl == "bra" and rest is None:
                    pc = ins.target
                    if pc in self.groups or (self.groups and pc > stop >= 0):
                        self.add(pc, lanes)
                        return
                    continue
                elif len(active):
                    self._control(ins, pc, active_idx, active)
                    if rest is not None:
                        self.add(pc + 1, rest)
                    return
            except PtxError as e:
                if "PTX line" in str(e):
                    raise
                self.fail(ins, str(e))
            except (TypeError, AttributeError):  # a register that is still None
                if not self._first_use(ins, lanes):
                    raise
                stats.steps -= 1
                continue
            pc += 1
            if pc == stop or pc in self.groups:
                self.add(pc, lanes)
                return

    def _guarded(self, ins, idx, lanes):
        """The lanes that the guard lets through (as idx and as lanes), and the rest, None if there is none."""
        if not ins.guard:
            return idx, lanes, None
        g = self.regs[ins.gi] if idx is None else self.regs[ins.gi][idx]
        if ins.guard[0]:
            g = ~g
        if g.all():
            return idx, lanes, None
        active = lanes[g]
        return active, active, lanes[~g]

    def _control(self, ins, pc, idx, lanes):
        """An instruction that moves the lanes elsewhere, or makes them wait."""
        if ins.ctl == "bra":
            self.add(ins.target, lanes)
        elif ins.ctl == "exit":
            self.alive[lanes] = False
        elif ins.ctl == "bad":
            self.fail(ins, ins.why, int(lanes[0]))
        elif ins.ctl == "brx":
            i = np.broadcast_to(ins.index(self, idx), len(lanes))
            if (i >= len(ins.table)).any():
                self.fail(ins, "brx.idx index out of range", int(lanes[0]))
            for j in np.unique(i):
                self.add(ins.table[int(j)], lanes[i == j])
        elif ins.ctl == "bar":
            self.barrier(ins, pc, idx, lanes)
        else:
            self._warp_level(ins, pc, idx, lanes)

    def _warp_level(self, ins, pc, idx, lanes):
        parked = self.parked.pop(pc, None)
        if parked is not None:
            lanes = np.sort(np.concatenate([lanes, parked]))
            idx = None if len(lanes) == self.n_lanes else lanes
        wait = self.missing(ins, idx, lanes)
        if wait is not None:
            self.parked[pc] = lanes[wait]
            lanes = idx = lanes[~wait]
        if len(lanes):
            ins.run(self, idx, lanes)
            if self.partial:
                self.hand_on(ins, idx)
            self.add(pc + 1, lanes)

    def _first_use(self, ins, lanes):
        """Gives the sources that no thread has written a value; False if there are none."""
        fresh = [r for r in ins.srcs if self.regs[r] is None]
        for r in fresh:
            self.undefined(r)
        if fresh and (ins.strict or ins.ctl in ("warp", "bar", "brx", "exit")):
            self.fail(ins, "reads a register that no thread has written", int(lanes[0]))
        return bool(fresh)
