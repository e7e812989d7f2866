"""The ops of ``fusedaccum.ops`` on tensors of any device that Triton compiles for: checks, plans, launches.

One launch for all tensors of a call, on the device's current stream; nothing waits for the device. As in
csrc/cuda/bind.cpp, ``table`` is device memory that the host does not read: that its rows fit the buffers is the
caller's word (Arena's), and only what the host sees of the tensors is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from fusedaccum import layout
from fusedaccum.op_checks import (
    check_accumulate,
    check_columns,
    check_enough_scalars,
    check_finalize,
    check_flat,
    check_same_length,
)

from .accumulate import accumulate_kernel, measure_kernel
from .finalize import finalize_kernel
from .plan import NO_GRAD, Plan, check_slots, checked_tensors
from .step import adam_kernel, sgd_kernel
from .upload import uploaded, uploaded_once

# No option is tuned: a kernel that writes in place cannot be run twice to be timed.
ELEMENTWISE = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
ONE_PROGRAM = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": False}


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` the one that Triton launches on."""
    if device.type == "cpu":
        return nullcontext()
    module = torch.get_device_module(device)
    return nullcontext() if module.current_device() == device.index else module.device(device.index)


def _check_devices(op: str, home: Tensor, /, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != home.device:
            raise RuntimeError(f"{op}: {name} is on {tensor.device}; accepted: {home.device}, as the first argument")


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
    _check_devices(op, acc, partials=partials, micro_partials=micro_partials, table=table, factor=factor)
    check_same_length(op, "grads", grads, "slots", slots)
    check_same_length(op, "grads", grads, "first", first)
    plan = Plan(checked_tensors(op, "grads", grads, slots, table.shape[0], acc.device), slots, first)
    if not plan.n_programs:
        return
    with _current(acc.device):
        accumulate_kernel[(plan.n_programs,)](
            acc,
            partials,
            partials if micro_partials is None else micro_partials,
            table,
            uploaded(plan.words, acc.device),
            partials if factor is None else factor,
            plan.n_entries,
            float(scale),
            KEEP_MICRO=micro_partials is not None,
            HAS_FACTOR=factor is not None,
            **ELEMENTWISE,
        )


def measure_(partials: Tensor, acc: Tensor, table: Tensor, slots: Sequence[int], n_elems: Sequence[int]) -> None:
    op = "measure_"
    check_flat(op, "partials", partials, torch.float64)
    check_flat(op, "acc", acc, torch.float32)
    check_columns(op, "table", table, torch.int64, len(layout.SLOT_COLUMNS))
    _check_devices(op, partials, acc=acc, table=table)
    check_same_length(op, "slots", slots, "n_elems", n_elems)
    check_slots(op, slots, table.shape[0])
    plan = Plan([(0, n, NO_GRAD) for n in n_elems], slots)
    if plan.n_programs:
        with _current(acc.device):
            entries = uploaded(plan.words, acc.device)
            measure_kernel[(plan.n_programs,)](acc, partials, table, entries, plan.n_entries, **ELEMENTWISE)


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
    n_slots = table.shape[0]
    _check_devices(
        op, control, scalars=scalars, steps=steps, window=window, partials=partials, micro_partials=micro_partials,
        table=table, hyper=hyper, active=active, extra=extra,
    )  # fmt: skip
    with _current(control.device):
        finalize_kernel[(1,)](
            control,
            scalars,
            steps,
            window,
            partials,
            partials if micro_partials is None else micro_partials,
            table,
            hyper,
            active,
            control if extra is None else extra,
            n_slots,
            hyper.shape[0],
            partials.numel(),
            n_slots.bit_length(),
            float(numerator),
            float(weight),
            float(weight_sq),
            float(max_norm),
            int(extra is not None),
            int(advance),
            RULE=rule,
            HAS_MICRO=micro_partials is not None,
            **ONE_PROGRAM,
        )


def _planned_step(
    op: str,
    params: Sequence[Tensor],
    acc: Tensor,
    table: Tensor,
    scalars: Tensor,
    control: Tensor,
    master: Tensor | None,
    extra_name: str,
    extra: Tensor | None,
    slots: Sequence[int],
) -> tuple[Tensor, int, int]:
    """(entries on the device, how many, programs), of a call that has been checked."""
    check_flat(op, "acc", acc, torch.float32)
    check_columns(op, "table", table, torch.int64, len(layout.SLOT_COLUMNS))
    check_same_length(op, "params", params, "slots", slots)
    check_columns(op, "scalars", scalars, torch.float32, layout.SCALAR_COLUMNS)
    check_flat(op, "control", control, torch.float64, layout.CONTROL_SIZE)
    check_enough_scalars(op, scalars, table.shape[0])
    for name, buffer in (("master", master), (extra_name, extra)):
        if buffer is not None:
            check_flat(op, name, buffer, torch.float32)
    others = {"table": table, "scalars": scalars, "control": control, "master": master, extra_name: extra}
    _check_devices(op, acc, **others)
    tensors = checked_tensors(op, "params", params, slots, table.shape[0], acc.device)
    return uploaded_once(tensors, slots, acc.device)


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
    check_flat(op, "exp_avg", exp_avg, torch.float32, acc.numel())
    check_flat(op, "exp_avg_sq", exp_avg_sq, torch.float32, acc.numel())
    _check_devices(op, acc, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    with _current(acc.device):
        entries, n_entries, n_programs = _planned_step(
            op, params, acc, table, scalars, control, master, "max_exp_avg_sq", max_exp_avg_sq, slots
        )
        if n_programs:
            extra = acc if max_exp_avg_sq is None else max_exp_avg_sq
            adam_kernel[(n_programs,)](
                exp_avg, exp_avg_sq, extra, acc if master is None else master, acc, table, scalars, control, entries,
                n_entries, **ELEMENTWISE,
            )  # fmt: skip


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
    with _current(acc.device):
        entries, n_entries, n_programs = _planned_step(
            op, params, acc, table, scalars, control, master, "momentum_buffer", momentum_buffer, slots
        )
        if n_programs:
            extra = acc if momentum_buffer is None else momentum_buffer
            sgd_kernel[(n_programs,)](
                extra, acc if master is None else master, acc, table, scalars, control, entries, n_entries,
                **ELEMENTWISE,
            )  # fmt: skip
