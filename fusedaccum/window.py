"""The accumulation window: where in it we are, and what a boundary divides by. Host state only."""

from __future__ import annotations

import warnings


class Window:
    """Counts micro-batches.

    Args:
        accumulation_steps: micro-batches a window; None where each ``step()`` is a boundary.
    """

    def __init__(self, accumulation_steps: int | None) -> None:
        self.accumulation_steps = accumulation_steps
        self.position = 0
        """Micro-batches of the open window; 0 between windows, always 0 without ``accumulation_steps``."""
        self.stepped = False
        self._clip: float | None = None

    @property
    def scale(self) -> float:
        """What each gradient is multiplied by when it is added: 1/K, so that ``.grad`` is the window's mean."""
        return 1.0 if self.accumulation_steps is None else 1.0 / self.accumulation_steps

    def advance(self) -> bool:
        """One more micro-batch is in; returns whether that ends the window."""
        if self.accumulation_steps is not None:
            self.position = (self.position + 1) % self.accumulation_steps
        self.stepped = self.position == 0
        if not self.stepped:
            self._clip = None  # a clip asked for inside a window has no boundary to act at
        return self.stepped

    def close(self) -> float | None:
        """Ends a short window. Returns the factor from 1/K to the true divisor, None where no window is open."""
        self.stepped = self.position > 0
        if not self.stepped:
            return None
        assert self.accumulation_steps is not None
        correction = self.accumulation_steps / self.position
        self.position = 0
        return correction

    def request_clip(self, max_norm: float) -> None:
        """Clips at the coming boundary instead of what the constructor said."""
        self._clip = max_norm

    def take_clip(self, default: float | None) -> float | None:
        """The max_norm of this boundary; a requested one counts once."""
        clip, self._clip = self._clip, None
        return default if clip is None else clip

    def describe(self, fate: str) -> str:
        """A sentence on the open window."""
        return (
            f"fusedaccum: an accumulation window of {self.position} of {self.accumulation_steps} micro-batches {fate}. "
            "Call flush() at the end of the epoch to step it"
        )

    def warn_if_open(self, fate: str = "was dropped without a step") -> None:
        """Says once that an open window is lost."""
        if self.position > 0:
            warnings.warn(self.describe(fate), stacklevel=3)
