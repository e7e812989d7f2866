"""Kernels of ``accumulate_`` and ``measure_``: one program a chunk, a row of 1024 elements at a time.

Whatever differs from tensor to tensor (dtype, first add, alignment) is a number that all lanes of a program share:
loads and stores that do not apply are switched off by a mask, which moves no bytes and keeps accesses 16 bytes wide.
Bytes an element: the gradient read, the accumulator read and written; a first add does not read it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunks import DTYPE_SHIFT, SLOT_SHIFT, find_chunk, is_aligned, lane_tree, squared_lanes
from .elements import BFLOAT16, CHUNK, FLOAT32, LANES, SLOT_COLUMNS, widened


@triton.jit
def accumulate_row(
    acc, wide, low, n, row, lanes, micro_lanes, scale, adds, first, is_float32, is_bfloat16, FULL: tl.constexpr,
    KEEP_MICRO: tl.constexpr,
):  # fmt: skip
    """One row. ``FULL``: all its elements exist and every array is aligned to 16 bytes."""
    i = row * LANES + tl.arange(0, LANES)
    at_acc, at_wide, at_low = acc + i, wide + i, low + i
    if FULL:
        inside = tl.full([LANES], True, tl.int1)
        at_acc, at_wide, at_low = tl.multiple_of(at_acc, 16), tl.multiple_of(at_wide, 16), tl.multiple_of(at_low, 16)
        old = tl.load(at_acc, mask=first == 0, other=0.0)
        grad32 = tl.load(at_wide, mask=adds & is_float32, other=0.0)
        grad16 = tl.load(at_low, mask=adds & (is_float32 == 0), other=0)
    else:
        inside = i < n
        old = tl.load(at_acc, mask=inside & (first == 0), other=0.0)
        grad32 = tl.load(at_wide, mask=inside & (adds & is_float32), other=0.0)
        grad16 = tl.load(at_low, mask=inside & (adds & (is_float32 == 0)), other=0)
    added = tl.where(is_float32, grad32, widened(grad16, is_bfloat16)) * scale
    # A stored product, not one added to zero, which would lose the sign of a negative zero.
    result = tl.where(first, added, old + added)
    if FULL:
        tl.store(at_acc, result)
        lanes += result * result
        if KEEP_MICRO:
            micro_lanes += added * added
    else:
        tl.store(at_acc, result, mask=inside)
        # An infinite scale makes NaN of the zeros that stand for elements beyond the end.
        lanes += tl.where(inside, result * result, 0.0)
        if KEEP_MICRO:
            micro_lanes += tl.where(inside, added * added, 0.0)
    return lanes, micro_lanes


@triton.jit(
    do_not_specialize=["n_entries"],
    do_not_specialize_on_alignment=["acc", "partials", "micro_partials", "table", "entries", "factor"],
)
def accumulate_kernel(
    acc,
    partials,
    micro_partials,
    table,
    entries,
    factor,
    n_entries: tl.int32,
    scale: tl.float64,
    KEEP_MICRO: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
):
    """``acc`` float32; ``partials``, ``micro_partials``, ``factor`` float64; ``table``, ``entries`` int64.

    ``micro_partials`` and ``factor`` are anything where they are switched off.
    """
    address, what, index = find_chunk(entries, n_entries)
    row = table + (what >> SLOT_SHIFT) * SLOT_COLUMNS
    begin = index.to(tl.int64) * CHUNK
    n = tl.minimum(tl.load(row + 1) - begin, CHUNK).to(tl.int32)
    first = (what & 1) != 0
    dtype = (what >> DTYPE_SHIFT) & 3
    is_float32, is_bfloat16 = dtype == FLOAT32, dtype == BFLOAT16
    product = tl.full((), scale, tl.float64)
    if HAS_FACTOR:
        product = product * tl.load(factor)
    effective = product.to(tl.float32)
    adds = effective != 0.0
    if adds | first:
        here = acc + tl.load(row) + begin
        wide = address.to(tl.pointer_type(tl.float32)) + begin
        low = address.to(tl.pointer_type(tl.uint16)) + begin
        # A scale of 0 adds nothing; its sign would otherwise reach the zeros that a first add stores.
        used = tl.where(adds, effective, 1.0)
        aligned = is_aligned(here) & ((address & 15) == 0)
        full = tl.where(aligned, n // LANES, 0)
        lanes = tl.full([LANES], 0.0, tl.float32)
        micro_lanes = tl.full([LANES], 0.0, tl.float32)
        for i in range(0, full):
            lanes, micro_lanes = accumulate_row(
                here, wide, low, n, i, lanes, micro_lanes, used, adds, first, is_float32, is_bfloat16, True, KEEP_MICRO
            )
        # Sums of their own: these rows are spread over the threads in another way, which the others need not follow.
        # There is but one of them, or there were none before, so that the order of each lane's sum stays the same.
        tail_lanes = tl.full([LANES], 0.0, tl.float32)
        tail_micro = tl.full([LANES], 0.0, tl.float32)
        for i in range(full, (n + LANES - 1) // LANES):
            tail_lanes, tail_micro = accumulate_row(
                here, wide, low, n, i, tail_lanes, tail_micro, used, adds, first, is_float32, is_bfloat16, False,
                KEEP_MICRO,
            )  # fmt: skip
        total = lane_tree((lanes + tail_lanes).to(tl.float64))
        if total - total != 0.0:  # overflowed in fp32, or not finite at all
            tl.debug_barrier()  # other threads may have written what this one reads
            total = lane_tree(squared_lanes(here, n))
        chunk = tl.load(row + 2) + index
        tl.store(partials + chunk, total)
        if KEEP_MICRO:
            kept = tl.load(micro_partials + chunk, mask=first == 0, other=0.0)
            grown = kept + lane_tree((micro_lanes + tail_micro).to(tl.float64))
            tl.debug_barrier()  # every thread has read the number before one writes it
            tl.store(micro_partials + chunk, tl.where(first, total, grown))


@triton.jit(
    do_not_specialize=["n_entries"],
    do_not_specialize_on_alignment=["acc", "partials", "table", "entries"],
)
def measure_kernel(acc, partials, table, entries, n_entries: tl.int32):
    """``acc`` float32, ``partials`` float64, ``table`` and ``entries`` int64."""
    _, what, index = find_chunk(entries, n_entries)
    row = table + (what >> SLOT_SHIFT) * SLOT_COLUMNS
    begin = index.to(tl.int64) * CHUNK
    n = tl.minimum(tl.load(row + 1) - begin, CHUNK).to(tl.int32)
    here = acc + tl.load(row) + begin
    lane = tl.arange(0, LANES)
    lanes = tl.full([LANES], 0.0, tl.float32)
    full = tl.where(is_aligned(here), n // LANES, 0)
    for i in range(0, full):
        value = tl.load(tl.multiple_of(here + i * LANES + lane, 16))
        lanes += value * value
    for i in range(full, (n + LANES - 1) // LANES):
        value = tl.load(here + i * LANES + lane, mask=i * LANES + lane < n, other=0.0)
        lanes += value * value
    total = lane_tree(lanes.to(tl.float64))
    if total - total != 0.0:
        total = lane_tree(squared_lanes(here, n))
    tl.store(partials + tl.load(row + 2) + index, total)
