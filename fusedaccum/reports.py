"""What the optimizer says of its last boundary, and what scalers of losses may ask and tell it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import layout, stats
from .boundary import Boundary
from .registry import Registry
from .window import Window
from .wrapping import WrappingOptimizer


class ReportingOptimizer(WrappingOptimizer):
    """Everything here is read from the device's control block, by tensors that nobody waits for."""

    _boundary: Boundary
    _options: dict[str, Any]
    _registry: Registry
    _window: Window
    _given_found_inf: Tensor | None = None
    _is_asked_by_ours = False

    @property
    def accumulation_steps(self) -> int | None:
        """Micro-batches a window; None: every ``step()`` is a boundary."""
        return self._window.accumulation_steps

    @property
    def stepped(self) -> bool:
        """Whether the last call of ``step`` or ``flush`` was a boundary."""
        return self._window.stepped

    @property
    def skipped(self) -> Tensor:
        """0-dim float32 tensor on the device: 1 if the last boundary changed nothing, for a non-finite gradient or a
        total weight of 0, else 0."""
        return self._boundary.control_value(layout.SKIPPED)

    @property
    def grad_norm(self) -> Tensor:
        """0-dim float32 tensor on the device: the norm of all gradients at the last boundary, before clipping."""
        return self._boundary.control_value(layout.NORM)

    @property
    def loss_scale(self) -> Tensor:
        """0-dim float32 tensor on the device: the present loss scale; 1 without one."""
        return self._registry.any_arena().window[layout.LOSS_SCALE].to(torch.float32)

    def stats(self) -> dict[str, Tensor]:
        """What the gradients of the windows so far tell; nothing here waits for the device. See ``stats.read``."""
        arena = self._registry.any_arena()
        return stats.read(arena.control, arena.window, self._options["statistics"])

    # torch.amp ------------------------------------------------------------------------------------------------------

    grad_scale: Tensor | None = None
    """Set by whoever scaled the loss and leaves the unscaling to ``step``, as torch's fused optimizers have it: the
    coming boundary divides by it, in one more pass."""

    @property
    def found_inf(self) -> Tensor:
        """0-dim float32 tensor on the device: 1 if the last boundary was skipped for a non-finite gradient, else 0.

        Set (to a tensor, non-zero for an inf that somebody else has seen) it makes the coming boundaries skip until it
        is deleted, as in torch's fused optimizers.
        """
        return self._boundary.control_value(layout.FOUND_INF)

    @found_inf.setter
    def found_inf(self, value: Tensor | None) -> None:
        self._given_found_inf = value

    @found_inf.deleter
    def found_inf(self) -> None:
        self._given_found_inf = None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # torch.amp.GradScaler asks this in its step(). Its classic contract (unscale_ in a pass, step() or not) holds
        # where each step() is a boundary; inside a window it would unscale what is there at every micro-batch.
        steps = self._window.accumulation_steps
        if steps is not None and steps > 1 and not self._is_asked_by_ours:
            raise RuntimeError(
                f"torch.amp.GradScaler.step was given an optimizer with accumulation_steps={steps}; accepted: "
                "fusedaccum.GradScaler, loss_scale='dynamic', or accumulation_steps=None with step() at each boundary"
            )
        return False

    @contextmanager
    def _scaler_that_knows_windows(self) -> Iterator[None]:
        self._is_asked_by_ours = True
        try:
            yield
        finally:
            self._is_asked_by_ours = False
