"""Global memory: one flat array of bytes with red zones between the allocations."""

from __future__ import annotations

import numpy as np

from .ptxtypes import GLOBAL_BASE, PtxError

REDZONE_BYTES = 512
POISON = 0xCB
"""What uninitialised bytes hold: as a float it is -2.7e7 (fp32), which does not pass for a result."""


class Uninit:
    """Wraps an array argument whose bytes the kernel must write before it reads them."""

    def __init__(self, array):
        self.array = array


class Alloc:
    """One allocation.

    ``full``: every byte was initialised when it was made, so reads need no look at the marks.
    """

    def __init__(self, off, n, name, writable, full):
        self.off, self.n, self.name, self.writable, self.full = off, n, name, writable, full


class Memory:
    """Byte-addressed global memory; an access that is not inside one allocation is an error."""

    def __init__(self):
        self.allocs, self.top = [], REDZONE_BYTES
        self.data = np.zeros(1 << 16, np.uint8)
        self.init = np.zeros(1 << 16, np.bool_)  # False: never written

    def alloc(self, what, name=None, misalign=0, writable=True, init=True, guard_bytes=REDZONE_BYTES):
        """Makes an allocation and returns its address, ``misalign`` bytes past a multiple of 256.

        Args:
            what: an array (copied in) or a number of bytes (uninitialised).
            name: for messages.
            writable: False makes a store to it an error.
            init: False marks an array's bytes as never written (they read as POISON, and reading them is an error).
            guard_bytes: at least so many bytes before and behind it belong to no allocation.
        """
        raw = None if isinstance(what, (int, np.integer)) else np.ascontiguousarray(what).reshape(-1).view(np.uint8)
        n = int(what) if raw is None else raw.size
        guard_bytes = max(guard_bytes, REDZONE_BYTES)
        off = (self.top + guard_bytes - REDZONE_BYTES + 255) // 256 * 256 + misalign
        self.top = off + max(n, 1) + guard_bytes
        if self.top + 64 > self.data.size:
            # 64 spare bytes: vector views of the whole array may be cut to a multiple of 8.
            size = (max(self.top + 64, 2 * self.data.size) + 63) // 64 * 64
            self.data = np.concatenate([self.data, np.zeros(size - self.data.size, np.uint8)])
            self.init = np.concatenate([self.init, np.zeros(size - self.init.size, np.bool_)])
        full = raw is not None and init
        self.allocs.append(Alloc(off, n, name or f"alloc{len(self.allocs)}", writable, full))
        self.init[off : off + n] = full
        self.data[off : off + n] = raw if full else POISON
        return GLOBAL_BASE + off

    def mark(self):
        """What is allocated now, for ``release``."""
        return self.top, len(self.allocs)

    def release(self, mark):
        """Frees every allocation made since ``mark``."""
        top, n_allocs = mark
        del self.allocs[n_allocs:]
        self.init[top : self.top] = False
        self.top = top

    def find(self, addr):
        """The allocation that holds the byte at ``addr``, or None."""
        off = int(addr) - GLOBAL_BASE
        return next((a for a in self.allocs if a.off <= off < a.off + max(a.n, 1)), None)

    def read(self, addr, dtype, count):
        """A copy of ``count`` elements at ``addr``, initialised or not."""
        off, n = self._inside("read", addr, np.dtype(dtype).itemsize * int(count))
        return self.data[off : off + n].copy().view(dtype)

    def written(self, addr, n_bytes):
        """Which of the bytes at ``addr`` have ever been written."""
        off, n = self._inside("written", addr, n_bytes)
        return self.init[off : off + n].copy()

    def write(self, addr, array):
        """Stores an array from the host's side."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        off, n = self._inside("write", addr, raw.size)
        self.data[off : off + n], self.init[off : off + n] = raw, True

    def _inside(self, what, addr, n):
        off = int(addr) - GLOBAL_BASE
        alloc = self.find(addr)
        if alloc is None or off + n > alloc.off + alloc.n:
            raise PtxError(f"Memory.{what} of {n} bytes at {addr:#x} is not inside one allocation")
        return off, n

    def where(self, off):
        """Words that place an offset relative to the nearest allocation, for messages."""
        near = min(self.allocs, key=lambda a: max(a.off - off, off - a.off - a.n, 0), default=None)
        if near is None:
            return "no allocation exists"
        return f"nearest allocation: '{near.name}', {near.n} bytes; the address is at byte {off - near.off} of it"
