"""The flat buffers on their way over the ranks where each rank keeps the sum of its own parts only."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .arena import Arena
from .pieces import Piece, Pieces
from .slot import Slot
from .zero import Run, Shards, cut_runs, width_of

N_ON_THE_WAY = 2
"""Pieces that are on their way at the same time, one to be filled while the other travels."""


class _ScatteredPiece(Piece):
    def __init__(self, arena: Arena, runs: list[Run]) -> None:
        super().__init__(arena, [run.part.whole for run in runs])
        self.runs = runs
        self.clear_at = 0
        """How many pieces must have gone until nothing of its slots is left in the accumulator."""


class _OnTheWay(NamedTuple):
    piece: _ScatteredPiece
    work: dist.Work
    sent: Tensor
    """Must live until ``work`` is done."""
    result: Tensor


class ScatteredPieces(Pieces[_ScatteredPiece]):
    """The sum of all ranks' accumulators of a part, on the rank whose part it is, in the part's own place.

    Args:
        shards: the parts.
        n_bytes: of what is sent and not yet placed: ``N_ON_THE_WAY`` copies, each of the size of one piece. Of slots
            larger than that, what has come waits until all of the slot has gone: 4/N bytes an element of one slot.
        dtype: what the sum is made in.
        used: the slots that hold a gradient on some rank, and no others go; None where that is not known yet.
    """

    def __init__(self, shards: Shards, n_bytes: int, dtype: torch.dtype, used: Container[Slot] | None = None) -> None:
        shards.follow()
        pieces: list[_ScatteredPiece] = []
        n_columns = max(n_bytes // (N_ON_THE_WAY * shards.ranks.size * dtype.itemsize), 1)
        for whole in shards.arenas:
            slots = [s for s in whole.slots if s is not None and s.n_elems and (used is None or s in used)]
            parts = [shards.part_of(slot) for slot in slots]
            pieces += [_ScatteredPiece(whole, runs) for runs in cut_runs(parts, n_columns)]
        super().__init__(shards.ranks, pieces[::-1], dtype)
        for piece in self._pieces:
            piece.clear_at = 1 + max(self._places[slot][-1] for slot in piece.slots)
        self._shards = shards
        self._on_the_way: deque[_OnTheWay] = deque()
        self._come: list[tuple[_ScatteredPiece, Tensor]] = []  # and not yet placed

    def _send(self, piece: _ScatteredPiece) -> None:
        while len(self._on_the_way) >= N_ON_THE_WAY:
            self._receive_next()
        width = width_of(piece.runs)
        acc, n_ranks = piece.arena.acc, self._ranks.size
        is_full = all(run.part.chunk_elems * n_ranks == run.part.whole.n_elems for run in piece.runs)
        # What pads short parts is summed too.
        make = acc.new_empty if is_full else acc.new_zeros
        everybodys = make((n_ranks, width), dtype=self._dtype)
        into, out_of = [], []
        for run in piece.runs:
            flat = piece.arena.run_of(run.part.whole)
            for values, sent in run.part.pairs(flat, run.columns_of(everybodys), run.start, run.stop):
                into.append(sent)
                out_of.append(values)
        torch._foreach_copy_(into, out_of)
        result = acc.new_empty(width, dtype=self._dtype)
        work = self._ranks.start_scatter(result, everybodys)
        self._on_the_way.append(_OnTheWay(piece, work, everybodys, result))
        self._place()

    def _receive(self) -> None:
        while self._on_the_way:
            self._receive_next()

    def _receive_next(self) -> None:
        first = self._on_the_way.popleft()
        with self._ranks.naming_failures("a sum over the ranks"):
            first.work.wait()
        self._come.append((first.piece, first.result))
        self._place()

    def _place(self) -> None:
        """Copies what has come to where the parts lie, if nothing that is yet to go lies there."""
        waiting = []
        for piece, result in self._come:
            if piece.clear_at > self._n_sent:
                waiting.append((piece, result))
                continue
            into, out_of = [], []
            for run in piece.runs:
                own = self._shards.arenas[piece.arena].run_of(run.part)[run.start : run.own_stop]
                into.append(own)
                out_of.append(run.columns_of(result)[: own.numel()])
            touched = piece.arena.written_by_others()
            torch._foreach_copy_(into, out_of)
            piece.arena._wrote(touched)
        self._come = waiting
