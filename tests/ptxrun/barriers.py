"""Barriers of a block, and the meeting of lanes at warp-level .sync instructions."""

from __future__ import annotations

import itertools

import numpy as np

from .definedness import Definedness


class Barriers(Definedness):
    """Lanes that wait for each other.

    ``waiting``: (block, barrier) -> [(pc, lanes)]; ``arrived``: (block, barrier) -> lanes counted by bar.arrive;
    ``parked``: pc -> lanes at a warp-level .sync whose partners are missing.
    """

    def missing(self, ins, idx, lanes):
        """None if every lane of these lanes' member masks is here; else which of the lanes must wait."""
        lane, warp = self.lane_of[lanes], self.warp_of[lanes]
        mask = np.broadcast_to(np.asarray(ins.mask(self, idx)), lanes.shape)
        absent = (mask >> lane) & 1 == 0
        if absent.any():
            j = int(np.flatnonzero(absent)[0])
            why = f"the thread is not in its own member mask {int(mask[j]):#010x}"
            self.fail(ins, why, int(lanes[j]))
        have = np.zeros(self.n_blocks * self.warps_per_block, np.uint32)
        np.bitwise_or.at(have, warp, np.uint32(1) << lane)
        # The last warp of a block may have lanes that do not exist; masks name them all the same.
        size = np.minimum(32, self.n_threads - self.warp_start % self.n_threads)
        exists = ((np.uint64(1) << size.astype(np.uint64)) - np.uint64(1)).astype(np.uint32)
        wait = mask & exists[warp] & ~have[warp] != 0
        return wait if wait.any() else None

    def barrier(self, ins, pc, idx, lanes):
        """Lanes arrive at a bar instruction."""
        number = np.broadcast_to(ins.barrier(self, idx), lanes.shape)
        idle = not ins.n_expected and not self.waiting and not self.arrived and not ins.arrive
        if len(lanes) == self.n_lanes and idle and (number == number[0]).all():
            self._open_all(ins, pc, lanes)
            return
        expected = np.broadcast_to(ins.n_expected(self, idx), lanes.shape) if ins.n_expected else None
        keys = self.block_of[lanes] * 16 + number
        order = np.argsort(keys, kind="stable")
        cuts = np.flatnonzero(np.r_[True, np.diff(keys[order]) > 0, True])
        for a, b in itertools.pairwise(cuts):
            who = lanes[order[a:b]]
            key = (int(self.block_of[who[0]]), int(number[order[a]]))
            if ins.arrive:
                self.arrived[key] = self.arrived.get(key, 0) + len(who)
                self.add(pc + 1, who)
            else:
                self.waiting.setdefault(key, []).append((pc, who))
            self._release(key, self.n_threads if expected is None else int(expected[order[a]]))

    def _open_all(self, ins, pc, lanes):
        """Every thread of the batch is here at once."""
        if ins.reduce:
            yes = np.broadcast_to(ins.predicate(self, None), self.n_lanes).astype(np.uint32)
            n_yes = np.add.reduceat(yes, np.arange(self.n_blocks) * self.n_threads)[self.block_of]
            ins.put(self, None, {"or": n_yes > 0, "and": n_yes == self.n_threads, "popc": n_yes}[ins.reduce])
            if self.partial:
                self.hand_on(ins, None)
        self.block_epoch += 1
        self.add(pc + 1, lanes)

    def _release(self, key, n_expected):
        parts = self.waiting.get(key, [])
        have = sum(len(lanes) for _, lanes in parts) + self.arrived.get(key, 0)
        if parts and have >= n_expected:
            self._open(key, parts)

    def _open(self, key, parts):
        code = self.kernel.code
        ins = code[parts[0][0]]
        pcs = {pc for pc, _ in parts}
        if len(pcs) > 1:
            self._different_instructions(ins, parts, sorted({code[pc].line for pc in pcs}))
        if ins.reduce:
            lanes = np.concatenate([lanes for _, lanes in parts])
            yes = np.broadcast_to(ins.predicate(self, lanes), lanes.shape)
            ins.put(self, lanes, {"or": yes.any(), "and": yes.all(), "popc": np.uint32(yes.sum())}[ins.reduce])
            if self.partial:
                self.hand_on(ins, lanes)
        del self.waiting[key]
        self.arrived.pop(key, None)
        self.block_epoch[key[0]] += 1
        for pc, lanes in parts:
            self.add(pc + 1, lanes)

    def _different_instructions(self, ins, parts, lines):
        """Warps may meet in different bar instructions; the threads of one warp may not."""
        lanes = np.concatenate([lanes for _, lanes in parts])
        pcs = np.concatenate([np.full(len(lanes), pc) for pc, lanes in parts])
        order = np.argsort(lanes)
        warp, pc = self.warp_of[lanes[order]], pcs[order]
        mixed = (warp[1:] == warp[:-1]) & (pc[1:] != pc[:-1])
        if mixed.any():
            why = f"barrier divergence: threads of one warp wait at different barriers (PTX lines {lines})"
            self.fail(ins, why, int(lanes[order][np.flatnonzero(mixed)[0]]))
        self.stats.warnings[f"warps of a block meet in different bar instructions (PTX lines {lines})"] += 1

    def unstick(self):
        """No group can run: opens a barrier whose other threads have exited, if that is allowed, or fails.

        Returns True if something can run again, False if nothing waits.
        """
        code = self.kernel.code
        for key in sorted(self.waiting):
            parts = self.waiting[key]
            lanes = np.concatenate([lanes for _, lanes in parts])
            n_live = np.count_nonzero(self.alive & (self.block_of == key[0]))
            if n_live == len(lanes) < self.n_threads:
                why = f"{len(lanes)} of the block's {self.n_threads} threads arrived; the others have exited"
                if not self.options.allow_exited_at_barrier:
                    self.fail(code[parts[0][0]], f"barrier divergence at a barrier: {why}", int(lanes[0]))
                self.stats.warnings[f"barrier: {why}"] += 1
                self._open(key, parts)
                return True
        for pc, lanes in self.parked.items():
            here = int(self.ballot(np.ones(len(lanes), bool), lanes)[0])
            mask = int(np.broadcast_to(np.asarray(code[pc].mask(self, lanes)), lanes.shape)[0])
            why = f"member mask {mask:#010x}, but only lanes {here:#010x} of the warp arrive"
            self.fail(code[pc], why, int(lanes[0]))
        if self.waiting:
            key = min(self.waiting)
            parts = self.waiting[key]
            n = sum(len(lanes) for _, lanes in parts)
            why = f"deadlock: {n} threads wait at barrier {key[1]} of a block of {self.n_threads}"
            self.fail(code[parts[0][0]], why, int(parts[0][1][0]))
        return False
