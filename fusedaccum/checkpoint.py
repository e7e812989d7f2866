"""state_dict in the plain torch optimizer's format, both ways, with fp32 state kept fp32."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .arena import Arena
from .boundary import Boundary
from .registry import Registry
from .slot import Slot

if TYPE_CHECKING:
    from .optimizer import FusedAccumOptimizer

_PARAM_SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master_param")


def without_unused_momentum(
    state_dict: dict[str, Any], groups: list[dict[str, Any]], registry: Registry, boundary: Boundary
) -> dict[str, Any]:
    """Momentum buffers that no update has filled yet (their first one was skipped) as None, torch's sign for that."""
    counts = {arena: arena.steps.tolist() for arena in registry.arenas.values()}
    slots = boundary.state_slots()
    state = dict(state_dict["state"])
    for i, param in enumerate(chain.from_iterable(group["params"] for group in groups)):
        slot, whole = slots.get(param), registry.slots.get(param)
        if slot is None or whole is None or whole.arena is None or i not in state:
            continue
        buffer = slot.state.get("momentum_buffer")
        if buffer is not None and state[i].get("momentum_buffer") is buffer and counts[whole.arena][slot.index] == 0:
            state[i] = {**state[i], "momentum_buffer": None}
    return {**state_dict, "state": state}


def load(optimizer: FusedAccumOptimizer, registry: Registry, boundary: Boundary, state_dict: dict[str, Any]) -> None:
    """``Optimizer.load_state_dict``, but that floating point state becomes fp32, not the parameter's dtype."""
    state_dict = state_dict.copy()
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        result = pre_hook(optimizer, state_dict)
        if result is not None:
            state_dict = result
    groups = optimizer.param_groups
    saved_groups = deepcopy(state_dict["param_groups"])
    _check_groups(groups, saved_groups)
    params: dict[Any, Tensor] = dict(
        zip(
            chain.from_iterable(group["params"] for group in saved_groups),
            chain.from_iterable(group["params"] for group in groups),
            strict=True,
        )
    )
    registry.adopt_new_groups(optimizer._window.scale)
    state: defaultdict[Any, Any] = defaultdict(dict)
    for key, held in state_dict["state"].items():
        if key in params:
            slot = registry.slots[params[key]]
            for name, value in held.items():
                boundary.check_value(slot, name, value)
            state[params[key]] = {name: _checked(slot, name, value) for name, value in held.items()}
        else:
            state[key] = held

    for group, saved in zip(groups, saved_groups, strict=True):
        kept: dict[str, Any] = {name: group[name] for name in ("params", "param_names") if name in group}
        if "param_names" in saved:
            kept.pop("param_names", None)
        saved.pop("params")
        # In place: schedulers and the wrapped optimizer hold these very dicts.
        for name in set(group) - set(saved) - set(kept):
            del group[name]
        group.update({**saved, **kept})
    _hand_over(optimizer.inner, state)
    _take_over(registry, boundary, state)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _hand_over(inner: torch.optim.Optimizer, state: defaultdict[Any, Any]) -> None:
    """Gives the wrapped optimizer its state as torch does, through ``__setstate__``: it completes what an older torch
    saved (options that did not exist, counts that were numbers), and looks for its own names in whatever entry there
    is. Of masters it knows nothing."""
    masters = {
        param: held.pop("master_param")
        for param, held in state.items()
        if isinstance(held, dict) and "master_param" in held
    }
    inner.__setstate__({"state": state, "param_groups": inner.param_groups})
    for param, master in masters.items():
        state[param]["master_param"] = master


def _check_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    if len(groups) != len(saved):
        raise ValueError(
            "loaded state dict has a different number of parameter groups: "
            f"it has {len(saved)}, the optimizer {len(groups)}"
        )
    for i, (group, saved_group) in enumerate(zip(groups, saved, strict=True)):
        if len(group["params"]) != len(saved_group["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
                f"param_groups[{i}] has {len(saved_group['params'])} there and {len(group['params'])} here"
            )


def _checked(slot: Slot, name: str, value: Any) -> Any:
    """The value on the parameter's device, fp32 if it is floating point and not a count of its own dtype."""
    if not isinstance(value, Tensor):
        return value
    if name in _PARAM_SHAPED and value.shape != slot.param.shape:
        raise ValueError(
            f"loaded state dict has {name} of shape {tuple(value.shape)} for {slot.name}; "
            f"accepted: {tuple(slot.param.shape)}"
        )
    if name == "step":
        return value
    dtype = torch.float32 if value.is_floating_point() else value.dtype
    return value.to(device=slot.param.device, dtype=dtype)


def _take_over(registry: Registry, boundary: Boundary, state: dict[Any, Any]) -> None:
    """Copies loaded state into the arenas at once, so that it does not alias another optimizer's."""
    homeless = [slot for param, slot in registry.slots.items() if state.get(param) and slot.arena is None]
    if homeless:
        registry.make_room(homeless)
    by_arena: dict[Arena, list[Slot]] = {}
    for param, slot in boundary.state_slots().items():
        if state.get(param):
            assert slot.arena is not None
            by_arena.setdefault(slot.arena, []).append(slot)
        elif slot.has_state:
            slot.forget_state()
    for arena, slots in by_arena.items():
        boundary.adopt_state(arena, slots)
