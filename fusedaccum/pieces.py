"""The flat buffers on their way over the ranks, in pieces that go out in one fixed order.

The cut and the order follow from the layout, which is the same on all ranks; when a piece goes does not matter to the
others. So each rank may send a piece as soon as it is complete here, and one that never is goes at the boundary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Sequence
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .arena import Arena
from .distributed import Ranks
from .slot import Slot


class Piece:
    """What one collective sums: slots that lie behind one another, or a part of a large one."""

    def __init__(self, arena: Arena, slots: list[Slot]) -> None:
        self.arena = arena
        self.slots = slots
        self.missing = {slot for slot in slots if slot.param.requires_grad}
        """Those whose last gradient of the window is yet to come."""


PieceT = TypeVar("PieceT", bound=Piece)


class Pieces(ABC, Generic[PieceT]):
    """One window's pieces.

    Args:
        ranks: the group.
        pieces: in the order that they go in: the last of the buffer first, where the first gradients of a backward
            arrive.
        dtype: what the sum is made in; float32, or bfloat16 through a copy.
    """

    def __init__(self, ranks: Ranks, pieces: list[PieceT], dtype: torch.dtype) -> None:
        self._ranks = ranks
        self._dtype = dtype
        self._pieces = pieces
        self._places: dict[Slot, list[int]] = {}
        for i, piece in enumerate(pieces):
            for slot in piece.slots:
                self._places.setdefault(slot, []).append(i)
        self._n_sent = 0

    def has_gone(self, slot: Slot) -> bool:
        """Whether the slot's accumulator is no longer this rank's own."""
        return any(place < self._n_sent for place in self._places.get(slot, ())[:1])

    def complete(self, slots: Sequence[Slot]) -> None:
        """The last gradients of ``slots`` are in: sends what is complete by that, in the fixed order."""
        for slot in slots:
            for place in self._places.get(slot, ()):
                self._pieces[place].missing.discard(slot)
        while self._n_sent < len(self._pieces) and not self._pieces[self._n_sent].missing:
            self._send_next()

    def finish(self) -> None:
        """Sends what has not gone yet, and waits for all."""
        while self._n_sent < len(self._pieces):
            self._send_next()
        self._receive()

    def _send_next(self) -> None:
        piece = self._pieces[self._n_sent]
        piece.arena.zero_unused(piece.slots)
        self._n_sent += 1
        self._send(piece)

    @abstractmethod
    def _send(self, piece: PieceT) -> None:
        """Starts the collective."""

    @abstractmethod
    def _receive(self) -> None:
        """Waits for all that is on its way."""


class SummedPieces(Pieces[Piece]):
    """The sum of all ranks, on all ranks, in the place of each one's own.

    Args:
        arenas: whose accumulators are summed, in place.
        n_bytes: of an accumulator, in one piece; one slot may have more.
        used: the slots that hold a gradient on some rank; None where that is not known yet. A piece without any is left
            out.
    """

    def __init__(
        self,
        ranks: Ranks,
        arenas: Iterable[Arena],
        n_bytes: int,
        dtype: torch.dtype,
        used: Container[Slot] | None = None,
    ) -> None:
        pieces = _cut(arenas, n_bytes)
        kept = [piece for piece in pieces if used is None or any(slot in used for slot in piece.slots)]
        super().__init__(ranks, kept, dtype)
        self._on_the_way: list[tuple[dist.Work, Tensor, Tensor]] = []

    def _send(self, piece: Piece) -> None:
        first, last = piece.slots[0].placement, piece.slots[-1].placement
        assert first is not None
        assert last is not None
        values = piece.arena.acc[first.offset_elems : last.offset_elems + last.n_elems]
        sent = values if self._dtype is torch.float32 else values.to(self._dtype)
        self._on_the_way.append((self._ranks.start_sum_(sent), sent, values))

    def _receive(self) -> None:
        for work, sent, values in self._on_the_way:
            with self._ranks.naming_failures("a sum over the ranks"):
                work.wait()
            if sent is not values:
                values.copy_(sent)
        self._on_the_way.clear()


def _cut(arenas: Iterable[Arena], n_bytes: int) -> list[Piece]:
    pieces = []
    for arena in arenas:
        run: list[Slot] = []
        n_bytes_here = 0
        for slot in arena.slots:
            if slot is None or not slot.n_elems:
                continue
            run.append(slot)
            n_bytes_here += 4 * slot.n_elems
            if n_bytes_here >= n_bytes:
                pieces.append(Piece(arena, run))
                run, n_bytes_here = [], 0
        if run:
            pieces.append(Piece(arena, run))
    return pieces[::-1]
