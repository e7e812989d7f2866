"""Runs a device's ops for tensors that lie on the CPU, so that every test of the ops runs on the device as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedaccum import ops
from fusedaccum.backends import Backend


def on_device(backend: Backend, device: torch.device) -> Backend:
    """The backend's ops for CPU tensors.

    Whole storages are carried to the device before an op and back after it, margins and gaps included: a view is as far
    off its alignment there as here, and whatever the op wrote is seen, wherever it wrote it.
    """
    return replace(backend, **{op: partial(_carried, getattr(backend, op), device) for op in ops.SCHEMAS})


def _carried(op: Callable[..., None], device: torch.device, *arguments: Any) -> None:
    carried: dict[int, tuple[Tensor, Tensor]] = {}  # address -> the bytes here and there

    def carry(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [carry(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in carried:
            here = torch.empty(0, dtype=torch.uint8).set_(storage)
            carried[storage.data_ptr()] = (here, here.to(device, copy=True))
        there = carried[storage.data_ptr()][1].untyped_storage()
        view = torch.empty(0, dtype=value.dtype, device=device)
        return view.set_(there, value.storage_offset(), value.shape, value.stride())

    try:
        op(*carry(arguments))
    finally:
        for here, there in carried.values():
            here.copy_(there)
