"""The end of a window where each rank steps its own parts of the parameters (``shard_states``)."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import layout
from .arena import Arena
from .boundary import Boundary
from .distributed import Ranks
from .gather import gather_
from .registry import Registry
from .rules import HyperRow, Rule
from .scatter import ScatteredPieces
from .slot import Slot
from .zero import Part, PartArena, Shards


@dataclass
class _Sum:
    """The sum over the ranks, in the parts' places.

    Attributes:
        active: the parts of the parameters that hold a gradient on some rank.
        micro_sum_sq: 0-dim float64, all micro-batches' own sums of squares.
        sum_sq: 0-dim float64, of all ranks' parts; None until somebody asks.
        is_shared: other ranks are at the same boundary.
    """

    active: dict[PartArena, list[Part]]
    micro_sum_sq: Tensor
    sum_sq: Tensor | None = None
    is_shared: bool = True


class ShardedBoundary(Boundary):
    """Steps parts. Until the sum over the ranks is made it knows of this rank's own gradients only, as its base does.

    Args:
        ranks: who shares the states.
        n_bytes: of the copies that travel, all together.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: Rule | None,
        registry: Registry,
        masters: bool,
        ranks: Ranks,
        n_bytes: int,
    ) -> None:
        super().__init__(optimizer, rule, registry, masters)
        self.shards = Shards(ranks, registry)
        self._ranks = ranks
        self._n_bytes = n_bytes
        self._sum: _Sum | None = None

    def run(
        self,
        totals: tuple[float, float, float],
        max_norm: float | None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        if self._sum is None:
            self._take_zeros()
        elif grad_scale is not None:
            self._sum.sum_sq = None  # it is about to be multiplied
        try:
            super().run(totals, max_norm, grad_scale, found_inf)
        finally:
            self.forget_sum()

    # The sum --------------------------------------------------------------------------------------------------------

    def pieces(
        self, ranks: Ranks, n_bytes: int, dtype: torch.dtype, used: Container[Slot] | None = None
    ) -> ScatteredPieces:
        return ScatteredPieces(self.shards, n_bytes, dtype, used)

    def take_sum(self, used: Container[Slot], told: Tensor) -> None:
        for slot in self._registry.slots.values():
            slot.param.grad = None  # other things lie there now
        active: dict[PartArena, list[Part]] = {}
        for whole, arena in self.shards.arenas.items():
            parts = [self.shards.part_of(slot) for slot in whole.slots if slot is not None and slot in used]
            self._agree_on_replicas(arena, [part for part in parts if part.dim is None])
            if parts:
                arena.measure(parts)
                active[arena] = parts
            whole.take_sum(())
            whole.take_statistics(told[:2], None)
        self._sum = _Sum(active, told[2])

    def _agree_on_replicas(self, arena: PartArena, parts: list[Part]) -> None:
        """Each rank has summed these by itself, from another rank on perhaps; all must step with the same bits."""
        if parts:
            values = torch.cat([arena.run_of(part) for part in parts])
            self._ranks.take_first_(values)
            torch._foreach_copy_([arena.run_of(part) for part in parts], list(values.split(1)))

    def _take_zeros(self) -> None:
        """For a boundary that only makes the state exist, which is this rank's own: see ``_only_makes_state``."""
        active = super()._active_slots()
        self.shards.follow()
        for slot in self._registry.slots.values():
            slot.param.grad = None
        parts: dict[PartArena, list[Part]] = {}
        for whole, slots in active.items():
            arena = self.shards.arenas[whole]
            arena.acc.zero_()
            whole.take_sum(())
            parts[arena] = [self.shards.part_of(slot) for slot in slots]
        zero = torch.zeros((), dtype=torch.float64, device=self._registry.any_arena().device)
        self._sum = _Sum(parts, zero, zero, is_shared=False)

    def forget_sum(self) -> None:
        self._sum = None

    # What takes part ------------------------------------------------------------------------------------------------

    def _active_slots(self) -> dict[Arena, list[Slot]]:
        if self._sum is None:
            return super()._active_slots()
        return {arena: [*parts] for arena, parts in self._sum.active.items()}

    def _finalize(
        self,
        active: dict[Arena, list[Slot]],
        totals: tuple[float, float, float],
        max_norm: float | None,
        advance: bool,
        found_inf: Tensor | None = None,
    ) -> None:
        if self._sum is None:
            super()._finalize(active, totals, max_norm, advance, found_inf)
            return
        rows = self._hyper_rows()
        home = self._registry.any_arena()
        sum_sq = self._sum_of_squares(self._sum, rows)
        if found_inf is not None:
            sum_sq = sum_sq + torch.where(found_inf.to(home.device).view(()) != 0, torch.inf, 0.0)
        # The weights are those of all ranks by now, that hosts know and that only devices know.
        weight, weight_sq = home.window[layout.WEIGHT : layout.WEIGHT_SQ + 1]
        micro = self._sum.micro_sum_sq.to(home.device)
        total = torch.stack([sum_sq, micro, weight + totals[1], weight_sq + totals[2]])
        # Those without a gradient too: their loss scale and counts move with the rest.
        for arena in self.shards.arenas.values():
            index = [slot.index for slot in active.get(arena, ())]
            arena.finalize(index, rows, totals, max_norm, None, advance, total.to(arena.device))

    def _sum_of_squares(self, summed: _Sum, rows: list[HyperRow]) -> Tensor:
        """0-dim float64, the same bits on all ranks. One reduction, whatever a rank holds."""
        if summed.sum_sq is None:
            here = torch.zeros(1, dtype=torch.float64, device=self._registry.any_arena().device)
            for arena, parts in summed.active.items():
                index = [part.index for part in parts if part.dim is not None or self._ranks.rank == 0]
                here += arena.sums_of_squares(index, rows)[:1].to(here.device)
            self._ranks.sum_(here)
            summed.sum_sq = here.view(())
        return summed.sum_sq

    def _step(self, active: dict[Arena, list[Slot]]) -> None:
        assert self._sum is not None
        for arena, parts in self._sum.active.items():
            own = [part for part in parts if part.n_elems]
            if own:
                arena.step([part.local() for part in own], [part.index for part in own])
            if self._sum.is_shared:
                gather_(self._ranks, parts, self._n_bytes)
            torch.autograd.graph.increment_version([part.param for part in parts])
            for part in parts:
                part.remember_value()

    # State ----------------------------------------------------------------------------------------------------------

    def state_slots(self) -> dict[Tensor, Slot]:
        if not self._optimizer.state:
            return {}  # and a parameter may still take another memory order
        self.shards.follow()
        slots = self._registry.slots.items()
        return {param: self.shards.part_of(slot) for param, slot in slots if slot.arena is not None}

    def check_value(self, slot: Slot, name: str, value: Any) -> None:
        self.shards.check_value(slot, name, value)
