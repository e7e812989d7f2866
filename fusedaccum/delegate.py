"""Optimizers without a fused rule: their own ``step``, on fp32 masters with the fp32 accumulators as gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import layout
from .arena import Arena
from .slot import Slot


class Delegate:
    """Runs the wrapped optimizer's ``step`` with masters in the place of 16-bit parameters.

    For the time of the call, ``param_groups`` hold the masters and ``state`` is keyed by them. Parameters themselves
    cannot be given fp32 data instead: torch would drop their AccumulateGrad nodes, hooks and all.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def run(self, active: dict[Arena, list[Slot]]) -> None:
        """One update of the active slots, unless it is skipped. Waits for the device to know."""
        if not active:
            return
        control = next(iter(active)).control.tolist()
        if control[layout.SKIPPED]:
            return
        multiplier = control[layout.GRAD_MULTIPLIER]
        stand_ins = {}
        for arena, slots in active.items():
            if multiplier != 1.0:
                arena.scale(slots, multiplier)
            for slot in slots:
                if slot.dtype is not torch.float32:
                    stand_ins[slot.param] = self._stand_in(arena, slot)
        self._step_with(stand_ins)
        for slots in active.values():
            for slot in slots:
                if slot.param in stand_ins:
                    slot.param.copy_(stand_ins[slot.param].detach())
                slot.remember_value()

    @staticmethod
    def _stand_in(arena: Arena, slot: Slot) -> Tensor:
        # Without a master, the parameter itself in fp32 for the time of the step.
        values = arena.master_view(slot) if slot.has_master else slot.local().detach().to(torch.float32)
        master = torch.nn.Parameter(slot.as_param(values), requires_grad=slot.param.requires_grad)
        master.grad = slot.grad
        return master

    def _step_with(self, stand_ins: dict[Tensor, Tensor]) -> None:
        optimizer = self._optimizer
        groups = optimizer.param_groups
        originals = [group["params"] for group in groups]
        kept: dict[Tensor, dict[str, Any]] = {}
        for param, master in stand_ins.items():
            held = dict(optimizer.state.pop(param, {}))
            kept[param] = {"master_param": held.pop("master_param")} if "master_param" in held else {}
            if held:
                optimizer.state[master] = {name: _widened(value) for name, value in held.items()}
        try:
            for group, params in zip(groups, originals, strict=True):
                # A 16-bit parameter without a gradient stays as it is: the step passes it over.
                group["params"] = [stand_ins.get(param, param) for param in params]
            optimizer.step()
        finally:
            for group, params in zip(groups, originals, strict=True):
                group["params"] = params
            for param, master in stand_ins.items():
                held = {**optimizer.state.pop(master, {}), **kept[param]}
                if held:
                    optimizer.state[param] = held


def _widened(value: Any) -> Any:
    """State in fp32: some (Adagrad) make it in their constructor already, in the parameter's dtype."""
    is_narrow = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.to(torch.float32) if is_narrow else value
