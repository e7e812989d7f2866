"""Loads, stores and atomics, with their checks."""

from __future__ import annotations

import itertools

import numpy as np

from .lanes import Lanes
from .ptxtypes import GLOBAL_BASE, PARAM_BASE, UINT, WINDOWS, window


class Access(Lanes):
    """Lanes that reach memory."""

    def load(self, ins, space, addr, size, vec, idx):
        """-> ``vec`` vectors of words of ``size`` bytes."""
        width = size * vec
        if space == "param" and np.ndim(addr) == 0:  # the usual ld.param [name+off]: one value for all lanes
            a = int(addr)
            if a < 0 or a + width > self.n_param_bytes:
                self.fail(ins, f"parameter load out of bounds at {a} of {self.n_param_bytes}")
            if a % width:
                self.fail(ins, f"misaligned param access: {width} bytes at offset {a:#x}")
            words = self.params[a : a + width].view(UINT[size])
            return [np.full(self.count(idx), x) for x in words]
        space, data, init, off, whole = self._resolve(ins, space, addr, width, idx, write=False)
        if not whole:
            self._check_init(ins, space, init, off, width, idx)
        self._note(ins, space, "r", width, off, idx)
        races = self.races.get(space)
        if races is not None and not ins.sync:
            races.check(self, ins, idx, off, width, "r")
        words = data[: data.size // size * size].view(UINT[size])
        at = off // size if size > 1 else off
        return [words[at + j] if j else words[at] for j in range(vec)]

    def store(self, ins, space, addr, size, cols, idx):
        """Stores one vector of words for each of the ``cols``."""
        width = size * len(cols)
        space, data, init, off, whole = self._resolve(ins, space, addr, width, idx, write=True)
        self._note(ins, space, "w", width, off, idx)
        races = self.races.get(space)
        if races is not None and not ins.sync:
            races.check(self, ins, idx, off, width, "w", cols, data)
        words = data[: data.size // size * size].view(UINT[size])
        at = off // size if size > 1 else off
        for j, c in enumerate(cols):
            words[at + j] = c
            if races is not None and (words[at + j] != c).any():
                k = int(np.flatnonzero(words[at + j] != c)[0])
                why = f"{space} memory race: threads store different values to address {int(off[k])} in one instruction"
                self.fail(ins, why, self.lane_number(idx, k))
        if not whole:
            for j in range(width):
                init[off + j] = True

    def atomic(self, ins, space, addr, size, cols, idx, f, new):
        """Read-modify-write: memory becomes f(memory, operand), or for f None (cas) ``new`` where it equals it.

        Lanes on one address go in lane order. Returns the old values.
        """
        width = size * len(cols)
        space, data, init, off, whole = self._resolve(ins, space, addr, width, idx, write=True)
        if not whole:
            self._check_init(ins, space, init, off, width, idx)
        self._note(ins, space, "rw", width, off, idx)
        self.stats.atomics += len(off)
        races = self.races.get(space)
        if races is not None:
            races.check(self, ins, idx, off, width, "a")
        words = data[: data.size // size * size].view(UINT[size])
        at = off // size
        old = [np.empty(len(off), UINT[size]) for _ in cols]
        for w in _rounds(at):
            for j, c in enumerate(cols):
                now = words[at[w] + j]
                old[j][w] = now
                words[at[w] + j] = f(now, c[w]) if f else np.where(now == c[w], new[w], now)
        return old

    def _resolve(self, ins, space, addr, width, idx, write):
        """Checks alignment, bounds and permission.

        Returns (space, bytes, marks of the initialised ones, offset of each lane, whether all is initialised).
        """
        n = self.count(idx)
        addr = np.broadcast_to(addr, n) if np.ndim(addr) == 0 else addr
        if n == 0:
            return "global", self.mem.data, self.mem.init, addr, False
        if space is None:
            space, addr = self._from_generic(ins, addr, idx)
        elif space in ("global", "const"):
            space, addr = "global", addr - GLOBAL_BASE
        elif space == "param":  # a generic address, or an offset into the parameters
            addr = np.where(addr >= PARAM_BASE, addr - PARAM_BASE, addr)
        if (addr & (width - 1)).any():
            j = int(np.flatnonzero(addr & (width - 1))[0])
            why = f"misaligned {space} access: {width} bytes at offset {int(addr[j]):#x}"
            self.fail(ins, why, self.lane_number(idx, j))
        if space == "global":
            return space, self.mem.data, self.mem.init, addr, self._check_global(ins, addr, width, idx, write)
        size = {"shared": self.smem_size, "local": self.kernel.local, "param": self.n_param_bytes}[space]
        if space == "param" and write:
            self.fail(ins, "store to the kernel's parameters")
        if int(addr.min()) < 0 or int(addr.max()) + width > size:
            j = int(np.flatnonzero((addr < 0) | (addr + width > size))[0])
            why = f"{width}-byte {space} {_verb(write)} out of bounds at offset {int(addr[j])} of {size}"
            self.fail(ins, why, self.lane_number(idx, j))
        if space == "param":
            return space, self.params, None, addr, True
        lanes = np.arange(self.n_lanes) if idx is None else idx
        if space == "shared":
            return space, self.shared, self.shared_init, addr + self.block_of[lanes] * self.smem_stride, False
        return space, self.local, self.local_init, addr + lanes * self.kernel.local, False

    def _from_generic(self, ins, addr, idx):
        low, high = int(addr.min()), int(addr.max())
        first, last = window(np.array([low, high]))
        if first != last:
            why = f"generic addresses from {low:#x} to {high:#x} are in more than one state space: not supported"
            self.fail(ins, why)
        if first < 0:
            self.fail(ins, f"invalid generic address {low:#x}", self.lane_number(idx, int(addr.argmin())))
        space, base = WINDOWS[first]
        return space, addr - base

    def _check_global(self, ins, addr, width, idx, write):
        """Every lane's access must be inside one allocation; True if all of theirs is known to be initialised."""
        alloc = self.mem.find(int(addr.min()) + GLOBAL_BASE)
        if alloc is not None and int(addr.max()) + width <= alloc.off + alloc.n:  # the usual case: one for all lanes
            if write and not alloc.writable:
                self.fail(ins, f"store to '{alloc.name}', which is read-only", self.lane_number(idx, 0))
            return alloc.full
        ok = np.zeros(len(addr), bool)
        for alloc in self.mem.allocs:
            inside = (addr >= alloc.off) & (addr + width <= alloc.off + alloc.n)
            if write and not alloc.writable and inside.any():
                lane = self.lane_number(idx, int(np.flatnonzero(inside)[0]))
                self.fail(ins, f"store to '{alloc.name}', which is read-only", lane)
            ok |= inside
        if not ok.all():
            j = int(np.flatnonzero(~ok)[0])
            at = int(addr[j])
            why = f"{width}-byte global {_verb(write)} out of bounds at {at + GLOBAL_BASE:#x} ({self.mem.where(at)})"
            self.fail(ins, why, self.lane_number(idx, j))
        return False

    def _check_init(self, ins, space, init, off, width, idx):
        if not self.options.check_uninit:
            return
        ok = init[off] & init[off + width - 1]
        for j in range(1, width - 1):
            ok &= init[off + j]
        if not ok.all():
            j = int(np.flatnonzero(~ok)[0])
            why = f"read of uninitialised {space} memory ({width} bytes at offset {int(off[j])})"
            self.fail(ins, why, self.lane_number(idx, j))

    def _note(self, ins, space, rw, width, off, idx):
        row = self.stats.access(ins, space, rw, width, len(off))
        if self.options.count_sectors and space == "global":
            warp = self.warp_of if idx is None else self.warp_of[idx]
            row["sectors"] += np.unique(warp << 44 | off >> 5).size


def _verb(write):
    return "store" if write else "load"


def _rounds(at):
    """Positions in ``at``, split so that no address occurs twice in a round, earlier positions first."""
    order = np.argsort(at, kind="stable")
    s = at[order]
    first = np.r_[True, s[1:] != s[:-1]]
    start = np.maximum.accumulate(np.where(first, np.arange(len(s)), 0))
    rank = np.empty(len(s), np.int64)
    rank[order] = np.arange(len(s)) - start
    by_rank = np.argsort(rank, kind="stable")
    cuts = np.flatnonzero(np.r_[True, np.diff(rank[by_rank]) > 0, True])
    return [by_rank[a:b] for a, b in itertools.pairwise(cuts)]
