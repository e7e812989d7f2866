"""Which parameters there are: param_groups -> slots -> arenas, kept in step with what users do to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import dtensor, sharded_capture, validate
from .arena import Arena
from .capture import Capture
from .rules import Rule, check_group
from .slot import Slot


def stream_of(device: torch.device) -> int:
    """The current stream of a CUDA device; 0 on devices whose autograd nodes remember none."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


class Registry:
    """The slots of all parameters of ``optimizer.param_groups``, by parameter, and the arenas they lie in.

    Args:
        optimizer: the wrapped optimizer; its groups are read anew whenever they have changed.
        rule: its fused rule, or None.
        capture: takes the parameters' gradients.
        new_arena: makes the arena of a device.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: Rule | None,
        capture: Capture,
        new_arena: Callable[[torch.device], Arena],
    ) -> None:
        self._optimizer = optimizer
        self._rule = rule
        self._capture = capture
        self._new_arena = new_arena
        self.slots: dict[Tensor, Slot] = {}
        self.arenas: dict[torch.device, Arena] = {}
        # As last seen, to notice changes: the identities in each params list, and the parameters' dtypes and devices.
        self._known_ids: list[list[int]] = []
        self._params_seen: list[Tensor] = []
        self._dtypes: list[torch.dtype] = []
        self._devices: list[torch.device] = []
        self._streams: dict[torch.device, int] = {}  # where the AccumulateGrad nodes were made
        self._scale = 1.0
        self._removed = False

    # Groups -----------------------------------------------------------------------------------------------------

    def _params(self) -> Iterator[tuple[int, str, Tensor]]:
        for g, group in enumerate(self._optimizer.param_groups):
            for i, param in enumerate(group["params"]):
                yield g, validate.param_name(g, group, i), param

    def check_new_groups(self) -> None:
        """Raises TypeError or ValueError for a group or parameter that is not accepted; changes nothing."""
        for g, group in enumerate(self._optimizer.param_groups):
            check_group(self._optimizer, self._rule, g, group)
        for _, name, param in self._params():
            if param not in self.slots:
                validate.check_param(name, param)
                if self._rule is not None:
                    validate.check_dense(name, param)
                self._capture.check_free(param, name)

    @torch.no_grad()
    def adopt_new_groups(self, scale: float) -> None:
        """Slots for new parameters; parameters that left their groups are given back to torch.

        Args:
            scale: of what torch has accumulated on new parameters by itself, in an open window perhaps.
        """
        present: set[Tensor] = set()
        new: list[Slot] = []
        regrouped: set[Arena] = set()
        for g, name, param in self._params():
            present.add(param)
            slot = self.slots.get(param)
            if slot is None:
                slot = self.slots[param] = Slot(param, name, g)
                self._capture.attach(slot)
                new.append(slot)
            elif slot.group != g:
                slot.group = g
                if slot.arena is not None:
                    regrouped.add(slot.arena)
        for param in [param for param in self.slots if param not in present]:
            if any(dtensor.is_dtensor(value) and not dtensor.is_dtensor(param) for value in self._states_of(param)):
                del self._optimizer.state[param]  # parts, which nobody but us can step
            self._give_back(self.slots.pop(param))
        for arena in regrouped:
            arena.write_table()
        self._known_ids = self._ids()
        self._params_seen = list(self.slots)
        self._dtypes = [slot.dtype for slot in self.slots.values()]
        self._devices = [slot.device for slot in self.slots.values()]
        for device in set(self._devices):
            self._streams.setdefault(device, stream_of(device))
        if scale != 1.0:
            for slot in new:
                grad, slot.param.grad = slot.param.grad, None
                if grad is not None:
                    self.accumulate([slot], [grad], [True], [slot], scale)

    def _ids(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self._optimizer.param_groups]

    def refresh(self, scale: float) -> None:
        """Notices what users may have done since the last call: edited groups, moved or converted parameters.

        Args:
            scale: of a gradient that torch accumulated by itself, on a new or converted parameter.
        """
        if self._removed:
            raise RuntimeError("the FusedAccumOptimizer was removed; use the optimizer that remove() returned")
        self._scale = scale
        if self._ids() != self._known_ids:
            self.check_new_groups()
            self.adopt_new_groups(scale)
        params = self._params_seen
        if [p.dtype for p in params] != self._dtypes or [p.device for p in params] != self._devices:
            for slot in self.slots.values():
                if slot.param.dtype is not slot.dtype or slot.param.device != slot.device:
                    self._follow(slot)
            self.adopt_new_groups(scale)
        for device, stream in self._streams.items():
            if stream_of(device) != stream:
                self._follow_stream(device)

    def _follow_stream(self, device: torch.device) -> None:
        """Takes the nodes anew: each remembers the stream that was current when it was made, and runs there.

        torch warns of a mismatch since 2.10, and a node of the default stream breaks the capture of a CUDA graph.
        """
        self._streams[device] = stream_of(device)
        for slot in self.slots.values():
            if slot.device == device:
                self._capture.detach(slot)
                self._capture.attach(slot)

    def _follow(self, slot: Slot) -> None:
        """``Module.to`` after wrapping: torch has dropped the node, hooks and all, and ``.grad`` is torch's own."""
        was = f"{slot.dtype} on {slot.device}".removeprefix("torch.")
        now = f"{slot.param.dtype} on {slot.param.device}".removeprefix("torch.")
        if self._optimizer.state.get(slot.param):
            raise RuntimeError(
                f"{slot.name} was {was} and is now {now}, and has optimizer state; accepted: conversions before the "
                "first step. Save a state_dict, convert the model, wrap a new optimizer and load it"
            )
        validate.check_param(slot.name, slot.param)
        self._check_holds_nothing(slot, f"was {was} and is now {now}")
        grad, slot.param.grad = slot.param.grad, None
        if slot.arena is not None:
            slot.arena.retire(slot)
        slot.remember_tensor()
        self._hook_anew(slot, grad)

    @staticmethod
    def _check_holds_nothing(slot: Slot, what: str) -> None:
        grad = slot.param.grad
        if grad is not None and grad is slot.grad:
            # What torch may have added to it since has not been scaled, and cannot be told from the rest.
            raise RuntimeError(
                f"{slot.name} {what}, and holds an accumulated gradient; accepted: conversions while .grad is None. "
                "Call zero_grad() before converting the model"
            )

    def _hook_anew(self, slot: Slot, grad: Tensor | None) -> None:
        """After torch has dropped the node. ``grad``: what it accumulated by itself since, unscaled."""
        self._capture.detach(slot)
        self._capture.attach(slot)
        if grad is not None:
            self.accumulate([slot], [grad], [True], [slot], self._scale)

    def follow_order(self, slot: Slot) -> None:
        """``Module.to(memory_format=...)`` or ``p.data = ...`` after wrapping: the kernels walk through a parameter and
        its buffers in memory order, so that these must take the parameter's new one."""
        param, arena = slot.param, slot.arena
        if slot.is_sharded:
            raise RuntimeError(
                f"{slot.name} had the strides {slot.param_strides} and now has {param.stride()}; accepted: DTensors "
                "that keep theirs. Wrap a new optimizer"
            )
        if slot.keeps_order:
            raise RuntimeError(
                f"{slot.name} had the strides {slot.param_strides} and now has {param.stride()}, and its states are "
                "sharded; accepted: conversions before the first boundary. Save a state_dict, convert the model, wrap "
                "a new optimizer and load it"
            )
        views: list[Tensor] = []
        if arena is not None and slot.view is not None:
            if slot.view.shape != param.shape:
                raise RuntimeError(
                    f"{slot.name} had shape {tuple(slot.view.shape)} and now has {tuple(param.shape)}; accepted: the "
                    "same shape. Wrap a new optimizer"
                )
            if param.grad is slot.view:
                self.reattach(slot, slot.view)
            views = [slot.view, *(view for view in slot.state.values() if view.shape == param.shape)]
        values = [view.clone() for view in views]
        slot.remember_order()
        for view, value in zip(views, values, strict=True):
            view.as_strided_(param.shape, slot.strides).copy_(value)  # in place: optimizer.state holds the same object
        # The hook has the old order written into it.
        self._capture.detach(slot)
        self._capture.attach(slot)

    # Gradients --------------------------------------------------------------------------------------------------

    def accumulate(
        self,
        slots: list[Slot],
        grads: list[Tensor],
        first: list[bool],
        odd: Collection[Slot],
        scale: float,
        factor: Tensor | None = None,
    ) -> None:
        """Adds ``scale * factor`` times each gradient to its slot. One device, no slot twice.

        Args:
            slots, grads: the gradients, of any strides, layout and floating point dtype, possibly with a graph; no
                gradients where FSDP2 has added them to the accumulators by itself.
            first: whether the slot's parameter had no ``.grad``.
            odd: slots whose gradient is not plainly contiguous in the parameter's dtype, or whose parameter's ``.grad``
                is not ours.
            scale: 1/K of a window, or 1, times the weight of the micro-batch.
            factor: (1,) float64 on any device, the part of the scale that only a device knows; None for 1.
        """
        if odd or True in first:
            late = [slot for slot in slots if slot.arena is None]
            if late:
                self.make_room(late)
        arena = slots[0].arena
        assert arena is not None
        if not grads:
            sharded_capture.check_added(slots, scale, factor)
            for slot in slots:
                kept = arena.micro_partials_of(slot)
                if kept is not None:
                    kept.fill_(torch.inf)  # nobody has seen the micro-batch by itself: its statistics are not known
            return
        if factor is not None and factor.device != arena.device:
            factor = factor.to(arena.device, non_blocking=True)
        for i in reversed([i for i, slot in enumerate(slots) if slot in odd]) if odd else ():
            slot, grad = slots[i], grads[i]
            current = slot.held_grad()
            if current is not None and current is not slot.grad:
                self.adopt_grad(slot, current)
            dense = self._dense(slot, grad)
            if dense is None:
                arena.add_sparse(slot, grad, scale, factor)
                del slots[i], grads[i], first[i]
            else:
                grads[i] = dense
        arena.accumulate(slots, grads, first, scale, factor)

    @staticmethod
    def _dense(slot: Slot, grad: Tensor) -> Tensor | None:
        """The gradient in its slot's memory order and a dtype that kernels read; None if it is sparse."""
        validate.check_grad(slot.name, grad)
        if grad.is_sparse:
            return None
        return slot.in_order(grad if grad.dtype in validate.DTYPES else grad.to(torch.float32))

    def adopt_grad(self, slot: Slot, grad: Tensor) -> None:
        """A tensor that somebody else made ``.grad`` becomes the slot's contents, as it would count in torch."""
        validate.check_grad(slot.name, grad)
        if slot.arena is None:
            self.make_room([slot])
        assert slot.arena is not None
        part = dtensor.in_place_of(slot.name, grad, slot.param)
        slot.arena.own_write(slot, part.to_dense() if part.is_sparse else part)
        slot.param.grad = slot.grad

    def reattach(self, slot: Slot, grad: Tensor) -> None:
        """Makes ``.grad`` the accumulator again, after somebody else changed what it is."""
        if not self._capture.is_attached(slot):
            # There and back again (half() for an evaluation, then float()) leaves no other trace.
            self._check_holds_nothing(slot, "was converted to another dtype or device and back")
            slot.version = -1  # written to, perhaps; its memory may well be the old one again
            slot.param.grad = None
            self._hook_anew(slot, grad)
        elif grad is slot.grad and slot.arena is not None:
            # Module.to converts .grad in place, to memory of its own; the accumulator has the same values, and more.
            slot.keep_view(slot.arena.view_of(slot, slot.arena.acc))
            slot.param.grad = slot.grad
        else:
            self.adopt_grad(slot, grad)

    def make_room(self, late: Sequence[Slot]) -> None:
        """Places in an arena. The first gradient brings all parameters that will have one, so that it grows once. They
        come in the groups' order, whatever gradient was the first: it is not the same one on all ranks of a group."""
        wanted = set(late)
        by_device: dict[torch.device, list[Slot]] = {}
        for slot in self.slots.values():
            if slot.arena is None and (slot in wanted or slot.param.requires_grad):
                by_device.setdefault(slot.device, []).append(slot)
        for device, slots in by_device.items():
            self.arena_of(device).add(slots)

    def arena_of(self, device: torch.device) -> Arena:
        """The arena of a device, made at the first call. It knows of the open window what the others know."""
        arena = self.arenas.get(device)
        if arena is None:
            others = list(self.arenas.values())
            arena = self.arenas[device] = self._new_arena(device)
            if others:
                arena.window.copy_(others[0].window)
        return arena

    def some_arenas(self) -> list[Arena]:
        """All arenas; one, made for the purpose, where there is none yet."""
        if not self.arenas:
            params = (param for group in self._optimizer.param_groups for param in group["params"])
            first = next(params, None)
            self.arena_of(torch.device("cpu") if first is None else first.device)
        return list(self.arenas.values())

    def any_arena(self) -> Arena:
        """Some arena, for what is the same in all of them."""
        return self.some_arenas()[0]

    def holds_gradients(self) -> bool:
        """Whether any parameter has a ``.grad``."""
        return any(slot.held_grad() is not None for slot in self.slots.values())

    def any_sharded(self) -> Tensor | None:
        """A parameter that is a DTensor, if there is one."""
        slot = self._capture.any_sharded()
        return None if slot is None else slot.param

    def has_sharded(self) -> bool:
        """Whether any parameter is a DTensor."""
        return self.any_sharded() is not None

    # The end ----------------------------------------------------------------------------------------------------

    def _give_back(self, slot: Slot) -> None:
        self._capture.detach(slot)
        param = slot.param
        grad = param.grad
        param.grad = None
        param.grad_dtype = param.dtype
        if grad is not None:
            param.grad = grad.to(param.dtype) if grad is not slot.grad else grad.to(param.dtype, copy=True)
        self._give_back_state(slot)
        if slot.arena is not None:
            slot.arena.retire(slot)

    def _give_back_state(self, slot: Slot) -> None:
        """State in the dtypes that torch itself would have loaded it in: its Adam refuses fp32 averages of a 16-bit
        parameter. The master goes; the next wrapper would take it for newer than the parameter."""
        held = self._optimizer.state.get(slot.param)
        if not held:
            return
        held.pop("master_param", None)
        for name, value in held.items():
            if dtensor.is_dtensor(value) and not slot.is_sharded:
                held[name] = value = value.full_tensor()
            if name != "step" and isinstance(value, Tensor) and value.is_floating_point():
                held[name] = value.to(slot.param.dtype)
        rule, arena = self._rule, slot.arena
        if rule is None or rule.counts_steps or arena is None or rule.extra_name not in held:
            return
        if arena.steps[slot.index] == 0:
            held[rule.extra_name] = None  # torch's sign that no update has filled the buffer yet

    def _states_of(self, param: Tensor) -> list[Any]:
        return list(self._optimizer.state.get(param, {}).values())

    def remove(self) -> None:
        """Gives every parameter back to torch, with gradient and state in its own dtype."""
        self._capture.flush()
        with torch.no_grad():
            for slot in list(self.slots.values()):
                self._give_back(slot)
        self.slots.clear()
        self.arenas.clear()
        self._removed = True

    def __del__(self) -> None:
        # Slots and arenas know each other: without this their memory would wait for the garbage collector.
        for arena in self.arenas.values():
            arena.slots.clear()
