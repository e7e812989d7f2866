"""The open window in a checkpoint: what is accumulated, how far the window is, loss scale and statistics."""

from __future__ import annotations

import sys
import warnings
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from .dtensor import check_loaded, mesh_of
from .registry import Registry
from .window import Window

KEY = "fusedaccum"
"""Where ``state_dict`` has it, beside torch's "state" and "param_groups"."""
_VERSION = 1


def save(groups: list[dict[str, Any]], registry: Registry, window: Window) -> dict[str, Any]:
    """Numbers, strings and tensors only, so that it loads with ``weights_only=True``. Parameters go by their place in
    the groups, as in torch. The tensors are live ones."""
    held: dict[str, Any] = {"version": _VERSION, "window": registry.any_arena().window, "open": None}
    if window.is_open:
        _warn_if_it_will_be_dropped(window)
        grads: dict[int, Tensor] = {}
        micro: dict[int, Tensor] = {}
        for i, param in enumerate(chain.from_iterable(group["params"] for group in groups)):
            if param.grad is not None:
                slot = registry.slots.get(param)
                # A DTensor that detach() returns cannot be deep-copied where its local tensor begins inside a buffer.
                grads[i] = param.grad if slot is not None and slot.is_sharded else param.grad.detach()
                kept = None if slot is None or slot.arena is None else slot.arena.micro_partials_of(slot)
                if kept is not None:
                    micro[i] = kept
        rank, n_ranks = window.place
        held["open"] = {**window.state(), "rank": rank, "n_ranks": n_ranks, "grads": grads, "micro_partials": micro}
    return held


def _warn_if_it_will_be_dropped(window: Window) -> None:
    """``torch.distributed.checkpoint.state_dict`` asks for the whole state_dict and keeps what torch knows of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            warnings.warn(window.describe("is not part of what torch.distributed.checkpoint saves"), stacklevel=2)
            return
        frame = frame.f_back


def check(state_dict: dict[str, Any], groups: list[dict[str, Any]], window: Window, open_window: str) -> None:
    """Raises ValueError for an open window that cannot go on here; changes nothing."""
    if open_window not in ("restore", "drop"):
        raise ValueError(f"open_window is {open_window!r}; accepted: 'restore', 'drop'")
    held = state_dict.get(KEY)
    if held is None:
        return
    if held["version"] != _VERSION:
        raise ValueError(
            f"loaded state dict has a window of version {held['version']}; accepted: {_VERSION}. It was saved by "
            "another version of fusedaccum"
        )
    saved = held["open"]
    if saved is None or open_window == "drop":
        return
    if saved["accumulation_steps"] != window.accumulation_steps:
        raise ValueError(
            f"loaded state dict has an open window of accumulation_steps={saved['accumulation_steps']} (micro-batch "
            f"{saved['position']}), the optimizer has accumulation_steps={window.accumulation_steps}; accepted: the "
            "same. load_state_dict(..., open_window='drop') begins a new window"
        )
    place = (saved.get("rank", 0), saved.get("n_ranks", 1))
    if place != window.place:
        raise ValueError(
            f"loaded state dict has the open window of rank {place[0]} of {place[1]}, this is rank {window.place[0]} "
            f"of {window.place[1]}; accepted: each rank's own, as every rank has micro-batches of its own. "
            "load_state_dict(..., open_window='drop') begins a new window"
        )
    params = list(chain.from_iterable(group["params"] for group in groups))
    for i, grad in saved["grads"].items():
        if i >= len(params) or grad.shape != params[i].shape:
            found = "no such parameter" if i >= len(params) else f"a parameter of shape {tuple(params[i].shape)}"
            raise ValueError(
                f"loaded state dict has an accumulated gradient of shape {tuple(grad.shape)} for parameter {i}; found: "
                f"{found}"
            )
        check_loaded(f"an accumulated gradient of parameter {i}", grad, mesh_of(params[i]))


def load(
    groups: list[dict[str, Any]], registry: Registry, window: Window, state_dict: dict[str, Any], restore: bool
) -> None:
    """Takes over what ``check`` has accepted. A plain torch optimizer's checkpoint leaves the open window alone."""
    held = state_dict.get(KEY)
    if held is None:
        return
    saved = held["open"] if restore else None
    params = list(chain.from_iterable(group["params"] for group in groups))
    # Copies: a state_dict of this very optimizer holds what is about to be overwritten.
    grads, micro = {}, {}
    if saved is not None:
        grads = {i: grad.detach().to(torch.float32, copy=True) for i, grad in saved["grads"].items()}
        micro = {i: kept.clone() for i, kept in saved["micro_partials"].items()}
    if saved is not None or window.position > 0:
        if saved is None:
            window.warn_if_open("was dropped by load_state_dict")
        window.close()
        for param in params:
            param.grad = None
    window.start_afresh()
    for arena in registry.some_arenas():
        arena.window.copy_(held["window"])
        if saved is None:
            arena.drop_weights()
    if saved is None:
        return
    for i, grad in grads.items():
        slot = registry.slots[params[i]]
        registry.adopt_grad(slot, grad.to(slot.param.device))
        if i in micro and slot.arena is not None:
            kept = slot.arena.micro_partials_of(slot)
            if kept is not None:
                kept.copy_(micro[i])
    window.load(saved)
