"""The end of a window on all ranks of a group: what each has, the sum of the flat buffers, what it is divided by.

Every rank makes the same sequence of collectives, whatever it holds. Before anything is summed the ranks exchange a few
numbers (``_Facts``); from those each decides alike, so that an error is raised on all of them and nobody waits in vain.

1. ``overlap``: at the first gradient of its last micro-batch a rank says BEGIN. If all do, the pieces of the buffer go
   out in one fixed order, each as soon as its gradients are in and all pieces before it have gone.
2. At the boundary each says STEP or FLUSH. A rank that hears a BEGIN then answers again: there is no overlap in this
   window, and whoever began says STEP too when it gets there.
3. The union over the ranks of the parameters that hold a gradient, unless every rank has all.
4. The pieces that have not gone.

The sum is of accumulators as they are, and so is the sum of weights: the gradient is sum(w g) / sum(w) over all
micro-batches of all ranks, as if one process had had them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import layout
from .boundary import Boundary
from .distributed import RankLostError, Ranks, checksum, first_difference, settings_of
from .pieces import Pieces
from .registry import Registry
from .slot import Slot
from .window import Totals, Window

BEGIN, STEP, FLUSH = range(3)


class _Facts(NamedTuple):
    """What a rank tells the others; see ``_of``."""

    kind: float
    is_open: float = 0
    settings: float = 0
    places: float = 0
    numerator: float = 0
    weight: float = 0
    weight_sq: float = 0
    is_weighted: float = 0
    backwards: float = 0
    n_missing: float = 0
    has_nonfinite: float = 0
    max_norm: float = 0
    device_weight: float = 0
    device_weight_sq: float = 0
    micro_sum_sq: float = 0
    given_inf: float = 0


class Ended(NamedTuple):
    """What all ranks together know of the window that ends.

    Attributes:
        totals: as ``Window.totals``.
        found_inf: (1,) float64 on the device: non-zero where a rank was told of an inf.
        all_flush: no rank has more micro-batches to come.
    """

    totals: Totals
    found_inf: Tensor
    all_flush: bool


class Reduction:
    """Sums the windows of all ranks.

    Args:
        ranks: the group.
        optimizer: the wrapped optimizer, for its settings.
        window, registry, boundary: of this rank.
        options: of the FusedAccumOptimizer. ``reduce_dtype``: what the sum over the ranks is made in; bfloat16 halves
            the bytes and rounds each rank's sum, and each partial sum, to 8 bits. ``overlap``: whether pieces go out
            during the last micro-batch's backward. ``bucket_bytes``: of the accumulator, in one collective.
            ``nonfinite``: "raise" compares notes on inf and NaN before anything is summed.
    """

    def __init__(
        self,
        ranks: Ranks,
        optimizer: torch.optim.Optimizer,
        window: Window,
        registry: Registry,
        boundary: Boundary,
        options: dict[str, Any],
    ) -> None:
        self.ranks = ranks
        self._optimizer = optimizer
        self._window = window
        self._registry = registry
        self._boundary = boundary
        self._reduce_dtype = options["reduce_dtype"]
        self._overlap = options["overlap"]
        self._piece_bytes = options["bucket_bytes"]
        self._refuses_nonfinite = options["nonfinite"] == "raise"
        self._said_last = False
        self._lost: str | None = None
        self._n_boundaries = 0
        self._places: list[Any] | None = None
        self._places_sum = 0.0
        self._forget()

    def _forget(self) -> None:
        self._ended: Ended | None = None
        self._has_asked = False
        self._pieces: Pieces[Any] | None = None  # of a window that overlaps

    # The last micro-batch -------------------------------------------------------------------------------------------

    @contextmanager
    def last_micro_batch(self, flush: Callable[[], None]) -> Iterator[None]:
        """Says that no micro-batch comes after the one inside. ``flush`` hands over what waits in buckets."""
        self._said_last = True
        try:
            yield
            flush()
        finally:
            self._said_last = False

    def check_alive(self) -> None:
        """Raises RankLostError once a rank has been lost: there is no window that could be ended."""
        if self._lost is not None:
            raise RankLostError(self._lost)

    def check_in_time(self, slots: Sequence[Slot]) -> None:
        """Raises RuntimeError for gradients whose sum over the ranks has been made, or is being made."""
        self.check_alive()
        pieces = self._pieces
        late = [slot for slot in slots if self._ended is not None or (pieces is not None and pieces.has_gone(slot))]
        if late:
            raise RuntimeError(
                f"a gradient of {late[0].name} came after the sum over the ranks had begun; accepted: with "
                "overlap=True one backward in the last micro-batch, in which no parameter gets its gradient in two "
                "parts; after clip_grad_norm_ none before step(). The gradient was not added"
            )

    def before_adding(self) -> None:
        """Gradients are about to be added: of the last micro-batch, perhaps."""
        is_last = self._window.would_end() if self._window.accumulation_steps is not None else self._said_last
        if self._overlap and is_last and not self._has_asked:
            self._has_asked = True
            self._make_room()
            with self.noting_loss():
                rows = self._agree(_Facts(BEGIN, 1, *self._checksums()))
            if all(row.kind == BEGIN for row in rows):
                self._pieces = self._cut()

    def after_adding(self, slots: Sequence[Slot]) -> None:
        """Gradients of ``slots`` have been added: sends what is complete by that, in the fixed order."""
        if self._pieces is not None:
            with self.noting_loss():
                self._pieces.complete(slots)

    def _cut(self, used: Container[Slot] | None = None) -> Pieces[Any]:
        return self._boundary.pieces(self.ranks, self._piece_bytes, self._reduce_dtype, used)

    def _make_room(self) -> None:
        """The same places on all ranks, whatever gradients each has had so far: of all that may have any."""
        late = [slot for slot in self._registry.slots.values() if slot.arena is None and slot.param.requires_grad]
        if late:
            self._registry.make_room(late)

    # The boundary ---------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> Ended | None:
        """What ``end_window`` returned, until it is dropped or used."""
        return self._ended

    def end_window(self, kind: int, max_norm: float | None, found_inf: Tensor | None) -> Ended | None:
        """Makes the accumulators the sums over the ranks, and says what they are to be divided by; once a window.

        Args:
            kind: STEP or FLUSH.
            max_norm: what the boundary will clip to.
            found_inf: one element; non-zero where somebody has told this rank of an inf.

        Returns:
            None where all ranks flush and none has an open window.

        Raises:
            RankLostError: a rank did not answer. The window is dropped, and so is every later one.
            RuntimeError: the ranks do not fit together, on all of them.
            FloatingPointError: a rank has an inf or NaN, and those are refused; on all ranks, nothing has been summed.
        """
        self.check_alive()
        if self._ended is None:
            with self.noting_loss():
                self._ended = self._end(kind, math.inf if max_norm is None else max_norm, found_inf)
        return self._ended

    def _end(self, kind: int, max_norm: float, found_inf: Tensor | None) -> Ended | None:
        registry = self._registry
        self._make_room()
        self._drop_spent()
        if registry.holds_gradients():
            self._boundary.norm((1.0, 1.0, 1.0))  # this rank's sums of squares, into the control blocks
        else:
            registry.any_arena().control.zero_()
        home = registry.any_arena()
        mine = self._of(kind, max_norm)
        told = self._device_facts(found_inf)
        on_host = home.device.type == "cpu"
        if on_host:
            mine = _Facts(*mine[: -len(told)], *told.tolist())
        if self._pieces is not None:
            self._pieces.finish()
        rows = self._agree(mine)
        if kind == FLUSH and not any(row.is_open for row in rows):
            return None
        totals = self._checked_totals(rows)
        if on_host:
            tails = [row[-len(told) :] for row in rows]
            told = torch.tensor([sum(column) for column in zip(*tails, strict=True)], dtype=torch.float64)
        else:
            self.ranks.sum_(told)
        used = self._used_anywhere(any(row.n_missing for row in rows))
        if self._pieces is None:
            self._cut(used).finish()
        self._boundary.take_sum(used, told)
        all_flush = all(row.kind == FLUSH for row in rows)
        self._forget()
        return Ended(totals, told[3:], all_flush)

    def _drop_spent(self) -> None:
        """Gradients that a boundary has used are sums over the ranks already, and count for nothing here."""
        if self._window.is_spent:
            for slot in self._registry.slots.values():
                if slot.param.grad is not None and slot.is_own(slot.param.grad):
                    slot.param.grad = None

    def _checksums(self) -> tuple[float, float]:
        """Of the settings, and of the places in the buffers."""
        places = [
            [(slot.name, slot.n_elems, slot.strides, slot.dtype) for slot in arena.slots if slot is not None]
            for arena in self._registry.arenas.values()
        ]
        if places != self._places:  # comparing them takes a tenth of the time of printing them
            self._places, self._places_sum = places, checksum(places)
        return checksum(self._settings()), self._places_sum

    def _slots(self) -> list[Slot]:
        """All that have a place, in the same order on all ranks."""
        return [slot for arena in self._registry.arenas.values() for slot in arena.slots if slot is not None]

    def _settings(self) -> dict[str, Any]:
        return {**settings_of(self._optimizer.param_groups), "the number of boundaries so far": self._n_boundaries}

    def _of(self, kind: int, max_norm: float) -> _Facts:
        window = self._window
        slots = self._slots()
        home = self._registry.any_arena()
        return _Facts(
            kind,
            kind == STEP or window.position > 0,
            *self._checksums(),
            *(window.totals_if_stepped() if kind == STEP else window.totals()),
            window.open.has_weights,
            window.open.backwards,
            sum(slot.param.grad is None for slot in slots),
            self._refuses_nonfinite and not bool(torch.isfinite(home.control[layout.SUM_SQ])),
            max_norm,
        )

    def _device_facts(self, found_inf: Tensor | None) -> Tensor:
        """(4,) float64: the weights that only the device knows, the micro-batches' sum of squares, ``found_inf``."""
        home = self._registry.any_arena()
        micro = home.control[layout.MICRO_SUM_SQ : layout.MICRO_SUM_SQ + 1]
        given = torch.zeros_like(micro) if found_inf is None else (found_inf.to(micro.device).view(1) != 0).to(micro)
        return torch.cat([home.window[layout.WEIGHT : layout.WEIGHT_SQ + 1], micro, given])

    def _agree(self, mine: _Facts) -> list[_Facts]:
        home = self._registry.any_arena().device
        while True:
            rows = [_Facts(*row) for row in self.ranks.gather(mine, home)]
            if any(row.settings != rows[0].settings or row.places != rows[0].places for row in rows):
                self._refuse_difference()
            if mine.kind == BEGIN or all(row.kind != BEGIN for row in rows):
                return rows

    def _refuse_difference(self) -> None:
        """The checksums differ: says what does. Every rank gets here."""
        described = self._settings()
        for arena in self._registry.arenas.values():
            for i, slot in enumerate(slot for slot in arena.slots if slot is not None):
                described[f"place {i} of the accumulator"] = f"{slot.name} {tuple(slot.param.shape)} {slot.dtype}"
        difference = first_difference(self.ranks.gather_objects(described)) or "the order of the parameters differs"
        raise RuntimeError(
            f"{difference}; accepted: the same on all ranks, in each of them before each boundary. Nothing was stepped"
        )

    def _checked_totals(self, rows: Sequence[_Facts]) -> Totals:
        """Numerator, weight and weight_sq of all ranks: the mean and the sums."""
        norms = [row.max_norm for row in rows]
        if len(set(norms)) > 1:
            raise RuntimeError(f"max_norm is {norms} on the ranks; accepted: the same on all of them")
        bad = [rank for rank, row in enumerate(rows) if row.has_nonfinite]
        if bad:
            names = self._boundary.nonfinite_names() if self.ranks.rank in bad else []
            raise FloatingPointError(
                f"the accumulated gradient of {', '.join(names[:3]) or 'a parameter'} on rank "
                f"{', '.join(map(str, bad))} holds an inf or NaN; accepted with nonfinite='raise': finite gradients. "
                "Nothing was stepped, and the window is as it was: reset() drops it"
            )
        totals = [row[4:7] for row in rows]
        steps = self._window.accumulation_steps
        for rank, row in enumerate(rows) if any(row.is_weighted for row in rows) else ():
            if not row.is_weighted and not row.backwards:
                totals[rank] = (1.0 if steps is None else float(steps), 0.0, 0.0)  # it had no micro-batch
            elif not row.is_weighted and steps is None:
                raise RuntimeError(
                    f"the micro-batches of rank {rank} have no weights, those of others do; accepted: weights on all "
                    "ranks or on none"
                )
        numerator, weight, weight_sq = (sum(column) for column in zip(*totals, strict=True))
        return numerator / len(rows), weight, weight_sq

    def _used_anywhere(self, ask: bool) -> dict[Slot, None]:
        """The slots that hold a gradient on any rank. They do here from now on: zeros, until the sum is there."""
        arenas = self._registry.arenas.values()
        slots = self._slots()
        flags = [slot.param.grad is not None for slot in slots]
        if ask:
            flags = self.ranks.union(flags, self._registry.any_arena().device)
        used = dict.fromkeys(slot for slot, flag in zip(slots, flags, strict=True) if flag)
        if self._pieces is None:  # else they were zeros when they went, and hold the sum
            for arena in arenas:
                arena.zero_unused([slot for slot in arena.slots if slot in used])  # type: ignore[misc]
        for slot in used:
            if slot.param.grad is None:
                slot.param.grad = slot.view
        return used

    # Dropping -------------------------------------------------------------------------------------------------------

    @contextmanager
    def noting_loss(self) -> Iterator[None]:
        """When a rank is lost, what is in the buffers is nobody's sum: drops it, so that an emergency checkpoint holds
        the state of the last boundary."""
        try:
            yield
        except RankLostError as error:
            self._lost = str(error)
            for slot in self._registry.slots.values():
                slot.param.grad = None
            self._window.close()
            self._window.start_afresh()
            self._forget()
            self._boundary.forget_sum()
            raise

    def take(self) -> Ended | None:
        """What ``end_window`` found, for the boundary that uses it. None for one that is not shared."""
        ended = self._ended
        self._n_boundaries += 1
        self._forget()
        return ended

    def drop(self) -> None:
        """The open window's gradients are dropped by this rank."""
        self.check_droppable()
        self._forget()
        self._boundary.forget_sum()

    def check_own(self) -> None:
        """Raises RuntimeError where what is accumulated is not this rank's own any more."""
        if self._pieces is not None or self._ended is not None:
            raise RuntimeError(
                "the window's gradients are being summed over the ranks; accepted: state_dict() after step(), or "
                "before the last micro-batch and clip_grad_norm_"
            )

    def check_droppable(self) -> None:
        """Raises RuntimeError where some of the window's gradients are on their way to the other ranks."""
        if self._pieces is not None:
            raise RuntimeError(
                "the gradients of the last micro-batch are on their way to the other ranks; accepted: step() before "
                "they are dropped"
            )
