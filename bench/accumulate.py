"""The ways to add one micro-batch's gradients to what is there, and to begin a window with them.

Bytes an element, b those of a gradient's: adding reads it and reads and writes the accumulator, b + 8; beginning reads
it and writes the accumulator, b + 4. Everything more is passes over temporaries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import ceilings
from .measure import FP32, LESS, OURS, PEER, Provider
from .providers import (
    MAX_NORM,
    NAME,
    SCALE,
    SHORT,
    Delivery,
    Given,
    Makers,
    buffers_of,
    check_adds,
    check_present,
    our_backends,
)


def _dtypes(given: Given, acc: str = "fp32") -> str:
    return f"{SHORT[given.dtype]} -> {acc}"


class _Shared:
    """fp32 accumulators that torch's ways use in turn: a machine has no room for one set each."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self._tensors: list[Tensor] = []

    def zeroed(self) -> list[Tensor]:
        """The accumulators, which are made when first asked for."""
        if not self._tensors:
            self._tensors = self.given.zeros()
        for tensor in self._tensors:
            tensor.zero_()
        return self._tensors


# Ours ----------------------------------------------------------------------------------------------------------------


def _ours(given: Given, name: str, backend: str, first: bool) -> Provider:
    """The wrapper's capture, bucket and kernel, with the partials that give the norm."""
    check_present(backend, given)
    params = given.params()
    optimizer = given.wrapped(params, accumulation_steps=round(1 / SCALE), backend=backend)
    delivery = Delivery(given.grads, params)
    delivery.optimizer = optimizer  # the capture holds it weakly

    def prepare() -> None:
        if first:
            optimizer.zero_grad()
        delivery.prepare()

    provider = Provider(
        name,
        delivery.run,
        prepare,
        _dtypes(given),
        given.grad_bytes + (4 if first else 8),
        role=OURS if name == NAME else PEER,
        held=lambda: buffers_of(optimizer),
    )
    check_adds(provider, lambda: [p.grad for p in params], given.grads, times=1 if first else 3)
    # The partials give the norm; 1e-6: fp32 squares in lanes of at most 32 each, then fp64.
    expected = sum(float(p.grad.double().square().sum()) for p in params) ** 0.5
    got = float(optimizer.clip_grad_norm_(MAX_NORM))
    if abs(got - expected) > 1e-6 * expected:
        raise AssertionError(f"{name}: norm {got}, expected {expected}")
    return provider


# torch's, by hand ----------------------------------------------------------------------------------------------------


def _by_hand(
    name: str, shared: _Shared, run: Callable[[list[Tensor], list[Tensor]], object], n_bytes: int, **options: Any
) -> Provider:
    acc, given = shared.zeroed(), shared.given
    times = options.pop("times", 3)
    provider = Provider(
        name,
        lambda: run(acc, given.grads),
        dtypes=_dtypes(given),
        bytes_an_element=n_bytes,
        held=lambda: acc,
        **options,
    )
    return check_adds(provider, lambda: acc, given.grads, times=times)


def _naive(acc: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """What people write: two fp32 temporaries a 16-bit parameter."""
    for a, g in zip(acc, grads, strict=True):
        a += g.float() * SCALE


def _naive_first(acc: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    for a in acc:
        a.zero_()
    _naive(acc, grads)


def _foreach(acc: list[Tensor], grads: list[Tensor]) -> None:
    torch._foreach_add_(acc, grads, alpha=SCALE)


def _foreach_first(acc: list[Tensor], grads: list[Tensor]) -> None:
    torch._foreach_zero_(acc)
    torch._foreach_add_(acc, grads, alpha=SCALE)


def _copy_first(acc: list[Tensor], grads: list[Tensor]) -> None:
    torch._foreach_copy_(acc, grads)
    torch._foreach_mul_(acc, SCALE)


def compiled_loop(scale: float, first: bool = False) -> Callable[[list[Tensor], list[Tensor]], object]:
    """The naive loop under ``torch.compile``; keeps no norm."""

    @torch.compile(dynamic=False)
    def loop(acc: list[Tensor], grads: list[Tensor]) -> None:
        for a, g in zip(acc, grads, strict=True):
            if first:
                a.copy_(g.float() * scale)
            else:
                a += g.float() * scale

    return loop


# torch's, by autograd ------------------------------------------------------------------------------------------------


def _by_autograd(name: str, given: Given, grad_dtype: torch.dtype, n_bytes: int, first: bool) -> Provider:
    """Autograd's own accumulation. Scaling is the loss's business here, and free."""
    params = given.params()
    for param in params:
        param.grad_dtype = grad_dtype
        # Where there is no .grad torch would make the prepared gradient the accumulator.
        param.grad = torch.zeros_like(param, dtype=grad_dtype)
    delivery = Delivery(given.grads, params)

    def prepare() -> None:
        if first:
            for param in params:
                param.grad = None
        delivery.prepare()

    provider = Provider(
        name,
        delivery.run,
        prepare,
        _dtypes(given, SHORT[grad_dtype]),
        n_bytes,
        precision=FP32 if grad_dtype == torch.float32 else LESS,
        held=lambda: [param.grad for param in params if param.grad is not None],
    )
    return check_adds(provider, lambda: [p.grad for p in params], given.grads, 1.0, times=1 if first else 3)


# The cases -----------------------------------------------------------------------------------------------------------


def steady(given: Given) -> Makers:
    """Providers of a later micro-batch."""
    b, is_16_bit, shared = given.grad_bytes, given.dtype != torch.float32, _Shared(given)
    makers: Makers = {
        name: partial(_ours, given, name, backend, False)
        for name, backend in our_backends(given.device).items()
        if given.wide or name == NAME
    }
    # Naive: the cast reads b and writes 4, the product reads and writes 4, the sum reads 8 and writes 4.
    makers["naive fp32"] = partial(_by_hand, "naive fp32", shared, _naive, b + 24 if is_16_bit else 20)
    makers["foreach"] = partial(_by_hand, "foreach", shared, _foreach, b + 8)
    makers["compiled"] = lambda: _by_hand("compiled", shared, compiled_loop(SCALE), b + 8, compiled=True)
    if is_16_bit:
        # A cast that reads b and writes 4, then an add.
        makers["grad_dtype"] = partial(_by_autograd, "grad_dtype", given, torch.float32, b + 16, False)
        name = f"native {SHORT[given.dtype]}"
        makers[name] = partial(_by_autograd, name, given, given.dtype, 6, False)
    else:
        makers["autograd fp32"] = partial(_by_autograd, "autograd fp32", given, torch.float32, 12, False)
    return {**makers, **ceilings.accumulate(given)}


def first(given: Given) -> Makers:
    """Providers of a window's first micro-batch. Autograd's own 16-bit way only keeps a pointer to the gradient, and
    moves nothing."""
    b, is_16_bit, shared = given.grad_bytes, given.dtype != torch.float32, _Shared(given)
    makers: Makers = {
        name: partial(_ours, given, name, backend, True)
        for name, backend in our_backends(given.device).items()
        if given.wide or name == NAME
    }
    makers["zero, naive fp32"] = partial(
        _by_hand, "zero, naive fp32", shared, _naive_first, b + 28 if is_16_bit else 24, times=1
    )
    makers["zero, foreach"] = partial(_by_hand, "zero, foreach", shared, _foreach_first, b + 12, times=1)
    makers["copy, scale"] = partial(_by_hand, "copy, scale", shared, _copy_first, b + 12, times=1)
    makers["compiled"] = lambda: _by_hand(
        "compiled", shared, compiled_loop(SCALE, first=True), b + 4, compiled=True, times=1
    )
    if is_16_bit:
        makers["grad_dtype"] = partial(_by_autograd, "grad_dtype", given, torch.float32, b + 4, True)
    return {**makers, **ceilings.first(given)}
