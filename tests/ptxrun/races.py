"""Race detection by a shadow of memory."""

from __future__ import annotations

import numpy as np

from .ptxtypes import UINT

NOBODY, SEVERAL, AN_ATOMIC = -1, -2, -3


class Races:
    """Who last wrote and read each granule (the kernel's narrowest access), and in which barrier interval (epoch).

    Two accesses of which one is a write race if they come from different threads and no barrier lies between: of the
    block if the block is the same, of the warp if the warp is. Different blocks have no barrier at all.
    """

    def __init__(self, n_bytes, granule, what):
        n = n_bytes // granule + 1
        self.what, self.granule = what, granule
        self.writer, self.writer_block = np.full(n, NOBODY, np.int64), np.full(n, NOBODY, np.int32)
        self.reader = np.full(n, NOBODY, np.int64)
        self.reader_warp, self.reader_block = np.full(n, NOBODY, np.int32), np.full(n, NOBODY, np.int32)
        self.write_epoch, self.write_warp_epoch, self.read_epoch, self.read_warp_epoch = (
            np.zeros(n, np.int32) for _ in range(4)
        )

    def check(self, rt, ins, idx, off, width, kind, cols=None, data=None):
        """Looks for races of an access with earlier ones, then notes it.

        Args:
            off: byte offset of each lane's access, a multiple of ``width``.
            kind: "r", "w" or "a" (atomic).
            cols, data: for "w": the stored words, and the memory before the store.
        """
        g, k = self.granule, width // self.granule
        at = off // g if k == 1 else (off[:, None] // g + np.arange(k)).ravel()
        who = (rt.thread_id, rt.warp_id, rt.block_id, rt.block_epoch[rt.block_of], rt.warp_epoch[rt.warp_of])
        who = [x if idx is None else x[idx] for x in who]
        tid, warp, block, epoch, warp_epoch = [np.repeat(x, k) for x in who] if k > 1 else who

        writer = self.writer[at]
        hazard = (writer != NOBODY) & (writer != tid)
        if hazard.any():
            hazard &= (self.writer_block[at] != block) | (self.write_epoch[at] == epoch)
            in_block = writer // rt.n_threads * rt.warps_per_block + writer % rt.n_threads // 32
            writer_warp = np.where(writer >= 0, in_block, NOBODY)
            hazard &= ~((writer_warp == warp) & (self.write_warp_epoch[at] < warp_epoch))
            if kind == "a":
                hazard &= writer != AN_ATOMIC
        differs = None
        if kind == "w":  # storing what is there already is benign
            stored = np.stack(cols, 1).view(UINT[g]).ravel()
            differs = stored != data[: data.size // g * g].view(UINT[g])[at]
            hazard &= differs
        self._fail(rt, ins, idx, hazard, at, k, "write/" + {"r": "read", "w": "write", "a": "atomic"}[kind], writer)

        reader = self.reader[at]
        fresh = (self.reader_block[at] != block) | (self.read_epoch[at] == epoch)
        if kind == "r":
            self._note_read(at, tid, warp, block, fresh)
            self.read_epoch[at], self.read_warp_epoch[at] = epoch, warp_epoch
            return
        hazard = (reader != NOBODY) & (reader != tid)
        if hazard.any():
            hazard &= fresh & ~((self.reader_warp[at] == warp) & (self.read_warp_epoch[at] < warp_epoch))
            if kind == "w":
                hazard &= differs
            self._fail(rt, ins, idx, hazard, at, k, "read/" + ("write" if kind == "w" else "atomic"), reader)
        self.writer[at], self.write_epoch[at] = (tid if kind == "w" else AN_ATOMIC), epoch
        self.write_warp_epoch[at], self.writer_block[at] = warp_epoch, block

    def _note_read(self, at, tid, warp, block, fresh):
        stale = (self.reader_block[at] == block) & ~fresh
        for mine, store in ((tid, self.reader), (warp, self.reader_warp), (block, self.reader_block)):
            before = store[at]
            value = np.where((before == NOBODY) | (before == mine) | stale, mine, SEVERAL)
            store[at] = value
            store[at[store[at] != value]] = SEVERAL  # several lanes of this instruction

    def _fail(self, rt, ins, idx, hazard, at, k, kind, other):
        if not hazard.any():
            return
        j = int(np.flatnonzero(hazard)[0])
        lane = j // k if idx is None else int(idx[j // k])
        o = int(other[j])
        thread = f"block {o // rt.n_threads} thread {o % rt.n_threads}"
        who = {SEVERAL: "several threads", AN_ATOMIC: "an atomic"}.get(o, thread)
        where = f"{self.what} memory race ({kind}) at offset {int(at[j]) * self.granule}"
        rt.fail(ins, f"{where}: the other access is by {who}, with no barrier between", lane)
