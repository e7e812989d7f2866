"""What a micro-batch adds to its window: weights, loss scale, and whether it counts at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from . import validate
from .capture import Capture
from .dtensor import over_ranks
from .reduction import Reduction
from .registry import Registry
from .slot import Slot
from .window import Window


class MicroBatches:
    """Between capture and registry: multiplies gradients by what their micro-batch counts, and counts it.

    A weight that the host knows is part of the scale. One that is a tensor never reaches the host: it becomes the
    factor of its gradients, and the arenas add it up.
    """

    def __init__(self, window: Window, registry: Registry, capture: Capture) -> None:
        self._window = window
        self._registry = registry
        self._capture = capture
        self._weight: Tensor | None = None  # (1,) float64, of the micro-batch at hand
        self._is_in_loss = False  # its gradients come multiplied by it
        self.reduction: Reduction | None = None
        """Where other ranks have micro-batches of the same window."""

    @contextmanager
    def scope(self, weight: float | Tensor, in_loss: bool = False) -> Iterator[None]:
        """Gradients of backward calls inside count ``weight``.

        Args:
            in_loss: the loss has been multiplied by it.

        Raises:
            TypeError, ValueError, RuntimeError: a weight that is not accepted, or that comes too late.
        """
        validate.check_weight(weight)
        if self._registry.has_sharded() and not in_loss:
            raise RuntimeError(
                "micro_batch was called with sharded parameters, whose gradients are averaged over the ranks before "
                "they could be weighed; accepted: optimizer.backward(loss, weight=...)"
            )
        window = self._window
        if window.weight is not None:
            raise RuntimeError("micro_batch inside of a micro_batch; accepted: one after the other")
        self._capture.flush()
        if window.accumulation_steps is None and window.open.holds_gradients and not self._registry.holds_gradients():
            self.drop()  # model.zero_grad() ended what was accumulated
        window.check_weight_comes_first()
        on_device = in_loss or isinstance(weight, Tensor)
        self._is_in_loss = in_loss
        if on_device:
            whole = torch.as_tensor(weight).detach().to(torch.float64).view(1)
            # What the host cannot refuse without waiting shows in found_inf.
            self._weight = torch.where(whole >= 0, whole, torch.nan)
        window.begin_micro_batch(1.0 if on_device else float(weight))
        self._capture.in_micro_batch = True
        is_done = False
        try:
            yield
            is_done = True
        finally:
            self._capture.in_micro_batch = False
            try:
                self._capture.flush()
            except BaseException:
                is_done = False
                raise
            finally:
                # One that failed does not count, as its gradients are not all there.
                by_host = is_done and self._weight is None and not window.counts_on_device
                window.end_micro_batch(float(weight) if by_host else None)
                if is_done and self._weight is not None and not window.counts_on_device:
                    self._count(self._weight)
                self._weight = None

    def add(
        self,
        slots: list[Slot],
        grads: list[Tensor],
        first: list[bool],
        odd: set[Slot],
        factor: Tensor | None,
        verdict: Tensor | None,
    ) -> None:
        """What capture hands over: see ``Registry.accumulate``.

        Args:
            factor: (1,) float64, the inverse of the scale that the loss was multiplied by.
            verdict: (1,) float64, 0 where the micro-batch is left out.
        """
        window = self._window
        if self.reduction is not None:
            self.reduction.check_in_time(slots)
        window.note_gradients(self._capture.take_backwards(), factor is not None, all(first))
        for other in (None if self._is_in_loss else self._weight, verdict):
            if other is not None:
                factor = other if factor is None else factor * other.to(factor.device, non_blocking=True)
        if self.reduction is None:
            self._registry.accumulate(slots, grads, first, odd, window.scale, factor)
            return
        given = slots.copy()  # the registry takes out what it adds by itself
        self.reduction.before_adding()
        self._registry.accumulate(slots, grads, first, odd, window.scale, factor)
        self.reduction.after_adding(given)

    def judge(self, grads: list[Tensor]) -> Tensor:
        """(1,) float64: 1 if every gradient of the micro-batch is finite, else 0. Counts its weight if it is.

        One pass over the gradients, in the dtypes that they came in. The largest magnitude overflows nothing.
        """
        by_device: dict[torch.device, list[Tensor]] = {}
        for grad in grads:
            values = grad.coalesce().values() if grad.is_sparse else grad
            if values.numel():
                by_device.setdefault(values.device, []).append(values.detach())
        home = self._registry.any_arena().device
        verdict = torch.ones(1, dtype=torch.bool, device=home)
        for values_here in by_device.values():
            largest = torch._foreach_norm(values_here, torch.inf)
            finite = torch.isfinite(torch.stack([value.float() for value in largest])).all()
            verdict = verdict & finite.to(home, non_blocking=True)
        sharded = self._registry.any_sharded()
        if sharded is not None:
            verdict = over_ranks(verdict.to(torch.int32), sharded, "MIN") != 0
        result = verdict.to(torch.float64)
        weight = self._weight
        if weight is None:
            host = 1.0 if self._window.weight is None else self._window.weight
            self._count(result * host)
        else:
            self._count(torch.where(verdict, weight.to(home, non_blocking=True), 0.0))
        return result

    def _count(self, weight: Tensor) -> None:
        self._window.open.on_device = True
        for arena in self._registry.some_arenas():
            arena.add_weight(weight)

    def check_droppable(self) -> None:
        """Raises RuntimeError where gradients of the window are on their way to other ranks."""
        if self.reduction is not None:
            self.reduction.check_droppable()

    def drop(self, keeps_gradients: bool = False) -> None:
        """Forgets the open window's weights.

        Args:
            keeps_gradients: each ``.grad`` is there, zeroed, so that the next add will not be a first one.
        """
        if self.reduction is not None:
            self.reduction.drop()
        for arena in self._registry.arenas.values():
            if self._window.open.on_device:
                arena.drop_weights()
            if keeps_gradients and arena.micro_partials is not None:
                arena.micro_partials.zero_()
        self._window.start_afresh()
