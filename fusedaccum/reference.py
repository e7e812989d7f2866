"""Every op in plain torch: what the native and Triton kernels are tested against, and the last fallback anywhere.

The arithmetic is that of ``csrc/math.h``, one rounded torch operation for each of its operations, and the sums run
over the same trees, so that on the CPU the results are bit-equal to the native kernels'. The
places of slots are read from the table, which waits for a device; the decision to skip a step does not: it is a
``torch.where``, not an ``if``.

``fusedaccum/ops.py`` says what each op means and what its arguments are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import layout
from .op_checks import (
    check_accumulate,
    check_dtype,
    check_finalize,
    check_flat,
    check_same_length,
    check_slot,
    checked_step,
    table_rows,
)


def accumulate_(
    acc: Tensor,
    partials: Tensor,
    micro_partials: Tensor | None,
    table: Tensor,
    grads: Sequence[Tensor],
    slots: Sequence[int],
    first: Sequence[int],
    scale: float,
    factor: Tensor | None,
) -> None:
    op = "accumulate_"
    check_accumulate(op, acc, partials, micro_partials, table, factor)
    rows = table_rows(op, table)
    check_same_length(op, "grads", grads, "slots", slots)
    check_same_length(op, "grads", grads, "first", first)
    seen: set[int] = set()
    for i, (grad, slot) in enumerate(zip(grads, slots, strict=True)):
        check_dtype(op, "grads", i, grad)
        check_slot(op, "grads", i, grad, rows, slot, acc.numel(), partials.numel(), seen)
    whole = torch.full((), scale, dtype=torch.float64, device=acc.device)
    effective = (whole if factor is None else whole * factor.view(-1)[0]).to(torch.float32)
    adds = effective != 0
    for grad, slot, is_first in zip(grads, slots, first, strict=True):
        offset, n_elems, first_chunk = rows[slot][:3]
        if n_elems == 0:
            continue
        target = acc[offset : offset + n_elems]
        chunks = slice(first_chunk, first_chunk + layout.n_chunks(n_elems))
        scaled = _in_memory_order(grad).to(torch.float32) * effective
        if is_first:
            target.copy_(torch.where(adds, scaled, 0.0))
            partials[chunks] = _chunk_sums(target)
        else:
            target.copy_(torch.where(adds, target + scaled, target))
            partials[chunks] = torch.where(adds, _chunk_sums(target), partials[chunks])
        if micro_partials is not None:
            kept = micro_partials[chunks]
            if is_first:
                micro_partials[chunks] = partials[chunks]
            else:
                micro_partials[chunks] = torch.where(adds, kept + _chunk_sums(scaled, second_look=False), kept)


def measure_(partials: Tensor, acc: Tensor, table: Tensor, slots: Sequence[int], n_elems: Sequence[int]) -> None:
    op = "measure_"
    check_flat(op, "partials", partials, torch.float64)
    check_flat(op, "acc", acc, torch.float32)
    rows = table_rows(op, table)
    check_same_length(op, "slots", slots, "n_elems", n_elems)
    seen: set[int] = set()
    for i, slot in enumerate(slots):
        check_slot(op, "slots", i, None, rows, slot, acc.numel(), partials.numel(), seen)
        if n_elems[i] != rows[slot][1]:
            raise RuntimeError(f"{op}: n_elems[{i}] is {n_elems[i]}; accepted: the {rows[slot][1]} of its slot")
    for slot, n in zip(slots, n_elems, strict=True):
        offset, _, first_chunk = rows[slot][:3]
        if n:
            partials[first_chunk : first_chunk + layout.n_chunks(n)] = _chunk_sums(acc[offset : offset + n])


def finalize_(
    control: Tensor,
    scalars: Tensor,
    steps: Tensor,
    window: Tensor,
    partials: Tensor,
    micro_partials: Tensor | None,
    table: Tensor,
    hyper: Tensor,
    active: Tensor,
    rule: int,
    numerator: float,
    weight: float,
    weight_sq: float,
    max_norm: float,
    extra: Tensor | None,
    advance: bool,
) -> None:
    op = "finalize_"
    check_finalize(
        op, control, scalars, steps, window, partials, micro_partials, table, hyper, active, rule, extra
    )  # fmt: skip
    rows = table_rows(op, table)
    taking_part = [slot for slot, is_active in enumerate(active[: len(rows)].tolist()) if is_active]
    for slot in taking_part:
        if not 0 <= rows[slot][3] < hyper.shape[0]:
            raise RuntimeError(f"{op}: table[{slot}] has group {rows[slot][3]}; accepted: 0 to {hyper.shape[0] - 1}")
    for slot in taking_part:
        check_slot(op, "active", slot, None, rows, slot, None, partials.numel(), set())

    sum_sq = _active_sum(partials, table, active)
    micro_sum_sq = torch.zeros_like(sum_sq) if micro_partials is None else _active_sum(micro_partials, table, active)
    if extra is not None:
        sum_sq = sum_sq + extra[0]
        micro_sum_sq = micro_sum_sq + extra[1]
    zero, one = torch.zeros_like(sum_sq), torch.ones_like(sum_sq)
    total, total_sq = window[layout.WEIGHT] + weight, window[layout.WEIGHT_SQ] + weight_sq
    # A number divided by a tensor is that number times the reciprocal in torch: two roundings.
    correction = torch.where(total > 0, torch.full_like(total, numerator) / total, zero)
    norm = _sqrt(sum_sq) * correction
    ratio = torch.full_like(norm, max_norm) / (norm + 1e-6)
    clip_coef = torch.where(ratio < 1.0, ratio, one)
    multiplier = clip_coef * correction
    found_inf = ~torch.isfinite(sum_sq)
    skipped = found_inf | ~(total > 0)
    squared = micro_sum_sq * (correction * correction)
    micro_norm = torch.where((total > 0) & (total_sq > 0), _sqrt(squared / (total_sq / (total * total))), zero)
    entries = [norm, found_inf, clip_coef, multiplier, sum_sq, skipped, micro_norm, micro_sum_sq]
    control[: layout.CONTROL_SIZE] = torch.stack([entry.double() for entry in entries])
    if not advance:
        return
    has_micro = micro_partials is not None
    _advance_window(window, norm, found_inf, clip_coef, skipped, micro_norm, total, total_sq, has_micro)
    if rule == layout.RULE_NONE:
        return
    write = active[: len(rows)].bool() & ~skipped
    counts = steps[: len(rows)] + 1.0
    groups = table[:, 3].clamp(0, max(hyper.shape[0] - 1, 0))
    formula = _adam_scalars if rule == layout.RULE_ADAM else _sgd_scalars
    new = formula(hyper[groups], multiplier, counts.double())
    scalars[: len(rows)] = torch.where(write[:, None], new, scalars[: len(rows)])
    steps[: len(rows)] = torch.where(write, counts, steps[: len(rows)])


def _advance_window(
    window: Tensor,
    norm: Tensor,
    found_inf: Tensor,
    clip_coef: Tensor,
    skipped: Tensor,
    micro_norm: Tensor,
    total: Tensor,
    total_sq: Tensor,
    has_micro: bool,
) -> None:
    old = window[: layout.WINDOW_SIZE].clone()
    new = list(old.unbind())
    one, zero = torch.ones_like(total), torch.zeros_like(total)
    stepped = ~skipped
    new[layout.WINDOWS] = old[layout.WINDOWS] + 1.0
    new[layout.SKIPPED_WINDOWS] = old[layout.SKIPPED_WINDOWS] + torch.where(skipped, one, zero)
    clipped = stepped & (clip_coef < 1.0)
    new[layout.CLIPPED_WINDOWS] = old[layout.CLIPPED_WINDOWS] + torch.where(clipped, one, zero)

    scale, tracker = old[layout.LOSS_SCALE], old[layout.GROWTH_TRACKER]
    successful = tracker + 1.0
    is_due = successful == old[layout.GROWTH_INTERVAL]
    grown = scale * old[layout.GROWTH_FACTOR]
    grows = is_due & (grown <= torch.finfo(torch.float32).max)
    after = torch.where(found_inf, scale * old[layout.BACKOFF_FACTOR], torch.where(grows, grown, scale))
    counts = found_inf | stepped  # a window without weight says nothing about the scale
    new[layout.LOSS_SCALE] = torch.where(counts, after, scale)
    later = torch.where(found_inf | is_due, zero, successful)
    new[layout.GROWTH_TRACKER] = torch.where(counts, later, tracker)
    new[layout.INV_LOSS_SCALE] = torch.where(counts, one / new[layout.LOSS_SCALE], old[layout.INV_LOSS_SCALE])

    new[layout.MICRO_WEIGHT] = torch.where(stepped, total_sq / total, old[layout.MICRO_WEIGHT])
    if has_micro:
        rho = total_sq / (total * total)
        big = norm * norm
        small = (micro_norm * micro_norm) * rho
        grad_sq = (big - small) / (1.0 - rho)
        noise = ((small - rho * big) / (1.0 - rho)) * total
        usable = stepped & (rho < 1.0) & torch.isfinite(grad_sq) & torch.isfinite(noise)
        decay = old[layout.DECAY]
        fresh = 1.0 - decay
        for entry, value in ((layout.GRAD_SQ, grad_sq), (layout.NOISE, noise), (layout.MEAN_WEIGHT, one)):
            new[entry] = torch.where(usable, decay * old[entry] + fresh * value, old[entry])
    new[layout.WEIGHT] = new[layout.WEIGHT_SQ] = zero
    window[: layout.WINDOW_SIZE] = torch.stack(new)


def adam_step_(
    params: Sequence[Tensor],
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    master: Tensor | None,
    acc: Tensor,
    table: Tensor,
    scalars: Tensor,
    control: Tensor,
    slots: Sequence[int],
) -> None:
    op = "adam_step_"
    rows = checked_step(op, params, master, "max_exp_avg_sq", max_exp_avg_sq, acc, table, scalars, control, slots)
    check_flat(op, "exp_avg", exp_avg, torch.float32, acc.numel())
    check_flat(op, "exp_avg_sq", exp_avg_sq, torch.float32, acc.numel())
    go = control[layout.SKIPPED] == 0
    for param, slot in zip(params, slots, strict=True):
        offset, n_elems, _, _, master_offset, extra_offset = rows[slot]
        here = slice(offset, offset + n_elems)
        multiplier, step_size, inv_bias2, decay, beta1, rest1, beta2, rest2, eps, coupled, amsgrad, _ = scalars[slot]
        low = _in_memory_order(param)
        target = low if master_offset < 0 else _of(master)[master_offset : master_offset + n_elems]
        value = target.to(torch.float32) * decay
        grad = acc[here] * multiplier + coupled * value
        first = beta1 * exp_avg[here] + rest1 * grad
        second = beta2 * exp_avg_sq[here] + rest2 * (grad * grad)
        largest = second
        if extra_offset >= 0:
            old = _of(max_exp_avg_sq)[extra_offset : extra_offset + n_elems]
            keep = torch.isnan(old) | (second <= old)
            largest = torch.where((amsgrad != 0) & keep, old, second)
            old.copy_(torch.where(go & (amsgrad != 0), largest, old))
        value = value - step_size * (first / (_sqrt(largest) * inv_bias2 + eps))
        exp_avg[here] = torch.where(go, first, exp_avg[here])
        exp_avg_sq[here] = torch.where(go, second, exp_avg_sq[here])
        _write_param(go, value, target, low)


def sgd_step_(
    params: Sequence[Tensor],
    momentum_buffer: Tensor | None,
    master: Tensor | None,
    acc: Tensor,
    table: Tensor,
    scalars: Tensor,
    control: Tensor,
    slots: Sequence[int],
) -> None:
    op = "sgd_step_"
    rows = checked_step(op, params, master, "momentum_buffer", momentum_buffer, acc, table, scalars, control, slots)
    go = control[layout.SKIPPED] == 0
    for param, slot in zip(params, slots, strict=True):
        offset, n_elems, _, _, master_offset, extra_offset = rows[slot]
        multiplier, lr, momentum, undamped, weight_decay, nesterov, first = scalars[slot][:7]
        low = _in_memory_order(param)
        target = low if master_offset < 0 else _of(master)[master_offset : master_offset + n_elems]
        value = target.to(torch.float32)
        direction = acc[offset : offset + n_elems] * multiplier + weight_decay * value
        if extra_offset >= 0:
            old = _of(momentum_buffer)[extra_offset : extra_offset + n_elems]
            buffer = torch.where(first != 0, direction, momentum * old + undamped * direction)
            moved = torch.where(nesterov != 0, direction + momentum * buffer, buffer)
            direction = torch.where(momentum != 0, moved, direction)
            old.copy_(torch.where(go & (momentum != 0), buffer, old))
        _write_param(go, value - lr * direction, target, low)


def _write_param(go: Tensor, value: Tensor, target: Tensor, low: Tensor) -> None:
    # Narrowed before the choice: a skipped step must not even quiet a NaN, as widening the old value would.
    target.copy_(torch.where(go, value.to(target.dtype), target))
    if low is not target:
        low.copy_(torch.where(go, value.to(low.dtype), low))


def _adam_scalars(hyper: Tensor, multiplier: Tensor, steps: Tensor) -> Tensor:
    lr, beta1, beta2, eps, weight_decay, decoupled, sign, amsgrad = hyper.unbind(1)
    zero, one = torch.zeros_like(lr), torch.ones_like(lr)
    columns = [
        multiplier * sign,
        lr / (1.0 - _integer_power(beta1, steps)),
        one / _sqrt(1.0 - _integer_power(beta2, steps)),
        torch.where(decoupled != 0, 1.0 - lr * weight_decay, one),
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        eps,
        torch.where(decoupled != 0, zero, weight_decay),
        amsgrad,
        zero,
    ]
    return torch.stack(columns, dim=1).to(torch.float32)


def _sgd_scalars(hyper: Tensor, multiplier: Tensor, steps: Tensor) -> Tensor:
    lr, momentum, dampening, nesterov, weight_decay, _, sign, _ = hyper.unbind(1)
    zero = torch.zeros_like(lr)
    columns = [multiplier * sign, lr, momentum, 1.0 - dampening, weight_decay, nesterov, (steps == 1.0).double()]
    return torch.stack(columns + [zero] * (layout.SCALAR_COLUMNS - len(columns)), dim=1).to(torch.float32)


def _integer_power(base: Tensor, exponents: Tensor) -> Tensor:
    """``base ** exponents`` by squaring. 25 bits hold every count that the fp32 steps can reach."""
    left = exponents.to(torch.int64)
    result = torch.ones_like(base)
    for _ in range(25):
        result = torch.where((left & 1) != 0, result * base, result)
        base = base * base
        left = left >> 1
    return result


def _sqrt(value: Tensor) -> Tensor:
    """The correctly rounded square root. torch's own is not, on the CPU: 2.13 takes it from MKL, which is off by one
    ulp in 20% of fp32 and 1.4% of fp64 values (measured with torch.rand against numpy, AVX-512).
    """
    if value.dtype == torch.float32:
        # Right even if the fp64 root is off by an ulp: fp64 has more than twice the digits that matter here.
        return torch.sqrt(value.double()).float()
    # One Newton step from the residual value - root**2, which Dekker's (1971) splitting into halves makes exact.
    root = torch.sqrt(value)
    shifted = root * 134217729.0  # 2**27 + 1
    high = shifted - (shifted - root)
    low = root - high
    square = root * root
    square_error = ((high * high - square) + high * low * 2.0) + low * low
    better = root + ((value - square) - square_error) / (root * 2.0)
    return torch.where((root > 0) & torch.isfinite(root), better, root)


def _chunk_sums(flat: Tensor, second_look: bool = True) -> Tensor:
    """Sum of squares of each chunk of ``flat`` (n,) float32, as (n_chunks,) float64.

    ``second_look``: sum a chunk whose fp32 sum overflows again, in fp64.
    """
    n_elems = flat.numel()
    n_chunks = layout.n_chunks(n_elems)
    rows_a_chunk = min(layout.CHUNK, -(-n_elems // layout.LANES) * layout.LANES) // layout.LANES
    padded = flat.new_zeros(n_chunks * rows_a_chunk * layout.LANES)
    padded[:n_elems] = flat
    lanes = _lane_sums(padded.view(n_chunks, rows_a_chunk, layout.LANES))
    sums = _halve(lanes.double())
    if not second_look:
        return sums
    # The squares of finite fp32 values can overflow fp32, never fp64.
    wide = _lane_sums(padded.view(n_chunks, rows_a_chunk, layout.LANES).double())
    return torch.where(torch.isfinite(sums), sums, _halve(wide))


def _lane_sums(rows: Tensor) -> Tensor:
    lanes = rows[:, 0] * rows[:, 0]
    for i in range(1, rows.shape[1]):
        lanes = lanes + rows[:, i] * rows[:, i]
    return lanes


def _halve(lanes: Tensor) -> Tensor:
    width = lanes.shape[-1]
    while width > 1:
        width //= 2
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
    return lanes[..., 0]


def _active_sum(partials: Tensor, table: Tensor, active: Tensor) -> Tensor:
    """The sum over the chunks of active slots: lane = chunk modulo LANES, then halving."""
    n_rows = max(-(-partials.numel() // layout.LANES), 1)
    padded = partials.new_zeros(n_rows * layout.LANES)
    counts = (table[:, 1] + (layout.CHUNK - 1)).div(layout.CHUNK, rounding_mode="floor")
    in_use = torch.repeat_interleave(active[: table.shape[0]].bool(), counts)
    # Slots lie in chunk order, so the mask of slots spreads over the partials without an index.
    padded[: in_use.numel()] = torch.where(in_use, partials[: in_use.numel()], 0.0)
    rows = padded.view(n_rows, layout.LANES)
    lanes = rows[0]
    for i in range(1, n_rows):
        lanes = lanes + rows[i]
    return _halve(lanes)


def _in_memory_order(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _of(buffer: Tensor | None) -> Tensor:
    assert buffer is not None  # checked_step has seen that the slot's part of it is there
    return buffer
