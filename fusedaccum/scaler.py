"""``torch.amp.GradScaler`` without its pass over the gradients."""

from __future__ import annotations

from collections import abc
from typing import Any

import torch
from torch import Tensor

from . import layout
from .optimizer import FusedAccumOptimizer
from .scaling import mark


class GradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler``, with the same arguments and state, accepted wherever one is.

    For a ``FusedAccumOptimizer`` the gradients are divided by the scale as they are added, so ``.grad`` is the true
    gradient at any time, ``unscale_`` has nothing left to do, and the check for inf and NaN reads the partials.
    ``step`` does not wait for the device: the optimizer skips there. With ``accumulation_steps=K`` call ``step`` and
    ``update`` after every micro-batch; the scale moves at the boundary only. Other optimizers are treated as torch
    treats them.

    A gradient that was scaled by other means (``loss * scaler.get_scale()``) is unscaled in torch's way, in one pass.
    """

    def scale(self, outputs: Any) -> Any:
        """As torch's; a backward from the result is known to be scaled."""
        scaled = super().scale(outputs)
        if not self._enabled:
            return scaled
        assert self._scale is not None
        # Of now: the scale may have moved on when the backward runs.
        factor = self._scale.double().reciprocal().view(1)

        def marked(value: Any) -> Any:
            if isinstance(value, Tensor):
                return mark(value, factor)
            if isinstance(value, (list, tuple)):
                return type(value)(map(marked, value))
            return map(marked, value) if isinstance(value, abc.Iterable) else value

        return marked(scaled)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if isinstance(optimizer, FusedAccumOptimizer):
            found = _found_inf_if_unscaled(optimizer)
            if found is not None:
                return found
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's, but that a ``FusedAccumOptimizer`` decides on the device whether to skip."""
        if not isinstance(optimizer, FusedAccumOptimizer):
            return super().step(optimizer, *args, **kwargs)
        with optimizer._scaler_that_knows_windows():
            return super().step(optimizer, *args, **kwargs)

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        if not isinstance(optimizer, FusedAccumOptimizer):
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        result: float | None = None
        if _is_watched(optimizer) and any(found.item() for found in optimizer_state["found_inf_per_device"].values()):
            FusedAccumOptimizer.step(optimizer)  # past the watcher: closes the window, and skips on the device
        else:
            result = optimizer.step(*args, **kwargs)
        if not optimizer.stepped:
            optimizer_state["found_inf_per_device"] = {}  # not the window's last word
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As torch's; inside an accumulation window, where no boundary has had its say, the scale stays."""
        states = self._per_optimizer_states
        checked = any(state["found_inf_per_device"] for state in states.values())
        if self._enabled and new_scale is None and states and not checked:
            states.clear()
            return
        super().update(new_scale)


def _found_inf_if_unscaled(optimizer: FusedAccumOptimizer) -> dict[torch.device, Tensor] | None:
    """For each device, 0-dim float32: whether the coming boundary finds an inf or NaN; 0 where none is coming. None if
    the window's gradients were not scaled by a scaler of ours, and have yet to be unscaled.

    Raises:
        RuntimeError: some were scaled and some were not; or the optimizer has a loss scale of its own.
    """
    optimizer._capture.flush()
    window, registry = optimizer._window, optimizer._registry
    if optimizer._options["loss_scale"] is not None:
        raise RuntimeError("a GradScaler was given an optimizer with a loss_scale of its own; accepted: one of the two")
    if window.open.was_scaled and window.open.was_plain:
        raise RuntimeError(
            "some of the window's gradients came from GradScaler.scale(loss) and some did not; accepted: all or none"
        )
    is_shared = optimizer._reduction is not None  # then a rank without a micro-batch has its say too
    if not window.open.was_scaled and (window.open.was_plain or (window.accumulation_steps is None and not is_shared)):
        if is_shared:
            raise RuntimeError(
                "the window's gradients were not scaled by GradScaler.scale(loss), and are to be unscaled before they "
                "are summed over the ranks; accepted with process_group: losses from GradScaler.scale"
            )
        return None
    registry.refresh(window.scale)
    home = registry.any_arena().device
    if not window.would_end():
        return {home: torch.zeros((), dtype=torch.float32, device=home)}
    with torch.no_grad():
        optimizer._sum_over_ranks()
        optimizer._boundary.norm((1.0, 1.0, 1.0))
    return {device: arena.control[layout.FOUND_INF].to(torch.float32) for device, arena in registry.arenas.items()}


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody (Accelerate) has put a function of their own in the place of ``step``, to learn from whether it
    is called that a step was skipped. Schedulers do so too, but only count."""
    step = vars(optimizer).get("step")
    return step is not None and not getattr(step, "_wrapped_by_lr_sched", False)
