"""Providers that move an op's least possible traffic and compute nothing. The fastest of a case is its ceiling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from . import probe
from .measure import PROBE, Provider
from .providers import SHORT, AbsentError, Given, Makers

Ways = dict[str, Callable[[], object]]


def least_bytes(op: str, given: Given) -> int:
    """Bytes an element that ``op`` cannot do without; of a window, all of its micro-batches and the boundary."""
    add, begin = given.grad_bytes + 8, given.grad_bytes + 4
    n_states = 2 if given.rule == "AdamW" else 1
    # The accumulator is read, master and states are read and written, a 16-bit parameter is written.
    update = 4 + 8 * (1 + n_states) + (2 if given.dtype != torch.float32 else 0)
    if op == "accumulate":
        return add
    if op == "first":
        return begin
    return update if op == "boundary" else begin + add * (given.micro_batches - 1) + update


def _provider(name: str, given: Given, run: Callable[[], object], n_bytes: int) -> Provider:
    return Provider(name, run, dtypes=SHORT[given.dtype], bytes_an_element=n_bytes, role=PROBE)


def _copy(name: str, given: Given, n_bytes: int) -> Provider:
    """A copy on the device that moves as much, half of it read, half written. Random bytes, as real data."""
    make = partial(torch.randint, 0, 256, (n_bytes * given.n // 2,), dtype=torch.uint8, device=given.device)
    to, source = make(), make()
    return _provider(name, given, lambda: to.copy_(source), n_bytes)


class _Buffers:
    """What the probes of one case share, made when first used."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self._made: dict[str, Tensor] = {}

    def get(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A flat buffer of ones, or the gradients in one piece."""
        if name not in self._made:
            grads = self.given.grads
            if name != "grad":
                self._made[name] = torch.ones(self.given.n, dtype=dtype)
            else:
                self._made[name] = (
                    grads[0].reshape(-1) if len(grads) == 1 else torch.cat([g.reshape(-1) for g in grads])
                )
        return self._made[name]

    def bits(self) -> Tensor:
        """Of the gradients, as int32."""
        grad = self.get("grad")
        return grad.view(torch.int32) if grad.element_size() == 4 else grad.view(torch.int16).int() & 0xFFFF

    def add(self) -> None:
        probe.add(self.get("acc"), self.get("grad"))

    def store(self, streaming: bool) -> None:
        probe.store(self.get("acc"), self.get("grad"), streaming)

    def update(self, streaming: bool) -> None:
        names = ("master", "first", "second") if self.given.rule == "AdamW" else ("master", "first")
        param = self.get("param", torch.bfloat16) if self.given.dtype != torch.float32 else None
        probe.update(param, [self.get(name) for name in names], self.get("acc"), streaming)


def _check(name: str, got: Tensor, expected: Tensor) -> None:
    if not torch.equal(got, expected):
        raise AssertionError(f"{name}: wrong bits")


def _on_cpu(given: Given, make: Callable[[], Provider]) -> Provider:
    try:
        probe.library()
    except RuntimeError as error:
        raise AbsentError(str(error)) from None
    return make()


def _makers(op: str, given: Given, builders: dict[str, Callable[[str], Provider]]) -> Makers:
    if given.device.type != "cpu":
        return {"device copy": partial(_copy, "device copy", given, least_bytes(op, given))}
    return {name: partial(_on_cpu, given, partial(build, name)) for name, build in builders.items()}


def accumulate(given: Given) -> Makers:
    """Of a later micro-batch."""
    buffers = _Buffers(given)

    def build(name: str) -> Provider:
        buffers.get("acc").zero_()
        buffers.add()
        _check(name, buffers.get("acc").view(torch.int32), buffers.bits())
        return _provider(name, given, buffers.add, least_bytes("accumulate", given))

    return _makers("accumulate", given, {"probe": build})


def first(given: Given) -> Makers:
    """Of a first micro-batch: by way of the caches, and past them."""
    buffers = _Buffers(given)

    def build(streaming: bool, name: str) -> Provider:
        buffers.get("acc").zero_()
        buffers.store(streaming)
        _check(name, buffers.get("acc").view(torch.int32), buffers.bits())
        return _provider(name, given, partial(buffers.store, streaming), least_bytes("first", given))

    return _makers("first", given, {"probe": partial(build, False), "probe, streaming": partial(build, True)})


def boundary(given: Given) -> Makers:
    """Of a boundary; the norm is known."""
    buffers = _Buffers(given)

    def build(streaming: bool, name: str) -> Provider:
        buffers.get("master").zero_()
        buffers.update(streaming)
        _check(name, buffers.get("master"), torch.ones(given.n))
        return _provider(name, given, partial(buffers.update, streaming), least_bytes("boundary", given))

    return _makers("boundary", given, {"probe": partial(build, False), "probe, streaming": partial(build, True)})


def window(given: Given) -> Makers:
    """Of a whole window: a first micro-batch, later ones, a boundary."""
    buffers = _Buffers(given)

    def run(streaming: bool) -> None:
        buffers.store(streaming)
        for _ in range(given.micro_batches - 1):
            buffers.add()
        buffers.update(streaming)

    def build(streaming: bool, name: str) -> Provider:
        run(streaming)  # each of its parts is checked above, in the cases that it is the ceiling of
        return _provider(name, given, partial(run, streaming), least_bytes("window", given))

    return _makers("window", given, {"probe": partial(build, False), "probe, streaming": partial(build, True)})
