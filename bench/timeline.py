"""Bytes that torch holds over one window, ours against what people write.

The model stands for any: parameters in bfloat16 of given shapes, whose backward makes each gradient anew, as a layer's
does, and nothing else. Parameters are not counted, activations are none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from .counts import Make
from .memory import allocations
from .providers import MAX_NORM, NAME, SCALE, Given

FILE = "memory.csv"
MICRO_BATCHES = round(1 / SCALE)
MAX_POINTS = 400


@dataclass(frozen=True)
class Point:
    """``n_bytes``: held at the ``time_ms`` of the window, in which the ways ran one after the other."""

    provider: str
    time_ms: float
    n_bytes: int
    device: str
    versions: str
    commit: str
    date: str


class _Ours:
    def __init__(self, given: Given, params: list[Parameter]) -> None:
        self._optimizer = given.wrapped(params, accumulation_steps=MICRO_BATCHES)

    def micro_batch(self, loss: Tensor) -> None:
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def boundary(self) -> None:
        """Was the last ``step``."""


class _Naive:
    """fp32 sums by hand, clip, AdamW on masters, copy."""

    def __init__(self, given: Given, params: list[Parameter]) -> None:
        self._params = params
        self._masters = [Parameter(param.detach().float()) for param in params]
        self._accs = given.zeros()
        self._optimizer = given.optimizer(self._masters, fused=True)

    def micro_batch(self, loss: Tensor) -> None:
        loss.backward()
        for acc, param in zip(self._accs, self._params, strict=True):
            acc += param.grad.float() * SCALE
            param.grad = None

    def boundary(self) -> None:
        for master, acc in zip(self._masters, self._accs, strict=True):
            master.grad = acc
        torch.nn.utils.clip_grad_norm_(self._masters, MAX_NORM)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._params, self._masters)
        torch._foreach_zero_(self._accs)


class _Native:
    """All in bf16."""

    def __init__(self, given: Given, params: list[Parameter]) -> None:
        self._params = params
        self._optimizer = given.optimizer(params, fused=True)

    def micro_batch(self, loss: Tensor) -> None:
        (loss * SCALE).backward()

    def boundary(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._params, MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()


WAYS: dict[str, Callable[[Given, list[Parameter]], _Ours | _Naive | _Native]] = {
    NAME: _Ours,
    "naive fp32": _Naive,
    "native bf16": _Native,
}


def _window(way: _Ours | _Naive | _Native, params: list[Parameter]) -> None:
    for _ in range(MICRO_BATCHES):
        loss = torch.zeros(())
        for param in params:
            loss = Make.apply(loss, param)
        way.micro_batch(loss)
        del loss
    way.boundary()


def _held_and_timeline(given: Given, name: str) -> list[tuple[float, int]]:
    """(milliseconds, bytes) of the second window; the first makes the states."""
    params = given.params()
    kept: list[_Ours | _Naive | _Native] = []

    def begin() -> None:
        kept.append(WAYS[name](given, params))
        _window(kept[0], params)

    held = sum(n_bytes for _, n_bytes in allocations(begin))
    events = allocations(lambda: _window(kept[0], params))
    timeline = [(0.0, held)]
    for time_ns, n_bytes in events:
        held += n_bytes
        timeline.append(((time_ns - events[0][0]) / 1e6, held))
    return timeline


def _thinned(timeline: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """The lowest and highest points of each of ``MAX_POINTS / 2`` stretches, in order."""
    n_stretches = MAX_POINTS // 2
    end = timeline[-1][0]
    stretches: dict[int, list[tuple[float, int]]] = {}
    for point in timeline:
        stretches.setdefault(min(n_stretches - 1, int(point[0] / max(end, 1e-9) * n_stretches)), []).append(point)
    kept = []
    for points in stretches.values():
        kept += sorted({min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])})
    return [timeline[0], *kept, timeline[-1]]


def measure(where: Mapping[str, str], progress: Callable[[float], object], given: Given) -> list[Point]:
    """The points of all ways."""
    points = []
    for done, name in enumerate(WAYS):
        for time_ms, n_bytes in _thinned(_held_and_timeline(given, name)):
            points.append(Point(name, time_ms, n_bytes, **where))
        progress((done + 1) / len(WAYS))
    return points
