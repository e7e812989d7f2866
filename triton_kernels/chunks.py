"""What the kernels share: which chunk a program works on, and the fixed tree over the lanes of a chunk.

The entries of a launch, (3, n_entries) int64, made by ``plan.py``: addresses; chunks of the launch up to and including
the tensor's; and slot, dtype and whether it is a first add in one number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusedaccum import layout

from .elements import LANES

SLOT_SHIFT = tl.constexpr(3)
DTYPE_SHIFT = tl.constexpr(1)
HALVINGS = tl.constexpr(layout.LANES.bit_length() - 1)


@triton.jit
def find_chunk(entries, n_entries):
    """(address, what, chunks before in the tensor) of this program: the first entry whose end lies behind it."""
    program = tl.program_id(0)
    ends = entries + n_entries
    low = 0
    high = n_entries - 1
    while low < high:
        middle = (low + high) // 2
        if tl.load(ends + middle) <= program:
            low = middle + 1
        else:
            high = middle
    before = tl.load(ends + low - 1, mask=low > 0, other=0)
    return tl.load(entries + low), tl.load(ends + n_entries + low), program - before


@triton.jit
def is_aligned(pointer):
    """Whether 16-byte accesses may start at ``pointer``."""
    return (pointer.to(tl.int64) & 15) == 0


@triton.jit
def lane_tree(lanes):
    """The sum of 1024 fp64 lanes, bit for bit that of csrc/cpu/loops.h: lane i takes lane i + stride, for strides 512,
    256, ... 1. Each reduction is of two numbers, so its order leaves nothing open."""
    for halvings in tl.static_range(HALVINGS - 1):
        lanes = tl.reduce(tl.reshape(lanes, [2, LANES >> (halvings + 1)]), 0, tl.standard._sum_combine)
    return tl.reduce(lanes, 0, tl.standard._sum_combine)


@triton.jit
def squared_lanes(data, n):
    """Sums of squares of ``n`` elements over 1024 lanes, in fp64: for a chunk whose fp32 sum overflowed."""
    lane = tl.arange(0, LANES)
    lanes = tl.full([LANES], 0.0, tl.float64)
    for row in range(0, (n + LANES - 1) // LANES):
        i = row * LANES + lane
        value = tl.load(data + i, mask=i < n, other=0.0).to(tl.float64)
        lanes += value * value
    return lanes
