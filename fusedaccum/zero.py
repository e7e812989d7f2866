"""Sharded states (ZeRO-1): which part of each parameter a rank steps, and where that part's sum, states and master lie.

A parameter is cut along the dimension that is outermost in its memory, as ``DTensor`` cuts it: ceil(rows / N) rows a
rank, so that later ranks may have fewer, or none. A part is then one run of memory, and ``optimizer.state`` holds
DTensors, which ``torch.distributed.checkpoint`` saves, gathers and brings to another number of ranks by itself. A
parameter without dimensions is whole on every rank.

The parts lie one behind the other at the end of the accumulator that they are parts of. A part is no larger than its
slot, so that none begins before its slot does: where sums go out from the end of the buffer on, what comes back lands
only where everything has gone. There is no second accumulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import dtensor
from .arena import Arena
from .distributed import Ranks
from .registry import Registry
from .slot import Slot

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Part(Slot):
    """This rank's part of a slot's parameter: a slot of its own, of the local shape.

    Args:
        whole: the slot.
        ranks: who has the other parts.
        mesh: the ranks, as DTensors know them.
    """

    __slots__ = ("_flat", "_local", "_mesh", "_ptr", "_rank", "_rows", "_stand_in", "chunk_elems", "dim", "whole")

    def __init__(self, whole: Slot, ranks: Ranks, mesh: DeviceMesh) -> None:
        param = whole.param
        self.whole = whole
        self._mesh = mesh
        self._rank = ranks.rank
        self.dim = _outermost(param)
        """The dimension that the parameter is cut along; None where it has none."""
        n_rows = 1 if self.dim is None else param.shape[self.dim]
        rows_each = n_rows if self.dim is None else -(-n_rows // ranks.size)
        self.chunk_elems = rows_each * (whole.n_elems // max(n_rows, 1))
        """Elements of the largest part: where in memory rank r's begins is r times that."""
        first = 0 if self.dim is None else min(ranks.rank * rows_each, n_rows)
        self._rows = (first, min(first + rows_each, n_rows) - first)
        self._ptr = -1
        super().__init__(param, whole.name, whole.group)
        self.n_replicas = ranks.size if self.dim is None else 1
        whole.keeps_order = True

    # The parameter --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Takes the views of the parameter anew where it has been given other memory."""
        param = self.param
        if param.data_ptr() == self._ptr:
            return
        self._ptr = param.data_ptr()
        values = param.detach()
        self._local = values if self.dim is None else values.narrow(self.dim, *self._rows)
        self._flat = values.as_strided((self.whole.n_elems,), (1,))

    def local(self) -> Tensor:
        self._look()
        return self._local

    def flat(self) -> Tensor:
        """The whole parameter, (n,) in memory order."""
        self._look()
        return self._flat

    def remember_tensor(self) -> None:
        self.dtype, self.device = self.whole.dtype, self.whole.device
        self.n_elems = self.local().numel()
        self.remember_order()
        self._stand_in: Tensor | None = None

    def remember_value(self) -> None:
        self.whole.remember_value()

    def was_written(self) -> bool:
        return self.whole.was_written()

    # Buffers of the local shape -------------------------------------------------------------------------------------

    def as_param(self, local: Tensor) -> Tensor:
        return dtensor.around(self.stand_in(), local)

    def stand_in(self) -> Tensor:
        """A DTensor of the parameter's shape, cut as its states are."""
        if self._stand_in is None:
            from torch.distributed.tensor import DTensor, Replicate, Shard

            placement = Replicate() if self.dim is None else Shard(self.dim)
            self._stand_in = DTensor.from_local(
                self.local(), self._mesh, (placement,), shape=self.param.shape, stride=self.param.stride()
            )
        return self._stand_in

    def fill(self, view: Tensor, value: Any, name: str) -> None:
        if dtensor.is_dtensor(view):
            part = dtensor.part_of(f"{name} of {self.name}", torch.as_tensor(value), self.stand_in())
            dtensor.local_of(view).copy_(part)
        else:
            super().fill(view, value, name)

    def keep_view(self, view: Tensor) -> None:
        self.view = view
        self.view_ptr = view.data_ptr()

    # Everybody's parts ----------------------------------------------------------------------------------------------

    def pairs(self, flat: Tensor, columns: Tensor, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of the same elements in two places.

        Args:
            flat: (n,), the whole in memory order.
            columns: (N, stop - start), whose row r is for elements ``start`` to ``stop`` of rank r's part.
        """
        if self.dim is None:
            yield flat[start:stop].expand(columns.shape), columns
            return
        chunk = self.chunk_elems
        n_full, rest = divmod(flat.numel(), chunk)
        if n_full:
            yield flat[: n_full * chunk].view(n_full, chunk)[:, start:stop], columns[:n_full]
        if rest > start:
            stop = min(stop, rest)
            short = flat[n_full * chunk :]
            yield short[start:stop], columns[n_full, : stop - start]

    def own_of(self, flat: Tensor) -> Tensor:
        """This rank's part of the whole in memory order."""
        first = 0 if self.dim is None else self._rank * self.chunk_elems
        return flat[first : first + self.n_elems]


def _outermost(param: Tensor) -> int | None:
    """The dimension of more than one row whose rows lie farthest apart; None for a parameter without dimensions."""
    if param.dim() == 0:
        return None
    return max(range(param.dim()), key=lambda i: (param.shape[i] > 1, param.stride(i), -i))


class Run(NamedTuple):
    """Elements ``start`` to ``stop`` of every rank's part, in the columns of a matrix from ``column`` on, whose row r
    is rank r's."""

    part: Part
    start: int
    stop: int
    column: int

    def columns_of(self, matrix: Tensor) -> Tensor:
        """Its columns, of a matrix or of one row."""
        return matrix[..., self.column : self.column + self.stop - self.start]

    @property
    def own_stop(self) -> int:
        """Where this rank's part ends, if before ``stop``."""
        return max(self.start, min(self.stop, self.part.n_elems))


def cut_runs(parts: Iterable[Part], n_columns: int) -> list[list[Run]]:
    """Matrices of up to ``n_columns``. A part goes into one of them as a whole, unless it is wider than that."""
    matrices: list[list[Run]] = []
    here: list[Run] = []
    width = 0
    for part in parts:
        chunk = part.chunk_elems
        if here and width + chunk > n_columns:
            matrices.append(here)
            here, width = [], 0
        for start in range(0, chunk, n_columns):
            stop = min(start + n_columns, chunk)
            here.append(Run(part, start, stop, width))
            width += stop - start
            if stop < chunk:
                matrices.append(here)
                here, width = [], 0
    return [*matrices, here] if here else matrices


def width_of(runs: Iterable[Run]) -> int:
    """Columns of a matrix."""
    return sum(run.stop - run.start for run in runs)


class PartArena(Arena):
    """The parts of another arena's slots, each at its slot's index. Its accumulator is the end of the other's.

    Bytes an element of a whole parameter: Adam's averages 8/N, masters 4/N. Nothing for the accumulator.

    Args:
        whole: the other arena. What is the same on all ranks is its: control block, window, step counts.
    """

    def __init__(self, whole: Arena) -> None:
        super().__init__(whole.device, whole.backend, whole.rule, whole.micro_partials is not None)
        self.whole = whole
        self.control, self.window, self.steps = whole.control, whole.window, whole.steps

    def follow(self, ranks: Ranks, mesh: DeviceMesh) -> None:
        """Has a part for each slot that the other arena now has. States are kept."""
        whole = self.whole
        is_news = whole.steps is not self.steps or len(whole.slots) > len(self.slots)
        regrouped = False
        for slot, part in zip(whole.slots, self.slots, strict=False):
            if part is None:
                continue
            assert isinstance(part, Part)
            if slot is not part.whole:
                self.retire(part)
            elif part.group != slot.group:
                part.group, regrouped = slot.group, True
        for slot in whole.slots[len(self.slots) :]:
            if slot is None:
                self.layout.add(0)
                self.slots.append(None)
            else:
                self._place(Part(slot, ranks, mesh))
        if is_news:
            self._move_counts(whole.steps)
            self._grow_tables()
            self.acc = whole.acc[whole.layout.n_elems - self.layout.n_elems :]
            for part in self.slots:
                if part is not None:
                    part.keep_view(self.view_of(part, self.acc))
        if is_news or regrouped:
            self.write_table()


class Shards:
    """The parts of all slots, by arena.

    Args:
        ranks: who shares them.
        registry: of the whole slots.
    """

    def __init__(self, ranks: Ranks, registry: Registry) -> None:
        self.ranks = ranks
        self._registry = registry
        self.arenas: dict[Arena, PartArena] = {}
        self._meshes: dict[str, DeviceMesh] = {}

    def follow(self) -> None:
        """Brings the parts up to date with the registry's slots."""
        for whole in self._registry.arenas.values():
            arena = self.arenas.get(whole)
            if arena is None:
                arena = self.arenas[whole] = PartArena(whole)
            arena.follow(self.ranks, self._mesh(whole.device.type))

    def part_of(self, slot: Slot) -> Part:
        """The part of a slot that has a place, after ``follow``."""
        assert slot.arena is not None
        part = self.arenas[slot.arena].slots[slot.index]
        assert isinstance(part, Part)
        return part

    def check_value(self, slot: Slot, name: str, value: Any) -> None:
        """Raises ValueError for a loaded state that lies on other ranks."""
        dtensor.check_loaded(f"{name} of {slot.name}", value, self._mesh(slot.device.type))

    def _mesh(self, device_type: str) -> DeviceMesh:
        mesh = self._meshes.get(device_type)
        if mesh is None:
            from torch.distributed.device_mesh import DeviceMesh

            mesh = self._meshes[device_type] = DeviceMesh.from_group(self.ranks.group, device_type)
        return mesh

    def __del__(self) -> None:
        # As the registry's: parts and arenas know each other.
        for arena in self.arenas.values():
            arena.slots.clear()
