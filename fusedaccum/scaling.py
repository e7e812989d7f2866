"""Loss scaling from the gradient's side: who scaled the loss says by what, and capture divides while it adds.

A scaled loss carries a tensor hook. Its backward begins with that hook, which makes the inverse scale the factor of
every gradient captured until that backward ends. So the accumulator, and with it ``.grad``, always holds the true
gradient, each micro-batch divided by its own scale, and unscaling costs no pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import layout


@dataclass(frozen=True)
class LossScale:
    """Settings of a loss scale, with the names, defaults and meaning of ``torch.amp.GradScaler``.

    Args:
        init_scale: the first scale.
        growth_factor: the scale grows by it after ``growth_interval`` windows in a row without an inf or NaN.
        backoff_factor: a window with one shrinks the scale by it.
        growth_interval: windows.

    Raises:
        ValueError: a setting that is not accepted, by name.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        _check("init_scale", self.init_scale, "a finite number above 0", lambda x: 0 < x < math.inf)
        _check("growth_factor", self.growth_factor, "a finite number of at least 1", lambda x: 1 <= x < math.inf)
        _check("backoff_factor", self.backoff_factor, "a number above 0, at most 1", lambda x: 0 < x <= 1)
        _check("growth_interval", self.growth_interval, "an integer of at least 1", lambda x: x >= 1 and x == int(x))

    @staticmethod
    def of(value: Any) -> LossScale | None:
        """From what ``FusedAccumOptimizer(loss_scale=...)`` takes: None, a number (fixed), "dynamic", a LossScale.

        Raises:
            ValueError: anything else.
        """
        if value is None or isinstance(value, LossScale):
            return value
        if isinstance(value, str) and value == "dynamic":
            return LossScale()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
            return LossScale(float(value), 1.0, 1.0, 2000)
        raise ValueError(
            f"loss_scale is {value!r}; accepted: None, a finite number above 0, 'dynamic', a fusedaccum.LossScale"
        )

    def write_to(self, window: Tensor) -> None:
        """Puts the settings, and the first scale, into a ``window`` block."""
        window[layout.LOSS_SCALE] = self.init_scale
        window[layout.INV_LOSS_SCALE] = 1.0 / self.init_scale
        window[layout.GROWTH_FACTOR] = self.growth_factor
        window[layout.BACKOFF_FACTOR] = self.backoff_factor
        window[layout.GROWTH_INTERVAL] = self.growth_interval


def _check(name: str, value: Any, accepted: str, is_right: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or math.isnan(value) or not is_right(value):
        raise ValueError(f"{name} is {value!r}; accepted: {accepted}")


_active: dict[int, Tensor] = {}
"""Factor of each backward (graph task) that began at a scaled loss and has not ended, the innermost last."""


starts: list[Callable[[], None]] = []
"""Called when a backward from a scaled loss begins."""


def call_last(call: Callable[[], None]) -> None:
    """Has the engine call at the end of the running backward, after what queues itself while that runs: FSDP2 has
    gradients to deliver in such a callback."""
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.queue_callback(lambda: engine.queue_callback(call))


class _EndOfTask:
    """Called by the engine when the backward ends, and dropped by it uncalled when that fails."""

    def __init__(self, task: int) -> None:
        self._task = task

    def __call__(self) -> None:
        _active.pop(self._task, None)

    def __del__(self) -> None:
        _active.pop(self._task, None)


def mark(scaled_loss: Tensor, factor: Tensor) -> Tensor:
    """Makes ``factor`` what the gradients of a backward from ``scaled_loss`` are multiplied by as they are added.

    Args:
        scaled_loss: any shape; returned as it is.
        factor: (1,) float64, 1 / loss scale.
    """
    if not scaled_loss.requires_grad:
        return scaled_loss

    def begin(_: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task not in _active:
            call_last(_EndOfTask(task))
            for call in starts:
                call()
        _active[task] = factor

    scaled_loss.register_hook(begin)
    return scaled_loss


def active_factor(task: int) -> Tensor | None:
    """The factor of the backward ``task``; of the one around it where it is another (reentrant checkpointing runs a
    backward of its own inside the first one)."""
    if not _active:
        return None
    factor = _active.get(task)
    return next(reversed(_active.values())) if factor is None else factor
