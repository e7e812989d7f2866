"""The accumulation window: where in it we are, what it weighs, and what a boundary divides by. Host state only."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, fields
from typing import Any

Totals = tuple[float, float, float]
"""Numerator, weight, weight_sq: the gradient is the accumulator times numerator / weight."""


@dataclass
class _Open:
    """What is known of the open window; a fresh one between windows.

    Attributes:
        weight, weight_sq: sum of the weights that the host knows, and of their squares. Micro-batches without a weight
            of their own count 1 each.
        has_weights: a micro-batch has been given a weight, by the host or on the device.
        on_device: some weights are in the arenas' ``window`` blocks.
        holds_gradients: something has been added since the window began.
        was_scaled, was_plain: gradients came from a backward that began at a scaled loss; from one that did not.
        backwards: backward calls that brought gradients.
    """

    weight: float = 0.0
    weight_sq: float = 0.0
    has_weights: bool = False
    on_device: bool = False
    holds_gradients: bool = False
    was_scaled: bool = False
    was_plain: bool = False
    backwards: int = 0


@dataclass
class _MicroBatch:
    """What is known of the micro-batch at hand: since the last ``step()``, or without ``accumulation_steps`` since the
    window began."""

    is_weighted: bool = False
    is_plain: bool = False
    backwards: int = 0


class Window:
    """Counts and weighs micro-batches.

    Args:
        accumulation_steps: micro-batches a window; None where each ``step()`` is a boundary.
        counts_on_device: only the device knows which micro-batches count, and adds up all weights itself.
        place: (rank, number of ranks) of the group that shares the boundaries.
    """

    def __init__(
        self, accumulation_steps: int | None, counts_on_device: bool = False, place: tuple[int, int] = (0, 1)
    ) -> None:
        self.accumulation_steps = accumulation_steps
        self.counts_on_device = counts_on_device
        self.place = place
        self._is_shared = place[1] > 1
        self.position = 0
        """``step()`` calls of the open window; always 0 without ``accumulation_steps``."""
        self.stepped = False
        self.open = _Open()
        self.micro = _MicroBatch()
        self.weight: float | None = None
        """Of the gradients that come now, as far as the host knows it; None outside of a weighted micro-batch."""
        self.is_spent = False
        """The last boundary was a weighted or shared one and nobody has dropped its gradients yet."""
        self._clip: float | None = None
        self._has_warned = False

    # Micro-batches --------------------------------------------------------------------------------------------------

    @property
    def scale(self) -> float:
        """What each gradient is multiplied by when it is added: 1/K, so that ``.grad`` is the window's mean, times its
        micro-batch's weight."""
        scale = 1.0 if self.accumulation_steps is None else 1.0 / self.accumulation_steps
        return scale if self.weight is None else scale * self.weight

    def check_weight_comes_first(self) -> None:
        """Raises RuntimeError where gradients of the micro-batch have been added without a weight."""
        if self.micro.is_plain:
            raise RuntimeError(
                "weight was given after a backward without one had added gradients to the same "
                f"{'window' if self.accumulation_steps is None else 'micro-batch'}; accepted: before the backward that "
                "it belongs to"
            )

    def begin_micro_batch(self, host_weight: float) -> None:
        """From now on, gradients belong to a weighted micro-batch. ``host_weight``: 1 where only the device knows."""
        self.weight = host_weight
        self.micro.is_weighted = True
        self.open.has_weights = True

    def end_micro_batch(self, counted: float | None) -> None:
        """The weighted micro-batch is over. ``counted``: its weight, None where the device counts it or it failed."""
        self.weight = None
        if counted is not None:
            self.open.weight += counted
            self.open.weight_sq += counted * counted

    def note_gradients(self, n_backwards: int, is_scaled: bool, all_first: bool) -> None:
        """Gradients are about to be added.

        Args:
            n_backwards: backward calls since the last time.
            is_scaled: they come from a loss that was scaled by a scaler of ours.
            all_first: none of their parameters holds a gradient.

        Raises:
            RuntimeError: they cannot be added to what is there without a wrong result.
        """
        if self.weight is None and self.micro.is_weighted:
            raise RuntimeError(
                "a backward without a weight in a weighted "
                f"{'window' if self.accumulation_steps is None else 'micro-batch'}; accepted: optimizer.backward(loss, "
                "weight=...), or no weight in any. Its gradients were not added"
            )
        if self.is_spent and not all_first and (self._is_shared or self.weight is not None):
            raise RuntimeError(
                "the gradients of the last window are still there, and it was "
                f"{'summed over the ranks' if self._is_shared else 'weighted'}; accepted: zero_grad() after each "
                "boundary. The new gradients were not added"
            )
        if all_first:
            self.is_spent = False
        state, micro = self.open, self.micro
        state.holds_gradients = True
        state.backwards += n_backwards
        micro.backwards += n_backwards
        micro.is_plain |= self.weight is None
        state.was_scaled |= is_scaled
        state.was_plain |= not is_scaled

    # Boundaries -----------------------------------------------------------------------------------------------------

    def would_end(self) -> bool:
        """Whether the coming ``step()`` is a boundary."""
        return self.accumulation_steps is None or self.position + 1 == self.accumulation_steps

    def advance(self) -> bool:
        """One more micro-batch is in; returns whether that ends the window."""
        if self.accumulation_steps is not None:
            is_due = self._is_due()
            self.open.weight += is_due
            self.open.weight_sq += is_due
            self._warn_of_two_windows()
            self.position = (self.position + 1) % self.accumulation_steps
            self.micro = _MicroBatch()
        self.stepped = self.position == 0
        if not self.stepped:
            self._clip = None  # a clip asked for inside a window has no boundary to act at
        return self.stepped

    def _is_due(self) -> bool:
        """Whether the coming ``step()`` counts the micro-batch at hand as 1."""
        return not self.micro.is_weighted and (not self.counts_on_device or self.micro.backwards == 0)

    def _warn_of_two_windows(self) -> None:
        if self.micro.backwards > 1 and not self._has_warned and not self.micro.is_weighted:
            self._has_warned = True
            warnings.warn(
                f"fusedaccum: {self.micro.backwards} backward calls came before one step(), and accumulation_steps is "
                f"{self.accumulation_steps}: a window then adds up {self.micro.backwards} x {self.accumulation_steps} "
                f"gradients and divides by {self.accumulation_steps}. If something else accumulates too (Accelerate, "
                "Trainer, a loop of your own), pass accumulation_steps=None here",
                stacklevel=4,
            )

    def totals(self) -> Totals:
        """What ``finalize_`` divides by, as things stand."""
        state, k = self.open, self.accumulation_steps
        if k is not None:
            return float(k), state.weight, state.weight_sq
        if state.has_weights:
            return 1.0, state.weight, state.weight_sq
        # The loss was divided by the user: a mean over so many backward calls, each counting 1.
        n = float(max(state.backwards, 1))
        counted = 0.0 if self.counts_on_device else n
        return n, counted, counted

    def totals_if_stepped(self) -> Totals:
        """``totals`` after the coming ``step()``."""
        numerator, weight, weight_sq = self.totals()
        is_due = self.accumulation_steps is not None and self._is_due()
        return numerator, weight + is_due, weight_sq + is_due

    def totals_so_far(self) -> Totals:
        """``totals`` before the ``step()`` that counts the micro-batch at hand: the norm is that of ``.grad`` as it is,
        but for weights."""
        if not self.open.has_weights:
            return 1.0, 1.0, 1.0
        numerator, weight, weight_sq = self.totals()
        is_due = self.accumulation_steps is not None and self.micro.is_plain
        return numerator, weight + is_due, weight_sq + is_due

    def close(self) -> bool:
        """Ends a short window. Returns whether one was open."""
        self.stepped = self.position > 0
        self.position = 0
        self.micro = _MicroBatch()
        return self.stepped

    def start_afresh(self, is_spent: bool = False) -> None:
        """The window's gradients have been used, or dropped."""
        self.open = _Open()
        self.micro = _MicroBatch()
        self.is_spent = is_spent

    def request_clip(self, max_norm: float) -> None:
        """Clips at the coming boundary instead of what the constructor said."""
        self._clip = max_norm

    def coming_clip(self, default: float | None) -> float | None:
        """What ``take_clip`` will return."""
        return default if self._clip is None else self._clip

    def take_clip(self, default: float | None) -> float | None:
        """The max_norm of this boundary; a requested one counts once."""
        clip, self._clip = self._clip, None
        return default if clip is None else clip

    # The open window ------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether something is accumulated that no boundary has used."""
        return self.position > 0 or self.open.holds_gradients

    @property
    def is_between_micro_batches(self) -> bool:
        """Whether ``step()`` has ended a micro-batch inside of a window, and nothing has come since."""
        return self.position > 0 and self.micro == _MicroBatch()

    def state(self) -> dict[str, Any]:
        """The open window, for a checkpoint."""
        return {
            "accumulation_steps": self.accumulation_steps,
            "position": self.position,
            "micro_batch": asdict(self.micro),
            **asdict(self.open),
        }

    def load(self, state: dict[str, Any]) -> None:
        """What ``state`` returned, of the same ``accumulation_steps``."""
        self.position = state["position"]
        self.open = _Open(**{entry.name: state[entry.name] for entry in fields(_Open)})
        self.micro = _MicroBatch(**state["micro_batch"])
        self.is_spent = False

    def describe(self, fate: str) -> str:
        """A sentence on the open window."""
        if self.accumulation_steps is None:
            return f"fusedaccum: what {self.open.backwards} backward calls have accumulated without a step() {fate}"
        return (
            f"fusedaccum: an accumulation window of {self.position} of {self.accumulation_steps} micro-batches {fate}. "
            "Call flush() at the end of the epoch to step it"
        )

    def warn_if_open(self, fate: str = "was dropped without a step") -> None:
        """Says once that an open window is lost."""
        if self.position > 0:
            warnings.warn(self.describe(fate), stacklevel=3)
