"""What the host does for 1,000 parameters of 16 elements, where the memory costs nothing."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .boundary import providers as boundary_providers
from .measure import LESS, OURS, PEER, Provider
from .providers import LR, NAME, SCALE, SHORT, WEIGHT_DECAY, Given, Makers, buffers_of


class _ManySmall:
    """A loss over many small parameters, each used once: ``prepare`` builds the graph, ``run`` is its backward."""

    def __init__(self, given: Given) -> None:
        self.params = given.params()
        self._factor = torch.full(given.shapes[0], 0.5, dtype=given.dtype, device=given.device)

    def prepare(self) -> None:
        self._loss = torch.stack([param * self._factor for param in self.params]).sum()

    def run(self) -> None:
        self._loss.backward()

    def check(self, name: str, expected: float) -> None:
        """After two runs."""
        for _ in range(2):
            self.prepare()
            self.run()
        if not all(torch.equal(p.grad, torch.full_like(p.grad, expected)) for p in self.params):
            raise AssertionError(f"{name}: wrong gradients")

    def grads(self) -> list[Tensor]:
        """What autograd has accumulated."""
        return [param.grad for param in self.params]


def _backward_ours(given: Given, collect_garbage: bool) -> Provider:
    model = _ManySmall(given)
    optimizer = given.wrapped(model.params, accumulation_steps=round(1 / SCALE))
    model.check(NAME, 2 * 0.5 * SCALE)
    return Provider(
        NAME,
        model.run,
        model.prepare,
        f"{SHORT[given.dtype]} -> fp32",
        collect_garbage=collect_garbage,
        role=OURS,
        held=lambda: buffers_of(optimizer),
    )


def _backward_torch(name: str, given: Given, grad_dtype: torch.dtype, collect_garbage: bool) -> Provider:
    """Plain autograd."""
    model = _ManySmall(given)
    for param in model.params:
        param.grad_dtype = grad_dtype
    model.check(name, 2 * 0.5)
    return Provider(
        name,
        model.run,
        model.prepare,
        f"{SHORT[given.dtype]} -> {SHORT[grad_dtype]}",
        collect_garbage=collect_garbage,
        precision="fp32" if grad_dtype == torch.float32 else LESS,
        held=model.grads,
    )


def backward(given: Given, collect_garbage: bool) -> Makers:
    """Providers of a backward in the steady state."""
    native = f"native {SHORT[given.dtype]}"
    return {
        NAME: partial(_backward_ours, given, collect_garbage),
        "grad_dtype": partial(_backward_torch, "grad_dtype", given, torch.float32, collect_garbage),
        native: partial(_backward_torch, native, given, given.dtype, collect_garbage),
    }


def _step_only(name: str, given: Given) -> Provider:
    """Only the step of torch's fused AdamW on fp32 parameters: no clip, no masters."""
    params = given.params(torch.float32)
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    for param, grad in zip(params, given.grads, strict=True):
        param.grad = grad.float()
    optimizer.step()
    # Without the clip each element moves by lr against its gradient's sign.
    for param, before in zip(params, given.params(torch.float32), strict=True):
        moved = param.detach() - before.detach() * (1 - LR * WEIGHT_DECAY)
        if not torch.allclose(moved, -LR * param.grad.sign(), atol=1e-6):
            raise AssertionError(f"{name}: wrong step")
    return Provider(name, optimizer.step, dtypes="fp32", role=PEER)


def step(given: Given) -> Makers:
    """Providers of a boundary, and the least that anybody can ask of one: torch's fused step alone."""
    makers = {name: make for name, make in boundary_providers(given).items() if not name.startswith("probe")}

    def without_bytes(make: partial[Provider]) -> Provider:
        provider = make()
        provider.bytes_an_element = 0
        return provider

    alone = "torch fused, step alone"
    host = {name: partial(without_bytes, make) for name, make in makers.items()}
    return {**host, alone: partial(_step_only, alone, given)}
