"""What the host tells a device at a boundary, uploaded only when it has changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import layout
from .rules import HyperRow


class Uploads:
    """Keeps the settings of all groups, and which slots are active, on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: list[HyperRow] = []
        self._hyper = torch.zeros(0, layout.HYPER_COLUMNS, dtype=torch.float64, device=device)
        self._active: list[int] = []
        self._mask = torch.zeros(0, dtype=torch.uint8, device=device)

    def hyper(self, rows: Sequence[HyperRow]) -> Tensor:
        """(n_groups, HYPER_COLUMNS) float64. Settings that are tensors (a learning rate on the device) are copied there
        each time, so that nobody waits for their values and a CUDA graph reads new ones."""
        tensors = [(g, i, v) for g, row in enumerate(rows) for i, v in enumerate(row) if isinstance(v, Tensor)]
        if tensors:
            rows = [tuple(0.0 if isinstance(value, Tensor) else value for value in row) for row in rows]
        if rows != self._rows:
            self._hyper = torch.tensor(rows, dtype=torch.float64).view(-1, layout.HYPER_COLUMNS).to(self._device)
            self._rows = list(rows)
        for g, i, value in tensors:
            self._hyper[g, i].copy_(value.detach().reshape(()), non_blocking=True)
        return self._hyper

    def mask(self, active: list[int], n_slots: int) -> Tensor:
        """(n_slots,) uint8: 1 for the slots whose index is in ``active``."""
        if active != self._active or self._mask.numel() != n_slots:
            mask = torch.zeros(n_slots, dtype=torch.uint8)
            mask[active] = 1
            self._mask = mask.to(self._device)
            self._active = active
        return self._mask
