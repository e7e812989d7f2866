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
from .validate import DTYPES, dtype_name, is_dense


def accumulate_(
    acc: Tensor,
    partials: Tensor,
    table: Tensor,
    grads: Sequence[Tensor],
    slots: Sequence[int],
    first: Sequence[int],
    scale: float,
) -> None:
    op = "accumulate_"
    _check_flat(op, "partials", partials, torch.float64)
    _check_flat(op, "acc", acc, torch.float32)
    rows = _rows(op, table)
    _check_same_length(op, "grads", grads, "slots", slots)
    _check_same_length(op, "grads", grads, "first", first)
    seen: set[int] = set()
    for i, (grad, slot) in enumerate(zip(grads, slots, strict=True)):
        _check_dtype(op, "grads", i, grad)
        _check_slot(op, "grads", i, grad, rows, slot, acc.numel(), partials.numel(), seen)
    for grad, slot, is_first in zip(grads, slots, first, strict=True):
        offset, n_elems, first_chunk = rows[slot][:3]
        if n_elems == 0:
            continue
        target = acc[offset : offset + n_elems]
        scaled = _in_memory_order(grad).to(torch.float32) * scale
        target.copy_(scaled if is_first else target + scaled)
        partials[first_chunk : first_chunk + layout.n_chunks(n_elems)] = _chunk_sums(target)


def measure_(partials: Tensor, acc: Tensor, table: Tensor, slots: Sequence[int], n_elems: Sequence[int]) -> None:
    op = "measure_"
    _check_flat(op, "partials", partials, torch.float64)
    _check_flat(op, "acc", acc, torch.float32)
    rows = _rows(op, table)
    _check_same_length(op, "slots", slots, "n_elems", n_elems)
    seen: set[int] = set()
    for i, slot in enumerate(slots):
        _check_slot(op, "slots", i, None, rows, slot, acc.numel(), partials.numel(), seen)
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
    partials: Tensor,
    table: Tensor,
    hyper: Tensor,
    active: Tensor,
    rule: int,
    divisor_correction: float,
    max_norm: float,
    extra_sum_sq: Tensor | None,
    advance: bool,
) -> None:
    op = "finalize_"
    _check_flat(op, "control", control, torch.float64, layout.CONTROL_SIZE)
    _check_flat(op, "partials", partials, torch.float64)
    _check_columns(op, "scalars", scalars, torch.float32, layout.SCALAR_COLUMNS)
    _check_columns(op, "hyper", hyper, torch.float64, layout.HYPER_COLUMNS)
    rows = _rows(op, table)
    _check_flat(op, "steps", steps, torch.float32, len(rows))
    _check_flat(op, "active", active, torch.uint8, len(rows))
    _check_enough_scalars(op, scalars, len(rows))
    if rule not in (layout.RULE_ADAM, layout.RULE_SGD):
        raise RuntimeError(f"{op}: rule is {rule}; accepted: 0 (Adam), 1 (SGD)")
    if extra_sum_sq is not None:
        _check_flat(op, "extra_sum_sq", extra_sum_sq, torch.float64, 1)
    taking_part = [slot for slot, is_active in enumerate(active[: len(rows)].tolist()) if is_active]
    for slot in taking_part:
        if not 0 <= rows[slot][3] < hyper.shape[0]:
            raise RuntimeError(f"{op}: table[{slot}] has group {rows[slot][3]}; accepted: 0 to {hyper.shape[0] - 1}")
    for slot in taking_part:
        _check_slot(op, "active", slot, None, rows, slot, None, partials.numel(), set())

    sum_sq = _active_sum(partials, table, active)
    if extra_sum_sq is not None:
        sum_sq = sum_sq + extra_sum_sq.reshape(())
    finite = torch.isfinite(sum_sq)
    norm = _sqrt(sum_sq) * divisor_correction
    # A number divided by a tensor is that number times the reciprocal in torch: two roundings.
    ratio = torch.full_like(norm, max_norm) / (norm + 1e-6)
    clip_coef = torch.where(ratio < 1.0, ratio, torch.ones_like(ratio))
    multiplier = clip_coef * divisor_correction
    control[: layout.CONTROL_SIZE] = torch.stack([norm, (~finite).double(), clip_coef, multiplier, sum_sq])
    if not advance:
        return
    write = active[: len(rows)].bool() & finite
    counts = steps[: len(rows)] + 1.0
    groups = table[:, 3].clamp(0, max(hyper.shape[0] - 1, 0))
    formula = _adam_scalars if rule == layout.RULE_ADAM else _sgd_scalars
    new = formula(hyper[groups], multiplier, counts.double())
    scalars[: len(rows)] = torch.where(write[:, None], new, scalars[: len(rows)])
    steps[: len(rows)] = torch.where(write, counts, steps[: len(rows)])


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
    rows = _checked_step(op, params, master, "max_exp_avg_sq", max_exp_avg_sq, acc, table, scalars, control, slots)
    _check_flat(op, "exp_avg", exp_avg, torch.float32, acc.numel())
    _check_flat(op, "exp_avg_sq", exp_avg_sq, torch.float32, acc.numel())
    go = control[layout.FOUND_INF] == 0
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
    rows = _checked_step(op, params, master, "momentum_buffer", momentum_buffer, acc, table, scalars, control, slots)
    go = control[layout.FOUND_INF] == 0
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


def _chunk_sums(flat: Tensor) -> Tensor:
    """Sum of squares of each chunk of ``flat`` (n,) float32, as (n_chunks,) float64."""
    n_elems = flat.numel()
    n_chunks = layout.n_chunks(n_elems)
    rows_a_chunk = min(layout.CHUNK, -(-n_elems // layout.LANES) * layout.LANES) // layout.LANES
    padded = flat.new_zeros(n_chunks * rows_a_chunk * layout.LANES)
    padded[:n_elems] = flat
    lanes = _lane_sums(padded.view(n_chunks, rows_a_chunk, layout.LANES))
    # The squares of finite fp32 values can overflow fp32, never fp64.
    wide = _lane_sums(padded.view(n_chunks, rows_a_chunk, layout.LANES).double())
    sums = _halve(lanes.double())
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
    assert buffer is not None  # _checked_step has seen that the slot's part of it is there
    return buffer


def _check_flat(op: str, name: str, tensor: Tensor, dtype: torch.dtype, at_least: int = 0) -> None:
    if tensor.dtype != dtype:
        raise RuntimeError(f"{op}: {name} has dtype {dtype_name(tensor.dtype)}; accepted: {dtype_name(dtype)}")
    if not tensor.is_contiguous():
        raise RuntimeError(f"{op}: {name} is not contiguous; accepted: contiguous")
    if tensor.numel() < at_least:
        raise RuntimeError(f"{op}: {name} has {tensor.numel()} elements; accepted: at least {at_least}")


def _check_columns(op: str, name: str, tensor: Tensor, dtype: torch.dtype, columns: int) -> None:
    _check_flat(op, name, tensor, dtype)
    if tensor.dim() != 2 or tensor.shape[1] != columns:
        raise RuntimeError(
            f"{op}: {name} has {tensor.dim()} dimensions, the last of {tensor.shape[-1] if tensor.dim() else 0}; "
            f"accepted: 2 dimensions, the last of {columns}"
        )


def _check_enough_scalars(op: str, scalars: Tensor, n_slots: int) -> None:
    if scalars.shape[0] < n_slots:
        raise RuntimeError(f"{op}: scalars has {scalars.shape[0]} rows; accepted: at least {n_slots}")


def _check_dtype(op: str, name: str, i: int, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES:
        accepted = ", ".join(map(dtype_name, DTYPES))
        raise RuntimeError(f"{op}: {name}[{i}] has dtype {dtype_name(tensor.dtype)}; accepted: {accepted}")


def _check_same_length(op: str, name_a: str, a: Sequence[object], name_b: str, b: Sequence[object]) -> None:
    if len(a) != len(b):
        raise RuntimeError(f"{op}: {name_b} has {len(b)} entries; accepted: {len(a)}, one for each of {name_a}")


def _rows(op: str, table: Tensor) -> list[list[int]]:
    _check_columns(op, "table", table, torch.int64, len(layout.SLOT_COLUMNS))
    rows: list[list[int]] = table.tolist()
    return rows


def _check_slot(
    op: str,
    name: str,
    i: int,
    tensor: Tensor | None,
    rows: list[list[int]],
    slot: int,
    n_acc: int | None,
    n_partials: int | None,
    seen: set[int],
) -> None:
    if not 0 <= slot < len(rows):
        raise RuntimeError(f"{op}: slots[{i}] is {slot}; accepted: 0 to {len(rows) - 1}")
    offset, n_elems, first_chunk = rows[slot][:3]
    if offset < 0 or n_elems < 0 or (n_acc is not None and offset + n_elems > n_acc):
        raise RuntimeError(
            f"{op}: {name}[{i}] has slot {slot} at elements {offset} to {offset + n_elems}; "
            f"accepted: within the {-1 if n_acc is None else n_acc} elements of acc"
        )
    end = first_chunk + layout.n_chunks(n_elems)
    if n_partials is not None and (first_chunk < 0 or end > n_partials):
        raise RuntimeError(
            f"{op}: {name}[{i}] has chunks {first_chunk} to {end}; "
            f"accepted: within the {n_partials} entries of partials"
        )
    if slot in seen:
        raise RuntimeError(f"{op}: slots[{i}] is {slot} again; accepted: each slot once")
    seen.add(slot)
    if tensor is None:
        return
    if tensor.numel() != n_elems:
        raise RuntimeError(f"{op}: {name}[{i}] has {tensor.numel()} elements; accepted: the {n_elems} of its slot")
    if n_elems and not is_dense(tensor):
        raise RuntimeError(
            f"{op}: {name}[{i}] has gaps or overlaps in memory; accepted: dense, in the order of its slot"
        )


def _checked_step(
    op: str,
    params: Sequence[Tensor],
    master: Tensor | None,
    extra_name: str,
    extra: Tensor | None,
    acc: Tensor,
    table: Tensor,
    scalars: Tensor,
    control: Tensor,
    slots: Sequence[int],
) -> list[list[int]]:
    _check_flat(op, "acc", acc, torch.float32)
    rows = _rows(op, table)
    _check_same_length(op, "params", params, "slots", slots)
    _check_columns(op, "scalars", scalars, torch.float32, layout.SCALAR_COLUMNS)
    _check_flat(op, "control", control, torch.float64, layout.CONTROL_SIZE)
    _check_enough_scalars(op, scalars, len(rows))
    for name, buffer in (("master", master), (extra_name, extra)):
        if buffer is not None:
            _check_flat(op, name, buffer, torch.float32)
    seen: set[int] = set()
    for i, (param, slot) in enumerate(zip(params, slots, strict=True)):
        _check_slot(op, "params", i, param, rows, slot, acc.numel(), None, seen)
        _check_dtype(op, "params", i, param)
        n_elems, master_offset, extra_offset = rows[slot][1], rows[slot][4], rows[slot][5]
        if param.dtype == torch.float32 and master_offset >= 0:
            raise RuntimeError(f"{op}: params[{i}] has dtype float32 and a master; accepted: no master")
        for name, buffer, offset in (("master", master, master_offset), (extra_name, extra, extra_offset)):
            size = 0 if buffer is None else buffer.numel()
            if offset >= 0 and offset + n_elems > size:
                raise RuntimeError(
                    f"{op}: params[{i}] needs {name} elements {offset} to {offset + n_elems}; found {size}"
                )
    return rows
