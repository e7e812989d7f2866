"""Kernels of ``adam_step_`` and ``sgd_step_``: one pass over accumulator, states, masters and parameters.

One program a chunk, a row of 1024 elements at a time. A parameter has up to two places: 32 bits wide (its master, or
itself) and 16 bits low. As in ``accumulate.py``, a mask that all lanes share switches off what a tensor does not have.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusedaccum import layout

from .chunks import DTYPE_SHIFT, SLOT_SHIFT, find_chunk, is_aligned
from .elements import BFLOAT16, CHUNK, FLOAT32, LANES, SLOT_COLUMNS, adam_update, rounded_to, sgd_update, widened

SKIPPED = tl.constexpr(layout.SKIPPED)
SCALAR_COLUMNS = tl.constexpr(layout.SCALAR_COLUMNS)
TAIL = tl.constexpr(256)
AMSGRAD_SCALAR = tl.constexpr(10)
MOMENTUM_SCALAR = tl.constexpr(2)


@triton.jit
def place(table, entries, n_entries, acc, extra, master):
    """Where this program's chunk lies: (slot, elements, offset in acc, extra, wide, low, dtype, which exist)."""
    address, what, index = find_chunk(entries, n_entries)
    slot = what >> SLOT_SHIFT
    row = table + slot * SLOT_COLUMNS
    begin = index.to(tl.int64) * CHUNK
    n = tl.minimum(tl.load(row + 1) - begin, CHUNK).to(tl.int32)
    master_offset, extra_offset = tl.load(row + 4), tl.load(row + 5)
    dtype = (what >> DTYPE_SHIFT) & 3
    is_float32 = dtype == FLOAT32
    has_master = (master_offset >= 0) & (is_float32 == 0)
    # Where there is none, an address that is aligned, and never accessed.
    wide_address = tl.where(is_float32, address, 0) + tl.where(
        has_master, master.to(tl.int64) + (master_offset + begin) * 4, 0
    )
    wide = (wide_address + tl.where(is_float32, begin * 4, 0)).to(tl.pointer_type(tl.float32))
    low = tl.where(is_float32, 0, address + begin * 2).to(tl.pointer_type(tl.uint16))
    extra_address = tl.where(extra_offset >= 0, extra.to(tl.int64) + (extra_offset + begin) * 4, 0)
    here = tl.load(row) + begin
    return (
        slot, n, here, extra_address.to(tl.pointer_type(tl.float32)), extra_offset >= 0, wide, low, is_float32,
        has_master, dtype == BFLOAT16,
    )  # fmt: skip


@triton.jit
def load_row(base, i, inside, wanted, FULL: tl.constexpr):
    """A row of fp32 (zeros unless ``wanted``); ``FULL``: aligned to 16 bytes, and no element is missing."""
    at = base + i  # a hint on an argument would be lost where the function is inlined
    if FULL:
        value = tl.load(tl.multiple_of(at, 16), mask=wanted, other=0)
    else:
        value = tl.load(at, mask=inside & wanted, other=0)
    return value


@triton.jit
def store_row(base, i, value, inside, wanted, FULL: tl.constexpr):
    """As ``load_row``."""
    at = base + i
    if FULL:
        tl.store(tl.multiple_of(at, 16), value, mask=wanted)
    else:
        tl.store(at, value, mask=inside & wanted)


@triton.jit
def adam_row(
    acc, exp_avg, exp_avg_sq, extra, wide, low, scalars, n, row, amsgrad, is_float32, has_master, is_bfloat16,
    SIZE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    i = row * SIZE + tl.arange(0, SIZE)
    inside = i < n
    always = n > 0
    has_wide = is_float32 | has_master
    grad = load_row(acc, i, inside, always, FULL)
    first = load_row(exp_avg, i, inside, always, FULL)
    second = load_row(exp_avg_sq, i, inside, always, FULL)
    largest = load_row(extra, i, inside, amsgrad, FULL)
    param32 = load_row(wide, i, inside, has_wide, FULL)
    param16 = load_row(low, i, inside, has_wide == 0, FULL)
    value = tl.where(has_wide, param32, widened(param16, is_bfloat16))
    value, first, second, largest = adam_update(value, first, second, largest, grad, amsgrad, scalars)
    store_row(exp_avg, i, first, inside, always, FULL)
    store_row(exp_avg_sq, i, second, inside, always, FULL)
    store_row(extra, i, largest, inside, amsgrad, FULL)
    store_row(wide, i, value, inside, has_wide, FULL)
    store_row(low, i, rounded_to(value, is_bfloat16), inside, is_float32 == 0, FULL)


@triton.jit(
    do_not_specialize=["n_entries"],
    do_not_specialize_on_alignment=[
        "exp_avg", "exp_avg_sq", "extra", "master", "acc", "table", "scalars", "control", "entries"
    ],
)  # fmt: skip
def adam_kernel(exp_avg, exp_avg_sq, extra, master, acc, table, scalars, control, entries, n_entries: tl.int32):
    """All float32 but ``table`` and ``entries`` (int64) and ``control`` (float64).

    ``extra`` and ``master`` are anything where no slot of the launch has any.
    """
    if tl.load(control + SKIPPED) == 0.0:
        slot, n, here, extra_here, has_extra, wide, low, is_float32, has_master, is_bfloat16 = place(
            table, entries, n_entries, acc, extra, master
        )
        own = scalars + slot * SCALAR_COLUMNS
        # Read here, once: in a loop that stores they would be read again for each row.
        values = (
            tl.load(own), tl.load(own + 1), tl.load(own + 2), tl.load(own + 3), tl.load(own + 4), tl.load(own + 5),
            tl.load(own + 6), tl.load(own + 7), tl.load(own + 8), tl.load(own + 9),
        )  # fmt: skip
        amsgrad = has_extra & (tl.load(own + AMSGRAD_SCALAR) != 0.0)
        # Offsets are multiples of 64 elements, so a misaligned base is the exception, and a parameter that is a view.
        aligned = is_aligned(acc + here) & is_aligned(exp_avg + here) & is_aligned(exp_avg_sq + here)
        aligned = aligned & is_aligned(extra_here) & is_aligned(wide) & is_aligned(low)
        full = tl.where(aligned, n // LANES, 0)
        for i in range(0, full):
            adam_row(
                acc + here, exp_avg + here, exp_avg_sq + here, extra_here, wide, low, values, n, i, amsgrad, is_float32,
                has_master, is_bfloat16, LANES, True,
            )  # fmt: skip
        for i in range(full * (LANES // TAIL), (n + TAIL - 1) // TAIL):
            adam_row(
                acc + here, exp_avg + here, exp_avg_sq + here, extra_here, wide, low, values, n, i, amsgrad, is_float32,
                has_master, is_bfloat16, TAIL, False,
            )  # fmt: skip


@triton.jit
def sgd_row(
    acc,
    extra,
    wide,
    low,
    scalars,
    n,
    row,
    has_momentum,
    is_float32,
    has_master,
    is_bfloat16,
    SIZE: tl.constexpr,
    FULL: tl.constexpr,
):
    i = row * SIZE + tl.arange(0, SIZE)
    inside = i < n
    always = n > 0
    has_wide = is_float32 | has_master
    grad = load_row(acc, i, inside, always, FULL)
    # The first buffer is the gradient itself: the old one need not be read.
    buffer = load_row(extra, i, inside, has_momentum & (scalars[6] == 0.0), FULL)
    param32 = load_row(wide, i, inside, has_wide, FULL)
    param16 = load_row(low, i, inside, has_wide == 0, FULL)
    value = tl.where(has_wide, param32, widened(param16, is_bfloat16))
    value, buffer = sgd_update(value, buffer, grad, has_momentum, scalars)
    store_row(extra, i, buffer, inside, has_momentum, FULL)
    store_row(wide, i, value, inside, has_wide, FULL)
    store_row(low, i, rounded_to(value, is_bfloat16), inside, is_float32 == 0, FULL)


@triton.jit(
    do_not_specialize=["n_entries"],
    do_not_specialize_on_alignment=["extra", "master", "acc", "table", "scalars", "control", "entries"],
)  # fmt: skip
def sgd_kernel(extra, master, acc, table, scalars, control, entries, n_entries: tl.int32):
    """As ``adam_kernel``."""
    if tl.load(control + SKIPPED) == 0.0:
        slot, n, here, extra_here, has_extra, wide, low, is_float32, has_master, is_bfloat16 = place(
            table, entries, n_entries, acc, extra, master
        )
        own = scalars + slot * SCALAR_COLUMNS
        values = (
            tl.load(own), tl.load(own + 1), tl.load(own + 2), tl.load(own + 3), tl.load(own + 4), tl.load(own + 5),
            tl.load(own + 6),
        )  # fmt: skip
        has_momentum = has_extra & (values[MOMENTUM_SCALAR] != 0.0)
        aligned = is_aligned(acc + here) & is_aligned(extra_here) & is_aligned(wide) & is_aligned(low)
        full = tl.where(aligned, n // LANES, 0)
        for i in range(0, full):
            sgd_row(
                acc + here,
                extra_here,
                wide,
                low,
                values,
                n,
                i,
                has_momentum,
                is_float32,
                has_master,
                is_bfloat16,
                LANES,
                True,
            )
        for i in range(full * (LANES // TAIL), (n + TAIL - 1) // TAIL):
            sgd_row(
                acc + here,
                extra_here,
                wide,
                low,
                values,
                n,
                i,
                has_momentum,
                is_float32,
                has_master,
                is_bfloat16,
                TAIL,
                False,
            )
