"""The end of a window: what takes part, norm and skip, and the update."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from . import layout
from .arena import Arena
from .delegate import Delegate
from .distributed import Ranks
from .dtensor import check_loaded, is_dtensor, local_of, mesh_of, over_ranks
from .pieces import Pieces, SummedPieces
from .registry import Registry
from .rules import HyperRow, Rule
from .slot import Slot


class Boundary:
    """Steps the parameters that hold a gradient.

    Args:
        optimizer: the wrapped optimizer.
        rule: its fused rule; None where its own ``step`` runs.
        registry: its parameters.
        masters: whether 16-bit parameters get an fp32 master.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rule: Rule | None, registry: Registry, masters: bool) -> None:
        self._optimizer = optimizer
        self._rule = rule
        self._registry = registry
        self._masters = masters
        self._delegate = Delegate(optimizer) if rule is None else None

    def run(
        self,
        totals: tuple[float, float, float],
        max_norm: float | None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """One boundary over everything that holds a gradient; nothing where nothing does.

        Args:
            totals: what the accumulator is divided by, as ``Window.totals`` has it.
            max_norm: of all gradients together; None for no clip.
            grad_scale: one element; what the gradients are yet to be divided by.
            found_inf: one element; non-zero where somebody else has seen an inf.
        """
        active = self._active_slots()
        if not active and not self._registry.has_sharded():
            for arena in self._registry.arenas.values():
                arena.drop_weights()
            return
        self._ensure_state(active)
        if grad_scale is not None:
            for arena, slots in active.items():
                arena.scale(slots, grad_scale.to(arena.device, torch.float64).reciprocal().view(()))
        self._finalize(active, totals, max_norm, True, found_inf)
        if self._delegate is not None:
            self._delegate.run(active)
            return
        for hook in self._optimizer._optimizer_step_pre_hooks.values():
            hook(self._optimizer, (), {})
        self._step(active)
        # A scheduler built on the wrapped optimizer warns when that seems never to have stepped.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        for post_hook in self._optimizer._optimizer_step_post_hooks.values():
            post_hook(self._optimizer, (), {})

    def _step(self, active: dict[Arena, list[Slot]]) -> None:
        for arena, slots in active.items():
            arena.step([slot.local() for slot in slots], [slot.index for slot in slots])
            torch.autograd.graph.increment_version([slot.param for slot in slots])
            for slot in slots:
                slot.version += 1

    def norm(self, totals: tuple[float, float, float]) -> Tensor:
        """0-dim float32: the norm of the gradients as they are now, the accumulator divided by ``totals``."""
        active = self._active_slots()
        if not active and not self._registry.has_sharded():
            return torch.zeros(())
        self._finalize(active, totals, None, advance=False)
        return self.control_value(layout.NORM)

    def control_value(self, entry: int) -> Tensor:
        """A copy of one entry of the control block, as 0-dim float32."""
        return self._registry.any_arena().control[entry].to(torch.float32)

    def was_written(self) -> bool:
        """Whether somebody else has written to an accumulator since the last op."""
        return any(arena.written_by_others() for arena in self._registry.arenas.values())

    def nonfinite_names(self) -> list[str]:
        """The parameters whose accumulated gradient holds an inf or NaN. Waits for the device."""
        slots = [slot for slots in self._active_slots().values() for slot in slots]
        return [slot.name for slot in slots if slot.view is not None and not bool(torch.isfinite(slot.view).all())]

    # The sum over the ranks of a process group -----------------------------------------------------------------------

    def pieces(
        self, ranks: Ranks, n_bytes: int, dtype: torch.dtype, used: Container[Slot] | None = None
    ) -> Pieces[Any]:
        """The accumulators, cut for their way over the ranks.

        Args:
            ranks: the group.
            n_bytes: of one piece.
            dtype: what the sum is made in.
            used: the slots that hold a gradient on some rank; None where that is not known yet.
        """
        return SummedPieces(ranks, self._registry.arenas.values(), n_bytes, dtype, used)

    def take_sum(self, used: Container[Slot], told: Tensor) -> None:
        """The pieces have come: what the accumulators hold is now the sum over the ranks.

        Args:
            used: the slots that hold a gradient on some rank.
            told: (3 or more,) float64, of all ranks: the weights that only devices know, and their squares; the sum of
                squares of all micro-batches' gradients.
        """
        keeps_micro: Arena | None = None
        for arena in self._registry.arenas.values():
            slots = [slot for slot in arena.slots if slot is not None and slot in used]
            if keeps_micro is None and any(slot.n_elems for slot in slots):
                keeps_micro = arena
            arena.take_sum(slots)
            arena.take_statistics(told[:2], told[2] if arena is keeps_micro else None)

    def forget_sum(self) -> None:
        """The sum over the ranks is dropped without a step."""

    # What takes part ----------------------------------------------------------------------------------------------

    def _active_slots(self) -> dict[Arena, list[Slot]]:
        active: dict[Arena, list[Slot]] = {}
        for slot in self._registry.slots.values():
            grad = slot.param.grad
            if grad is None:
                continue
            if slot.param.stride() != slot.param_strides:
                self._registry.follow_order(slot)
                grad = slot.param.grad
                assert grad is not None
            if not slot.is_own(grad):
                self._registry.reattach(slot, grad)
            arena = slot.arena
            assert arena is not None
            slots = active.get(arena)
            if slots is None:
                slots = active[arena] = []
            slots.append(slot)
        for arena, slots in active.items():
            arena.measure_if_written(slots)
        return active

    def _finalize(
        self,
        active: dict[Arena, list[Slot]],
        totals: tuple[float, float, float],
        max_norm: float | None,
        advance: bool,
        found_inf: Tensor | None = None,
    ) -> None:
        rows = self._hyper_rows()
        # Those without a gradient too: their loss scale and counts move with the rest.
        arenas = list(self._registry.arenas.values())
        indices = {arena: [slot.index for slot in active.get(arena, ())] for arena in arenas}
        if self._registry.has_sharded():
            total = self._sums_over_ranks(active, rows, totals, found_inf)
            for arena, index in indices.items():
                arena.finalize(index, rows, totals, max_norm, None, advance, total.to(arena.device))
            return
        sums: dict[Arena, Tensor] = {}
        if len(arenas) > 1:
            sums = {arena: arena.sums_of_squares(index, rows) for arena, index in indices.items()}
        for arena, index in indices.items():
            others = [value.to(arena.device) for other, value in sums.items() if other is not arena]
            extra = torch.stack(others).sum(0) if others else None
            if found_inf is not None:
                # An infinite sum of squares somewhere else: as if another device had found it.
                seen = torch.where(found_inf.to(arena.device).view(1) != 0, torch.inf, 0.0).double()
                seen = torch.cat([seen, torch.zeros_like(seen)])
                extra = seen if extra is None else extra + seen
            arena.finalize(index, rows, totals, max_norm, extra, advance)

    def _hyper_rows(self) -> list[HyperRow]:
        no_rule = (0.0,) * layout.HYPER_COLUMNS
        groups = self._optimizer.param_groups
        return [self._rule.hyper_row(group) if self._rule is not None else no_rule for group in groups]

    def _sums_over_ranks(
        self,
        active: dict[Arena, list[Slot]],
        rows: list[HyperRow],
        totals: tuple[float, float, float],
        found_inf: Tensor | None,
    ) -> Tensor:
        """(4,) float64: the sums of squares of both kinds, each element counted once, and the mean over the ranks of
        their weights and of the squares of those. One reduction, whatever a rank holds: nobody waits in vain."""
        home = self._registry.any_arena()
        here = torch.zeros(4, dtype=torch.float64, device=home.device)
        for arena, slots in active.items():
            for n in sorted({slot.n_replicas for slot in slots}):
                index = [slot.index for slot in slots if slot.n_replicas == n]
                here[:2] += arena.sums_of_squares(index, rows).to(home.device) / n
        if found_inf is not None:
            here[0] += torch.where(found_inf.to(home.device).view(()) != 0, torch.inf, 0.0)
        n_ranks = torch.distributed.get_world_size()
        here[2:] = home.window[layout.WEIGHT : layout.WEIGHT_SQ + 1] / n_ranks
        here[2] += totals[1] / n_ranks
        here[3] += totals[2] / n_ranks
        sharded = self._registry.any_sharded()
        assert sharded is not None
        return over_ranks(here, sharded)

    # State --------------------------------------------------------------------------------------------------------

    def state_slots(self) -> dict[Tensor, Slot]:
        """By parameter, the slots that ``optimizer.state`` has views of, or may have: those that have a place."""
        return {param: slot for param, slot in self._registry.slots.items() if slot.arena is not None}

    def check_value(self, slot: Slot, name: str, value: Any) -> None:
        """Raises ValueError for a loaded state that cannot be cut to this rank's part of the parameter."""
        if is_dtensor(value) and not slot.is_sharded:
            raise ValueError(
                f"loaded state dict has {name} of {slot.name} as a DTensor, a part on each rank; accepted: whole, as "
                "get_optimizer_state_dict has it with StateDictOptions(full_state_dict=True). "
                "torch.distributed.checkpoint brings what it has saved to any number of ranks"
            )
        check_loaded(f"{name} of {slot.name}", value, mesh_of(slot.param))

    def wants_master(self, slot: Slot) -> bool:
        """Whether the slot's parameter is stepped through an fp32 master."""
        return self._masters and slot.dtype is not torch.float32

    def _ensure_state(self, active: dict[Arena, list[Slot]]) -> None:
        state = self._optimizer.state
        groups = self._optimizer.param_groups
        extra = [self._rule is not None and self._rule.needs_extra(group) for group in groups]
        for arena, slots in active.items():
            stale = []
            for slot in slots:
                if not slot.is_own_state(state.get(slot.param)) or (extra[slot.group] and not slot.has_extra):
                    stale.append(slot)
                if slot.has_master and slot.was_written():
                    self._sync_master(slot)
            if stale or arena.states_are_behind():
                self.adopt_state(arena, stale)

    def adopt_state(self, arena: Arena, slots: list[Slot]) -> None:
        """Room for the slots' state, filled from what ``optimizer.state`` holds for them, which it then replaces."""
        groups = self._optimizer.param_groups
        extra = [
            self._rule is not None
            # Once there, it stays: torch too keeps max_exp_avg_sq when amsgrad is switched off.
            and (slot.has_extra or self._rule.needs_extra(groups[slot.group]))
            for slot in slots
        ]
        moved = arena.ensure_state(slots, extra, [self.wants_master(slot) for slot in slots])
        if moved:
            # Growth made every view anew: those in optimizer.state must follow.
            given = set(slots)
            for slot in arena.slots:
                if slot is not None and slot.state and slot not in given:
                    self._fill(arena, slot)
        for slot in slots:
            self._fill(arena, slot)

    def _fill(self, arena: Arena, slot: Slot) -> None:
        """Makes what ``optimizer.state`` holds for the slot the arena's views, keeping the values."""
        views = arena.state_views(slot)
        # Without views of ours (SGD without momentum) the entry is not even created, as in torch.
        held = self._optimizer.state[slot.param] if views else {}
        for name, view in views.items():
            value = held.get(name)
            old = slot.state.get(name)
            if isinstance(value, Tensor) and value is old:
                pass  # ours: growth has already carried the contents over
            elif value is not None:
                slot.fill(view, value, name)
            elif name == "master_param":
                self._sync_master(slot)
            else:
                local_of(view).zero_()  # new, or somebody took it out to start afresh
        if self._rule is not None and not self._rule.counts_steps and self._rule.extra_name in views:
            value = held.get(self._rule.extra_name)
            if value is not slot.state.get(self._rule.extra_name) or value is None:
                # No buffer yet means that the next gradient becomes it, undamped.
                arena.steps[slot.index] = 0.0 if value is None else 1.0
        held.update(views)
        slot.keep_state(views)

    def _sync_master(self, slot: Slot) -> None:
        """Takes what somebody wrote to a parameter into its master; where the two agree, the master's bits stay."""
        assert slot.arena is not None
        master = slot.arena.master_view(slot)
        param = slot.local().detach()
        master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(torch.float32)))
        slot.remember_value()

    def sync_masters(self) -> None:
        """Takes all parameters into their masters, written to or not."""
        for slot in self.state_slots().values():
            if slot.has_master:
                self._sync_master(slot)
