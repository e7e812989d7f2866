"""The memory's own interface."""

from __future__ import annotations

import numpy as np
import pytest

from . import Memory, PtxError
from .memory import POISON, REDZONE_BYTES


def test_alloc_read_write():
    memory = Memory()
    x = memory.alloc(np.arange(8, dtype=np.float32), "x")
    y = memory.alloc(32, "y", misalign=4)
    assert y % 256 == 4
    assert memory.read(x + 8, np.float32, 2).tolist() == [2, 3]
    memory.write(y, np.ones(8, np.float32))
    assert memory.read(y, np.float32, 8).sum() == 8


def test_access_across_the_end():
    memory = Memory()
    x = memory.alloc(np.zeros(8, np.float32))
    with pytest.raises(PtxError, match=r"Memory\.read of 28 bytes"):
        memory.read(x + 8, np.float32, 7)
    with pytest.raises(PtxError, match=r"Memory\.write of 4 bytes"):
        memory.write(x + 32, np.zeros(1, np.float32))


def test_uninitialised_bytes_are_poison():
    memory = Memory()
    x = memory.alloc(np.zeros(4, np.uint8), init=False)
    assert memory.read(x, np.uint8, 4).tolist() == [POISON] * 4
    memory.write(x + 1, np.zeros(2, np.uint8))
    assert memory.written(x, 4).tolist() == [False, True, True, False]


@pytest.mark.parametrize("guards", [(0, 0), (0, 4096), (4096, 0), (5000, 70_000)])
def test_guard_is_the_larger_of_the_neighbours(guards):
    memory = Memory()
    x, y = (memory.alloc(100, guard_bytes=g) for g in guards)
    assert y - (x + 100) >= max(*guards, REDZONE_BYTES)


def test_release_makes_memory_uninitialised_again():
    memory = Memory()
    memory.alloc(np.ones(4))
    mark = memory.mark()
    x = memory.alloc(np.ones(4))
    memory.release(mark)
    assert memory.find(x) is None
    assert memory.alloc(32) == x
    assert not memory.written(x, 32).any()
