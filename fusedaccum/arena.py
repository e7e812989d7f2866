"""The flat tensors of one device, and the ops on them.

Memory, bytes an element: 4 for the accumulator; from the first boundary on 8 for Adam's two averages (4 for SGD's
momentum), 4 for the master of a 16-bit parameter, 4 for AMSGrad's maximum. The partials are 1/4096 byte an element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import layout
from .backends import Backend
from .rules import HyperRow, Rule
from .slot import Slot
from .unscale import count_writes
from .uploads import Uploads


class Arena:
    """Accumulator, partials, control block, masters and states of the slots on one device.

    Args:
        device: where the parameters and all buffers live.
        backend: whose ops run on them.
        rule: the fused update rule; None where the wrapped optimizer's own step updates the masters.
        statistics: whether to keep the micro-batches' own sums of squares.
    """

    def __init__(self, device: torch.device, backend: Backend, rule: Rule | None, statistics: bool) -> None:
        count_writes()  # written_by_others relies on it
        self.device = device
        self.backend = backend
        self.rule = rule
        self.layout = layout.Layout()
        self.slots: list[Slot | None] = []  # None: its parameter has left
        self.acc = self._zeros(0)
        self.partials = self._zeros(0, torch.float64)
        self.micro_partials = self._zeros(0, torch.float64) if statistics else None
        self.window = self._zeros(layout.WINDOW_SIZE, torch.float64)
        self.control = self._zeros(layout.CONTROL_SIZE, torch.float64)
        self.scalars = self._zeros(0).view(0, layout.SCALAR_COLUMNS)
        self.steps = self._zeros(0)
        self.table = self._zeros(0, torch.int64).view(0, len(layout.SLOT_COLUMNS))
        self.states: dict[str, Tensor] = {}  # name -> flat fp32 buffer laid out as acc
        self.master = self._zeros(0)
        self.extra = self._zeros(0)
        self._uploads = Uploads(device)
        self._counts_moved = False
        """The step counts have been given other memory than ``optimizer.state`` has views of."""
        self._version = self.acc._version

    def _zeros(self, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(n, dtype=dtype, device=self.device)

    # Slots ------------------------------------------------------------------------------------------------------

    def add(self, slots: Sequence[Slot]) -> None:
        """Gives each slot a place in the accumulator. Contents of the others are kept; their views are made anew."""
        touched = self.written_by_others()
        for slot in slots:
            self._place(slot)
        self.acc = self._grown(self.acc, self.layout.n_elems)
        self._move_counts(self._grown(self.steps, len(self.slots)))
        self._grow_tables()
        # A buffer that somebody wrote to must still count as written to under its new version counter.
        self._version = self.acc._version - 1 if touched else self.acc._version
        for kept in self.slots:
            if kept is None:
                continue
            grad = kept.param.grad
            was_own = grad is not None and kept.is_own(grad)
            kept.keep_view(self.view_of(kept, self.acc))
            if was_own:
                kept.param.grad = kept.grad
        self.write_table()

    def _place(self, slot: Slot) -> None:
        slot.arena, slot.index = self, len(self.slots)
        slot.placement = self.layout.add(slot.n_elems)
        self.slots.append(slot)

    def _move_counts(self, steps: Tensor) -> None:
        self._counts_moved = self._counts_moved or steps is not self.steps
        self.steps = steps

    def _grow_tables(self) -> None:
        """Room for partials and scalars of all slots."""
        self.partials = self._grown(self.partials, self.layout.n_chunks)
        if self.micro_partials is not None:
            self.micro_partials = self._grown(self.micro_partials, self.layout.n_chunks)
        n_scalars = len(self.slots) * layout.SCALAR_COLUMNS
        self.scalars = self._grown(self.scalars.view(-1), n_scalars).view(-1, layout.SCALAR_COLUMNS)

    def retire(self, slot: Slot) -> None:
        """The slot's parameter leaves; its place stays unused."""
        self.slots[slot.index] = None
        slot.leave_arena()

    def _grown(self, buffer: Tensor, n_elems: int) -> Tensor:
        if buffer.numel() >= n_elems:
            return buffer
        grown = torch.zeros(n_elems, dtype=buffer.dtype, device=self.device)
        grown[: buffer.numel()] = buffer
        return grown

    def write_table(self) -> None:
        """Uploads the places and groups of all slots."""
        rows = [
            placement.row(0 if slot is None else slot.group)
            for slot, placement in zip(self.slots, self.layout.placements, strict=True)
        ]
        table = torch.tensor(rows, dtype=torch.int64).view(-1, len(layout.SLOT_COLUMNS))
        self.table = table.to(self.device)

    def view_of(self, slot: Slot, buffer: Tensor, offset_elems: int | None = None) -> Tensor:
        """The slot's part of a flat buffer, in the shape and memory order of what this rank has of the parameter."""
        assert slot.placement is not None
        offset = slot.placement.offset_elems if offset_elems is None else offset_elems
        return buffer.as_strided(slot.shape, slot.strides, buffer.storage_offset() + offset)

    def run_of(self, slot: Slot) -> Tensor:
        """The slot's part of the accumulator, (n,) in memory order."""
        assert slot.placement is not None
        offset = slot.placement.offset_elems
        return self.acc[offset : offset + slot.n_elems]

    # Accumulate -------------------------------------------------------------------------------------------------

    def accumulate(
        self,
        slots: Sequence[Slot],
        grads: Sequence[Tensor],
        first: Sequence[bool],
        scale: float,
        factor: Tensor | None,
    ) -> None:
        """Adds ``scale * factor`` times each gradient, dense and in its slot's memory order.

        Where ``first`` is set the parameter had no ``.grad``: the gradient is stored, not added, and ``.grad`` becomes
        the accumulator.
        """
        touched = self.written_by_others()
        self.backend.accumulate_(
            self.acc,
            self.partials,
            self.micro_partials,
            self.table,
            grads,
            [slot.index for slot in slots],
            first,
            scale,
            factor,
        )
        self._wrote(touched)
        if True in first:
            for slot, is_first in zip(slots, first, strict=True):
                if is_first:
                    slot.param.grad = slot.grad

    def measure(self, slots: Sequence[Slot]) -> None:
        """Recomputes the partials of slots that something other than ``accumulate`` wrote to."""
        indices, n_elems = [slot.index for slot in slots], [slot.n_elems for slot in slots]
        self.backend.measure_(self.partials, self.acc, self.table, indices, n_elems)

    def measure_if_written(self, slots: Sequence[Slot]) -> None:
        """Brings the partials of ``slots`` (all that hold a gradient) up to date if somebody else wrote to any. Of
        DTensors always: ``torch._foreach_mul_`` on them, as in torch's clip, moves no version (seen on torch 2.13)."""
        if self.written_by_others() or any(slot.is_sharded for slot in slots):
            self.measure(slots)
            self._version = self.acc._version

    def scale(self, slots: Sequence[Slot], factor: float | Tensor) -> None:
        """Multiplies the accumulators of ``slots``, in place."""
        views = [slot.view for slot in slots if slot.view is not None]
        torch._foreach_mul_(views, factor)  # type: ignore[arg-type]
        self._version = self.acc._version
        self.measure(slots)

    def zero_unused(self, slots: Sequence[Slot]) -> None:
        """Zeros for those of ``slots`` that hold no gradient: an earlier window's is still there."""
        unused = [slot.view for slot in slots if slot.param.grad is None and slot.view is not None]
        if unused:
            touched = self.written_by_others()
            torch._foreach_zero_(unused)
            self._wrote(touched)

    def take_sum(self, slots: Sequence[Slot]) -> None:
        """The accumulators of ``slots`` have become those of all ranks together. What else is written there counts for
        nothing."""
        self._wrote(touched=False)
        if slots:
            self.measure(slots)

    def take_statistics(self, weights: Tensor, micro_sum_sq: Tensor | None) -> None:
        """What the device knows of the open window becomes that of all ranks together.

        Args:
            weights: (2,) float64, the sum of weights and of their squares.
            micro_sum_sq: 0-dim float64, the micro-batches' own sums of squares; None where another arena keeps it.
        """
        self.window[layout.WEIGHT : layout.WEIGHT_SQ + 1] = weights
        if self.micro_partials is None:
            return
        self.micro_partials.zero_()
        if micro_sum_sq is not None:
            # In a chunk of a slot that takes part: finalize_ sums over those.
            for slot in self.slots:
                if slot is not None and slot.n_elems and slot.param.grad is not None:
                    self.micro_partials[self._chunks_of(slot).start] = micro_sum_sq
                    break

    def written_by_others(self) -> bool:
        """Whether somebody wrote to the accumulator (through any ``.grad``) since the last op of ours."""
        return self.acc._version != self._version

    def _wrote(self, touched: bool) -> None:
        """Our own write: bump the version as an in-place op does, so that a graph that saved a ``.grad`` notices."""
        torch.autograd.graph.increment_version(self.acc)
        if not touched:
            self._version = self.acc._version

    def own_write(self, slot: Slot, value: Tensor) -> None:
        """Copies ``value`` (any dtype, the slot's shape) into the slot's accumulator and measures it."""
        touched = self.written_by_others()
        slot.keep_view(self.view_of(slot, self.acc))
        assert slot.view is not None
        slot.view.copy_(value)
        self.measure([slot])
        micro = self.micro_partials_of(slot)
        if micro is not None:
            micro.copy_(self.partials[self._chunks_of(slot)])
        self._wrote(touched)

    def add_sparse(self, slot: Slot, grad: Tensor, scale: float, factor: Tensor | None) -> None:
        """Adds a sparse COO gradient: its values are summed in fp32, over repeated indices too."""
        touched = self.written_by_others()
        assert slot.view is not None
        is_first = slot.param.grad is None
        if is_first:
            slot.view.zero_()
            slot.param.grad = slot.view
        summed = grad.to(torch.float32).coalesce()
        if factor is not None:
            effective = (factor * scale).to(torch.float32)
            # As the op does: a scale of 0 adds nothing, not even 0 * NaN.
            values = torch.where(effective != 0, summed.values() * effective, 0.0)
        else:
            values = summed.values() * scale if scale != 0 else torch.zeros_like(summed.values())
        # The indices are a coalesced tensor's own. torch asks to say whether they are to be checked.
        scaled = torch.sparse_coo_tensor(
            summed.indices(), values, summed.shape, is_coalesced=True, check_invariants=False
        )
        slot.view.add_(scaled)
        self.measure([slot])
        micro = self.micro_partials_of(slot)
        if micro is not None and slot.n_elems:
            if is_first:
                micro.zero_()
            micro[0] += values.double().square().sum()
        self._wrote(touched)

    def micro_partials_of(self, slot: Slot) -> Tensor | None:
        """The slot's part of the micro-batches' own sums of squares; None without statistics."""
        return None if self.micro_partials is None else self.micro_partials[self._chunks_of(slot)]

    def _chunks_of(self, slot: Slot) -> slice:
        assert slot.placement is not None
        first = slot.placement.first_chunk
        return slice(first, first + layout.n_chunks(slot.n_elems))

    # Boundary ---------------------------------------------------------------------------------------------------

    def ensure_state(self, active: Sequence[Slot], with_extra: Sequence[bool], with_master: Sequence[bool]) -> bool:
        """Allocates what the rule keeps for ``active`` slots. Returns whether any view was made anew."""
        names = self.rule.state_names if self.rule is not None else ()
        layout_before = (self.layout.n_master_elems, self.layout.n_extra_elems)
        grew = self.states_are_behind()
        new_masters = []
        for slot, extra, master in zip(active, with_extra, with_master, strict=True):
            assert slot.placement is not None
            if extra:
                self.layout.add_extra(slot.placement)
                slot.has_extra = True
            if master and not slot.has_master:
                self.layout.add_master(slot.placement)
                slot.has_master = True
                new_masters.append(slot)
        if grew:
            for name in names:
                self.states[name] = self._grown(self.states.get(name, self._zeros(0)), self.layout.n_elems)
        if layout_before != (self.layout.n_master_elems, self.layout.n_extra_elems):
            self.master = self._grown(self.master, self.layout.n_master_elems)
            self.extra = self._grown(self.extra, self.layout.n_extra_elems)
            self.write_table()
            grew = True
        self._counts_moved = False
        for slot in new_masters:
            self.master_view(slot).copy_(slot.local().detach())
            slot.remember_value()
        return grew

    def states_are_behind(self) -> bool:
        """Whether the rule's states do not yet cover all slots, or ``optimizer.state`` has views of counts of old."""
        if self._counts_moved:
            return True  # and nothing else has grown, where all new parameters are empty
        names = self.rule.state_names if self.rule is not None else ()
        return any(name not in self.states or self.states[name].numel() < self.layout.n_elems for name in names)

    def master_view(self, slot: Slot) -> Tensor:
        """The fp32 master of a 16-bit parameter, in its shape."""
        assert slot.placement is not None
        return self.view_of(slot, self.master, slot.placement.master_offset_elems)

    def state_views(self, slot: Slot) -> dict[str, Tensor]:
        """What ``optimizer.state[param]`` holds: torch's names for the rule's state, and the master. Beside a DTensor
        they are DTensors, but for the count of steps."""
        assert slot.placement is not None
        views: dict[str, Tensor] = {}
        if self.rule is not None:
            if self.rule.counts_steps:
                views["step"] = self.steps[slot.index]
            views.update({n: slot.as_param(self.view_of(slot, buffer)) for n, buffer in self.states.items()})
            if slot.placement.extra_offset_elems >= 0:
                extra = self.view_of(slot, self.extra, slot.placement.extra_offset_elems)
                views[self.rule.extra_name] = slot.as_param(extra)
        if slot.placement.master_offset_elems >= 0:
            views["master_param"] = slot.as_param(self.master_view(slot))
        return views

    def finalize(
        self,
        active: list[int],
        hyper_rows: Sequence[HyperRow],
        totals: tuple[float, float, float],
        max_norm: float | None,
        extra: Tensor | None,
        advance: bool,
        sums: Tensor | None = None,
    ) -> None:
        """Fills the control block, and with ``advance`` the window, and the scalars and step counts of active slots.

        Args:
            totals: numerator, weight and weight_sq, as ``Window.totals`` has them.
            extra: (2,) float64, the two sums of squares of other devices.
            sums: (4,) float64, the two sums of squares, and of weights and their squares, of everything on all ranks;
                in the place of what is known here, so that all ranks compute the same bits.
        """
        partials, micro_partials = self.partials, self.micro_partials
        if sums is not None:
            weights = self.window[layout.WEIGHT : layout.WEIGHT_SQ + 1]
            weights_here = weights.clone()
            partials = torch.zeros_like(partials)
            micro_partials = None if micro_partials is None else partials
            totals, extra = (totals[0], 0.0, 0.0), sums[:2].clone()
            weights.copy_(sums[2:])
        self.backend.finalize_(
            self.control,
            self.scalars,
            self.steps,
            self.window,
            partials,
            micro_partials,
            self.table,
            self._uploads.hyper(hyper_rows),
            self._uploads.mask(active, len(self.slots)),
            self.rule.id if self.rule is not None else layout.RULE_NONE,
            *totals,
            math.inf if max_norm is None else max_norm,
            extra,
            advance,
        )
        if sums is not None and not advance:
            weights.copy_(weights_here)

    def sums_of_squares(self, active: list[int], hyper_rows: Sequence[HyperRow]) -> Tensor:
        """(2,) float64: the sums over the active slots' partials of both kinds, for norms over several devices."""
        self.finalize(active, hyper_rows, (1.0, 1.0, 1.0), None, None, advance=False)
        return torch.stack([self.control[layout.SUM_SQ], self.control[layout.MICRO_SUM_SQ]])

    def add_weight(self, weight: Tensor) -> None:
        """Counts a weight that only a device knows, (1,) float64, in the open window."""
        here = weight.to(self.device, non_blocking=True)
        self.window[layout.WEIGHT : layout.WEIGHT_SQ + 1] += torch.cat([here, here * here])

    def drop_weights(self) -> None:
        """Forgets the weights of the open window."""
        self.window[layout.WEIGHT : layout.WEIGHT_SQ + 1] = 0.0

    def step(self, params: Sequence[Tensor], active: list[int]) -> None:
        """Updates the active slots' parameters, masters and states by the rule, unless the step is skipped."""
        assert self.rule is not None
        self.rule.step(self, params, active)
