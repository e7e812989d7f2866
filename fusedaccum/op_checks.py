"""What the ops written in Python refuse, in the words of ``csrc/checks.h``: op, argument, found, accepted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import layout
from .validate import DTYPES, dtype_name, is_dense


def check_flat(op: str, name: str, tensor: Tensor, dtype: torch.dtype, at_least: int = 0) -> None:
    if tensor.dtype != dtype:
        raise RuntimeError(f"{op}: {name} has dtype {dtype_name(tensor.dtype)}; accepted: {dtype_name(dtype)}")
    if not tensor.is_contiguous():
        raise RuntimeError(f"{op}: {name} is not contiguous; accepted: contiguous")
    if tensor.numel() < at_least:
        raise RuntimeError(f"{op}: {name} has {tensor.numel()} elements; accepted: at least {at_least}")


def check_columns(op: str, name: str, tensor: Tensor, dtype: torch.dtype, columns: int) -> None:
    check_flat(op, name, tensor, dtype)
    if tensor.dim() != 2 or tensor.shape[1] != columns:
        raise RuntimeError(
            f"{op}: {name} has {tensor.dim()} dimensions, the last of {tensor.shape[-1] if tensor.dim() else 0}; "
            f"accepted: 2 dimensions, the last of {columns}"
        )


def check_enough_scalars(op: str, scalars: Tensor, n_slots: int) -> None:
    if scalars.shape[0] < n_slots:
        raise RuntimeError(f"{op}: scalars has {scalars.shape[0]} rows; accepted: at least {n_slots}")


def check_dtype(op: str, name: str, i: int, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES:
        accepted = ", ".join(map(dtype_name, DTYPES))
        raise RuntimeError(f"{op}: {name}[{i}] has dtype {dtype_name(tensor.dtype)}; accepted: {accepted}")


def check_same_length(op: str, name_a: str, a: Sequence[object], name_b: str, b: Sequence[object]) -> None:
    if len(a) != len(b):
        raise RuntimeError(f"{op}: {name_b} has {len(b)} entries; accepted: {len(a)}, one for each of {name_a}")


def table_rows(op: str, table: Tensor) -> list[list[int]]:
    check_columns(op, "table", table, torch.int64, len(layout.SLOT_COLUMNS))
    rows: list[list[int]] = table.tolist()
    return rows


def check_slot(
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


def checked_step(
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
    check_flat(op, "acc", acc, torch.float32)
    rows = table_rows(op, table)
    check_same_length(op, "params", params, "slots", slots)
    check_columns(op, "scalars", scalars, torch.float32, layout.SCALAR_COLUMNS)
    check_flat(op, "control", control, torch.float64, layout.CONTROL_SIZE)
    check_enough_scalars(op, scalars, len(rows))
    for name, buffer in (("master", master), (extra_name, extra)):
        if buffer is not None:
            check_flat(op, name, buffer, torch.float32)
    seen: set[int] = set()
    for i, (param, slot) in enumerate(zip(params, slots, strict=True)):
        check_slot(op, "params", i, param, rows, slot, acc.numel(), None, seen)
        check_dtype(op, "params", i, param)
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


def check_accumulate(
    op: str, acc: Tensor, partials: Tensor, micro_partials: Tensor | None, table: Tensor, factor: Tensor | None
) -> None:
    """The buffers of ``accumulate_``."""
    check_flat(op, "partials", partials, torch.float64)
    check_flat(op, "acc", acc, torch.float32)
    if micro_partials is not None:
        check_flat(op, "micro_partials", micro_partials, torch.float64, partials.numel())
    if factor is not None:
        check_flat(op, "factor", factor, torch.float64, 1)
    check_columns(op, "table", table, torch.int64, len(layout.SLOT_COLUMNS))


def check_finalize(
    op: str,
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
    extra: Tensor | None,
) -> None:
    """What ``finalize_`` can be refused for without looking into ``table``."""
    check_flat(op, "control", control, torch.float64, layout.CONTROL_SIZE)
    check_flat(op, "window", window, torch.float64, layout.WINDOW_SIZE)
    check_flat(op, "partials", partials, torch.float64)
    if micro_partials is not None:
        check_flat(op, "micro_partials", micro_partials, torch.float64, partials.numel())
    check_columns(op, "scalars", scalars, torch.float32, layout.SCALAR_COLUMNS)
    check_columns(op, "hyper", hyper, torch.float64, layout.HYPER_COLUMNS)
    check_columns(op, "table", table, torch.int64, len(layout.SLOT_COLUMNS))
    n_slots = table.shape[0]
    check_flat(op, "steps", steps, torch.float32, n_slots)
    check_flat(op, "active", active, torch.uint8, n_slots)
    check_enough_scalars(op, scalars, n_slots)
    if rule not in (layout.RULE_ADAM, layout.RULE_SGD, layout.RULE_NONE):
        raise RuntimeError(f"{op}: rule is {rule}; accepted: 0 (Adam), 1 (SGD), 2 (none)")
    if extra is not None:
        check_flat(op, "extra", extra, torch.float64, 2)
