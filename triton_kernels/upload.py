"""Entries on their way to the device: asynchronous, fit for a CUDA graph, and only once where they stay the same."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from .plan import Place, Plan

RESERVE_WORDS = 2**18
"""Of page-locked memory for graphs, 2 MiB: 87,000 tensors' worth between two calls outside of a capture."""
MAX_PLANS = 64

_reserves: dict[str, Tensor] = {}
_captured: list[Tensor] = []
_plans: OrderedDict[object, tuple[Tensor, int, int]] = OrderedDict()


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _page_locked(n_words: int) -> Tensor:
    return torch.empty(n_words, dtype=torch.int64, pin_memory=True)


def uploaded(words: array[int], device: torch.device) -> Tensor:
    """``words`` as an int64 tensor on ``device``, in the order of its current stream."""
    host = torch.frombuffer(words, dtype=torch.int64)
    if device.type == "cpu":  # Triton's interpreter
        return host
    if _is_capturing(device):
        # Each replay copies again from the memory that the graph has recorded, so it is never used for anything else;
        # and none can be locked while a graph is recorded, so it was reserved before.
        reserve = _reserves.get(device.type, host[:0])
        if reserve.numel() < host.numel():
            raise RuntimeError(
                f"a CUDA graph needs {host.numel()} words of page-locked memory for addresses, and {reserve.numel()} "
                "are left; run the window once outside of the capture first, or capture fewer windows at once"
            )
        pinned, _reserves[device.type] = reserve[: host.numel()], reserve[host.numel() :]
        pinned.copy_(host)
        _captured.append(pinned)
        return pinned.to(device, non_blocking=True)
    if device.type not in _reserves or _reserves[device.type].numel() < RESERVE_WORDS // 2:
        _reserves[device.type] = _page_locked(RESERVE_WORDS)
    # Fresh memory for each call: torch's allocator of page-locked memory hands it out again only when an event says
    # that the copy is done.
    pinned = _page_locked(host.numel())
    pinned.copy_(host)
    return pinned.to(device, non_blocking=True)


def uploaded_once(tensors: Sequence[Place], slots: Sequence[int], device: torch.device) -> tuple[Tensor, int, int]:
    """(entries, how many, programs) of parameters in ``slots``: kept, and made anew when an address, a size, a dtype or
    the choice of slots is another.
    """
    key = (device, tuple(slots), tuple(tensors))
    found = _plans.get(key)
    capturing = _is_capturing(device)
    if found is None:
        plan = Plan(tensors, slots)
        if not plan.n_programs:
            return torch.empty(0, dtype=torch.int64), 0, 0
        found = (uploaded(plan.words, device), plan.n_entries, plan.n_programs)
        if capturing:  # it has no contents before the graph's first replay
            return found
        _plans[key] = found
        if len(_plans) > MAX_PLANS:
            _plans.popitem(last=False)
    else:
        _plans.move_to_end(key)
    if capturing:
        _captured.append(found[0])  # a graph goes on reading it
    return found
