"""Gradients on their way from the hooks to the accumulator."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .scaling import active_factor
from .slot import Slot

if TYPE_CHECKING:
    from .capture import Capture

DEFAULT_BUCKET_BYTES = 32 * 2**20


class Bucket:
    """Gradients of one device, of plain parameters or of DTensors, that wait to be added, in the order they came.

    The hooks hold their bucket, and the bucket its capture weakly: a node holds its hooks, the capture holds the nodes,
    and no garbage collector sees through the C++ side.
    """

    __slots__ = ("_capture", "_streams", "added", "factor", "grads", "n_bytes", "odd", "task")

    def __init__(self, capture: Capture) -> None:
        self._capture = weakref.ref(capture)
        self.task = -1
        """The graph task (backward call) of the last gradient."""
        self.factor: Tensor | None = None
        """What a scaler says that the gradients must be multiplied by."""
        self._streams: set[torch.cuda.Stream] = set()
        self.clear()

    def clear(self) -> None:
        """Forgets what waits."""
        self.grads: dict[Slot, Tensor] = {}
        self.odd: set[Slot] = set()
        """Slots whose gradient is not plainly contiguous in the parameter's dtype."""
        self.added: list[Slot] = []
        """Slots to which FSDP2 has added a gradient by itself."""
        self.n_bytes = 0

    def enter(self, task: int) -> bool:
        """The first gradient of a backward. Returns whether anybody is left to take it."""
        capture = self._capture()
        if capture is None:
            return False
        factor = active_factor(task)
        if factor is not self.factor:
            if self.grads or self.added:
                capture.hand_over()
            self.factor = factor
        self.task = task
        capture.enter(task)
        return True

    def flush(self, verdict: Tensor | None = None) -> None:
        """Hands over what waits. ``verdict``: what a capture that judges has found of it."""
        if self._streams:
            self._wait_for_streams()
        capture = self._capture()
        if capture is not None and (self.grads or self.added):
            # Emptied first: should the sink fail, the error must not repeat at every later flush.
            grads, odd, added = self.grads, self.odd, self.added
            self.clear()
            slots = list(grads)
            # In one loop, whose cache misses overlap; in the hook each of them is waited for.
            current = [slot.param.grad for slot in slots]
            if list(map(id, current)) != [id(slot.grad) for slot in slots]:
                current = [slot.held_grad() for slot in slots]
                odd.update(s for s, grad in zip(slots, current, strict=True) if grad is not None and grad is not s.grad)
            with torch.no_grad():
                if added:
                    capture.sink(added, [], [False] * len(added), set(), self.factor, verdict)
                if slots:
                    first = [grad is None for grad in current]
                    capture.sink(slots, list(grads.values()), first, odd, self.factor, verdict)

    def note_stream(self) -> None:
        """A gradient has been made on the current stream, which is not the one that the backward was called on."""
        if torch.cuda.is_available():
            self._streams.add(torch.cuda.current_stream())

    def _wait_for_streams(self) -> None:
        for stream in self._streams:
            current = torch.cuda.current_stream(stream.device)
            if stream != current:
                current.wait_stream(stream)
