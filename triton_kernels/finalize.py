"""Kernel of ``finalize_``: from the partials to the control block, the window and the scalars of every slot, in one
program.

All of it is fp64, where Triton's plain ``/`` and ``sqrt`` are the IEEE operations; ``tl.div_rn`` and ``tl.sqrt_rn``
take fp32 only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusedaccum import layout

from .chunks import lane_tree
from .elements import CHUNK, LANES, SLOT_COLUMNS, integer_power

SLOTS = tl.constexpr(256)
"""Slots whose scalars are written at a time."""
HYPER_COLUMNS = tl.constexpr(layout.HYPER_COLUMNS)
SCALAR_COLUMNS = tl.constexpr(layout.SCALAR_COLUMNS)
ADAM, NO_RULE = tl.constexpr(layout.RULE_ADAM), tl.constexpr(layout.RULE_NONE)
LARGEST_FLOAT32 = tl.constexpr(3.4028234663852886e38)

NORM, FOUND_INF, CLIP_COEF, GRAD_MULTIPLIER, SUM_SQ, SKIPPED, MICRO_NORM, MICRO_SUM_SQ = (
    tl.constexpr(entry) for entry in range(layout.CONTROL_SIZE)
)
WEIGHT, WEIGHT_SQ = tl.constexpr(layout.WEIGHT), tl.constexpr(layout.WEIGHT_SQ)
LOSS_SCALE, INV_LOSS_SCALE = tl.constexpr(layout.LOSS_SCALE), tl.constexpr(layout.INV_LOSS_SCALE)
GROWTH_TRACKER, GROWTH_FACTOR = tl.constexpr(layout.GROWTH_TRACKER), tl.constexpr(layout.GROWTH_FACTOR)
BACKOFF_FACTOR, GROWTH_INTERVAL = tl.constexpr(layout.BACKOFF_FACTOR), tl.constexpr(layout.GROWTH_INTERVAL)
WINDOWS, SKIPPED_WINDOWS = tl.constexpr(layout.WINDOWS), tl.constexpr(layout.SKIPPED_WINDOWS)
CLIPPED_WINDOWS, DECAY = tl.constexpr(layout.CLIPPED_WINDOWS), tl.constexpr(layout.DECAY)
GRAD_SQ, NOISE = tl.constexpr(layout.GRAD_SQ), tl.constexpr(layout.NOISE)
MEAN_WEIGHT, MICRO_WEIGHT = tl.constexpr(layout.MEAN_WEIGHT), tl.constexpr(layout.MICRO_WEIGHT)


@triton.jit
def active_sums(partials, micro_partials, table, active, n_slots, n_chunks, n_turns, HAS_MICRO: tl.constexpr):
    """Sums over the chunks of active slots: lane = chunk modulo 1024, in order, then the tree.

    Slots lie in chunk order: each lane finds its chunk's by bisection, in ``n_turns``. Others' partials are not read.
    """
    lane = tl.arange(0, LANES)
    lanes = tl.full([LANES], 0.0, tl.float64)
    micro_lanes = tl.full([LANES], 0.0, tl.float64)
    for row in range(0, (n_chunks + LANES - 1) // LANES):
        chunk = row * LANES + lane
        low = tl.full([LANES], 0, tl.int32)
        high = low + n_slots
        for _ in range(0, n_turns):
            is_open = low < high
            middle = (low + high) // 2
            slot = table + middle.to(tl.int64) * SLOT_COLUMNS
            n_elems = tl.load(slot + 1, mask=is_open, other=0)
            end = tl.load(slot + 2, mask=is_open, other=0) + (n_elems + CHUNK - 1) // CHUNK
            is_before = end <= chunk
            low = tl.where(is_open & is_before, middle + 1, low)
            high = tl.where(is_open & (is_before == 0), middle, high)
        exists = (low < n_slots) & (chunk < n_chunks)
        counts = tl.load(active + low, mask=exists, other=0) != 0
        lanes += tl.load(partials + chunk, mask=counts, other=0.0)
        if HAS_MICRO:
            micro_lanes += tl.load(micro_partials + chunk, mask=counts, other=0.0)
    total = lane_tree(lanes)
    if HAS_MICRO:
        micro_total = lane_tree(micro_lanes)
    else:
        micro_total = tl.full((), 0.0, tl.float64)
    return total, micro_total


@triton.jit
def advance_window(
    window, norm, micro_norm, clip_coef, found_inf, stepped, total, total_sq, HAS_MICRO: tl.constexpr
):  # fmt: skip
    """``advance_window`` of csrc/math.h, with what it calls."""
    windows, skipped_windows = tl.load(window + WINDOWS), tl.load(window + SKIPPED_WINDOWS)
    clipped_windows = tl.load(window + CLIPPED_WINDOWS)
    scale, tracker = tl.load(window + LOSS_SCALE), tl.load(window + GROWTH_TRACKER)
    successful = tracker + 1.0
    is_due = successful == tl.load(window + GROWTH_INTERVAL)
    grown = scale * tl.load(window + GROWTH_FACTOR)
    backed_off = scale * tl.load(window + BACKOFF_FACTOR)
    scale = tl.where(found_inf, backed_off, tl.where(is_due & (grown <= LARGEST_FLOAT32), grown, scale))
    decay = tl.load(window + DECAY)
    grad_sq, noise = tl.load(window + GRAD_SQ), tl.load(window + NOISE)
    mean_weight = tl.load(window + MEAN_WEIGHT)
    tl.debug_barrier()  # every thread has read the window before one writes it

    tl.store(window + WINDOWS, windows + 1.0)
    tl.store(window + SKIPPED_WINDOWS, tl.where(stepped, skipped_windows, skipped_windows + 1.0))
    tl.store(window + CLIPPED_WINDOWS, tl.where(stepped & (clip_coef < 1.0), clipped_windows + 1.0, clipped_windows))
    if found_inf | stepped:  # a window without weight says nothing about the scale
        tl.store(window + LOSS_SCALE, scale)
        tl.store(window + GROWTH_TRACKER, tl.where(found_inf | is_due, 0.0, successful))
        tl.store(window + INV_LOSS_SCALE, 1.0 / scale)
    if stepped:
        tl.store(window + MICRO_WEIGHT, total_sq / total)
        if HAS_MICRO:
            rho = total_sq / (total * total)
            big = norm * norm
            small = (micro_norm * micro_norm) * rho
            new_grad_sq = (big - small) / (1.0 - rho)
            new_noise = ((small - rho * big) / (1.0 - rho)) * total
            if (rho < 1.0) & (new_grad_sq - new_grad_sq == 0.0) & (new_noise - new_noise == 0.0):
                fresh = 1.0 - decay
                tl.store(window + GRAD_SQ, decay * grad_sq + fresh * new_grad_sq)
                tl.store(window + NOISE, decay * noise + fresh * new_noise)
                tl.store(window + MEAN_WEIGHT, decay * mean_weight + fresh)
    tl.store(window + WEIGHT, 0.0)
    tl.store(window + WEIGHT_SQ, 0.0)


@triton.jit
def write_adam_scalars(row, hyper, multiplier, count, wanted):
    """``adam_scalars`` of csrc/math.h, for the slots ``wanted``."""
    lr = tl.load(hyper, mask=wanted, other=0.0)
    beta1 = tl.load(hyper + 1, mask=wanted, other=0.0)
    beta2 = tl.load(hyper + 2, mask=wanted, other=0.0)
    weight_decay = tl.load(hyper + 4, mask=wanted, other=0.0)
    decoupled = tl.load(hyper + 5, mask=wanted, other=0.0) != 0.0
    exponent = count.to(tl.int64)
    step_size = lr / (1.0 - integer_power(beta1, exponent))
    inv_bias_correction2_sqrt = 1.0 / tl.sqrt(1.0 - integer_power(beta2, exponent))
    sign = tl.load(hyper + 6, mask=wanted, other=0.0)
    tl.store(row, (multiplier * sign).to(tl.float32), mask=wanted)
    tl.store(row + 1, step_size.to(tl.float32), mask=wanted)
    tl.store(row + 2, inv_bias_correction2_sqrt.to(tl.float32), mask=wanted)
    tl.store(row + 3, tl.where(decoupled, 1.0 - lr * weight_decay, 1.0).to(tl.float32), mask=wanted)
    tl.store(row + 4, beta1.to(tl.float32), mask=wanted)
    tl.store(row + 5, (1.0 - beta1).to(tl.float32), mask=wanted)
    tl.store(row + 6, beta2.to(tl.float32), mask=wanted)
    tl.store(row + 7, (1.0 - beta2).to(tl.float32), mask=wanted)
    tl.store(row + 8, tl.load(hyper + 3, mask=wanted, other=0.0).to(tl.float32), mask=wanted)
    tl.store(row + 9, tl.where(decoupled, 0.0, weight_decay).to(tl.float32), mask=wanted)
    tl.store(row + 10, tl.load(hyper + 7, mask=wanted, other=0.0).to(tl.float32), mask=wanted)
    tl.store(row + 11, tl.full([SLOTS], 0.0, tl.float32), mask=wanted)


@triton.jit
def write_sgd_scalars(row, hyper, multiplier, count, wanted):
    """``sgd_scalars`` of csrc/math.h, for the slots ``wanted``."""
    sign = tl.load(hyper + 6, mask=wanted, other=0.0)
    tl.store(row, (multiplier * sign).to(tl.float32), mask=wanted)
    tl.store(row + 1, tl.load(hyper, mask=wanted, other=0.0).to(tl.float32), mask=wanted)
    tl.store(row + 2, tl.load(hyper + 1, mask=wanted, other=0.0).to(tl.float32), mask=wanted)
    tl.store(row + 3, (1.0 - tl.load(hyper + 2, mask=wanted, other=0.0)).to(tl.float32), mask=wanted)
    tl.store(row + 4, tl.load(hyper + 4, mask=wanted, other=0.0).to(tl.float32), mask=wanted)
    tl.store(row + 5, tl.load(hyper + 3, mask=wanted, other=0.0).to(tl.float32), mask=wanted)
    tl.store(row + 6, tl.where(count == 1.0, 1.0, 0.0), mask=wanted)
    for unused in tl.static_range(7, SCALAR_COLUMNS):
        tl.store(row + unused, tl.full([SLOTS], 0.0, tl.float32), mask=wanted)


@triton.jit(
    do_not_specialize=["n_slots", "n_groups", "n_chunks", "n_turns", "has_extra", "advance"],
    do_not_specialize_on_alignment=[
        "control", "scalars", "steps", "window", "partials", "micro_partials", "table", "hyper", "active", "extra"
    ],
)  # fmt: skip
def finalize_kernel(
    control, scalars, steps, window, partials, micro_partials, table, hyper, active, extra,
    n_slots: tl.int32, n_groups: tl.int32, n_chunks: tl.int32, n_turns: tl.int32, numerator: tl.float64,
    weight: tl.float64, weight_sq: tl.float64, max_norm: tl.float64, has_extra: tl.int32, advance: tl.int32,
    RULE: tl.constexpr, HAS_MICRO: tl.constexpr,
):  # fmt: skip
    """The tensors of ``finalize_``; ``micro_partials`` and ``extra`` are anything where there are none.

    ``n_turns``: bits of ``n_slots``.
    """
    sum_sq, micro_sum_sq = active_sums(partials, micro_partials, table, active, n_slots, n_chunks, n_turns, HAS_MICRO)
    # Sums of squares are no negative zeros, so that adding zero changes nothing.
    sum_sq += tl.load(extra, mask=has_extra != 0, other=0.0)
    micro_sum_sq += tl.load(extra + 1, mask=has_extra != 0, other=0.0)

    total = tl.full((), weight, tl.float64) + tl.load(window + WEIGHT)
    total_sq = tl.full((), weight_sq, tl.float64) + tl.load(window + WEIGHT_SQ)
    has_weight = total > 0.0
    correction = tl.where(has_weight, tl.full((), numerator, tl.float64) / total, 0.0)
    norm = tl.sqrt(sum_sq) * correction
    found_inf = sum_sq - sum_sq != 0.0
    ratio = tl.full((), max_norm, tl.float64) / (norm + 1e-6)
    clip_coef = tl.where(ratio < 1.0, ratio, 1.0)
    multiplier = clip_coef * correction
    stepped = (found_inf == 0) & has_weight
    squared = micro_sum_sq * (correction * correction)
    micro_norm = tl.where(has_weight & (total_sq > 0.0), tl.sqrt(squared / (total_sq / (total * total))), 0.0)
    tl.store(control + NORM, norm)
    tl.store(control + FOUND_INF, tl.where(found_inf, 1.0, 0.0).to(tl.float64))
    tl.store(control + CLIP_COEF, clip_coef)
    tl.store(control + GRAD_MULTIPLIER, multiplier)
    tl.store(control + SUM_SQ, sum_sq)
    tl.store(control + SKIPPED, tl.where(stepped, 0.0, 1.0).to(tl.float64))
    tl.store(control + MICRO_NORM, micro_norm)
    tl.store(control + MICRO_SUM_SQ, micro_sum_sq)
    if advance != 0:
        advance_window(window, norm, micro_norm, clip_coef, found_inf, stepped, total, total_sq, HAS_MICRO)
        if stepped:
            if RULE != NO_RULE:
                for start in range(0, n_slots, SLOTS):
                    slot = start + tl.arange(0, SLOTS)
                    exists = slot < n_slots
                    row = table + slot.to(tl.int64) * SLOT_COLUMNS
                    wanted = exists & (tl.load(active + slot, mask=exists, other=0) != 0)
                    group = tl.load(row + 3, mask=wanted, other=0)
                    wanted = wanted & (group >= 0) & (group < n_groups)
                    count = tl.load(steps + slot, mask=wanted, other=0.0) + 1.0
                    tl.store(steps + slot, count, mask=wanted)
                    own = scalars + slot.to(tl.int64) * SCALAR_COLUMNS
                    settings = hyper + group * HYPER_COLUMNS
                    if RULE == ADAM:
                        write_adam_scalars(own, settings, multiplier, count, wanted)
                    else:
                        write_sgd_scalars(own, settings, multiplier, count, wanted)
