"""What the providers of all ops share: what they are given, delivery of gradients by autograd, and checks.

Gradients are values of bfloat16 and the scale is a power of two, so that three additions are exact in fp32 and rounded
once in 16 bits: results are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import fusedaccum.backends
from fusedaccum import FusedAccumOptimizer

from . import shapes as model_shapes
from .measure import Provider
from .shapes import Shape, n_elems

SCALE = 0.25
LR, WEIGHT_DECAY, MOMENTUM, MAX_NORM = 1e-3, 0.1, 0.9, 1.0
EPS, BETAS = 1e-8, (0.9, 0.999)
NAME = "fusedaccum"
CPU = torch.device("cpu")
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class AbsentError(Exception):
    """A provider that cannot take part, and why."""


Makers = dict[str, Callable[[], Provider]]
"""Name -> builds and checks a provider."""


@dataclass(frozen=True)
class Given:
    """What the providers of a case work on.

    Attributes:
        dtype: of parameters and gradients.
        n_groups: param_groups of an optimizer, of equal numbers of parameters.
        rule: "AdamW" or "SGD" (with momentum).
        clips: whether a boundary clips the norm.
        wide: whether the slow providers take part too.
    """

    shapes: Sequence[Shape]
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = CPU
    n_groups: int = 1
    rule: str = "AdamW"
    clips: bool = True
    micro_batches: int = 1
    wide: bool = False

    @property
    def n(self) -> int:
        return n_elems(self.shapes)

    @property
    def grad_bytes(self) -> int:
        return self.dtype.itemsize

    @cached_property
    def grads(self) -> list[Tensor]:
        """One micro-batch's gradients. Nobody writes to them."""
        return [grad.to(self.device) for grad in model_shapes.gradients(self.shapes, self.dtype)]

    def params(self, dtype: torch.dtype | None = None) -> list[Parameter]:
        """New parameters, the same values at every call."""
        made = model_shapes.parameters(self.shapes, dtype or self.dtype)
        return made if self.device.type == "cpu" else [Parameter(param.detach().to(self.device)) for param in made]

    def optimizer(self, params: Sequence[Tensor], **options: Any) -> torch.optim.Optimizer:
        """torch's, of the case's rule."""
        size = -(-len(params) // self.n_groups)
        groups = [{"params": list(params[i : i + size])} for i in range(0, len(params), size)]
        if self.rule == "AdamW":
            return torch.optim.AdamW(groups, lr=LR, weight_decay=WEIGHT_DECAY, eps=EPS, betas=BETAS, **options)
        return torch.optim.SGD(groups, lr=LR, weight_decay=WEIGHT_DECAY, momentum=MOMENTUM, **options)

    def wrapped(self, params: Sequence[Tensor], **options: Any) -> FusedAccumOptimizer:
        """Ours around it."""
        max_norm = MAX_NORM if self.clips else None
        return FusedAccumOptimizer(self.optimizer(params), max_grad_norm=max_norm, **options)

    def zeros(self) -> list[Tensor]:
        """fp32 accumulators."""
        return [torch.zeros(shape, device=self.device) for shape in self.shapes]


class _Deliver(torch.autograd.Function):
    """Hands prepared gradients to autograd: a backward that costs nothing but what becomes of its gradients."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *params: Parameter) -> Tensor:
        ctx.grads = grads
        return torch.zeros((), device=grads[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        # A gradient that somebody keeps may be written to, so the capture adds it at once, outside of any bucket.
        grads, ctx.grads = ctx.grads, None
        return (None, *grads)


class Delivery:
    """``prepare`` builds the graph, ``run`` is its backward."""

    def __init__(self, grads: list[Tensor], params: list[Parameter]) -> None:
        self._grads, self._params = grads, params

    def loss(self) -> Tensor:
        """A new graph, whose backward delivers the gradients."""
        # New tensors over the same memory, which only the engine will hold.
        return _Deliver.apply([grad.detach() for grad in self._grads], *self._params)

    def prepare(self) -> None:
        self._loss = self.loss()

    def run(self) -> None:
        self._loss.backward()


# Ours ----------------------------------------------------------------------------------------------------------------


def our_backends(device: torch.device) -> dict[str, str]:
    """Names of providers -> backends of ours; the one that ``auto`` chooses comes first, under the library's name."""
    chosen = fusedaccum.backends.choose(device).name
    others = [name for name in fusedaccum.backends.NAMES if name != chosen]
    return {NAME: chosen, **{f"{NAME}[{name}]": name for name in others}}


def check_present(backend: str, given: Given) -> None:
    """Raises ``AbsentError`` where a backend of ours does not take part."""
    reason = fusedaccum.backends.why_not(backend, given.device)
    if reason is not None:
        raise AbsentError(reason)


def buffers_of(optimizer: FusedAccumOptimizer) -> Iterable[Tensor]:
    """All that the wrapper keeps."""
    for arena in optimizer._registry.arenas.values():
        yield from (value for value in vars(arena).values() if isinstance(value, Tensor) and value.numel())
        yield from arena.states.values()


def states_of(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """All that a torch optimizer keeps."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.numel())


# Checks --------------------------------------------------------------------------------------------------------------


def check_adds(
    provider: Provider,
    result: Callable[[], Sequence[Tensor]],
    grads: list[Tensor],
    scale: float = SCALE,
    times: int = 3,
) -> Provider:
    """Runs the provider, fresh, three times; ``result`` must then give ``times`` times the scaled gradients."""
    for _ in range(3):
        provider.prepare()
        provider.run()
    for i, (got, grad) in enumerate(zip(result(), grads, strict=True)):
        expected = (grad.float() * (times * scale)).to(got.dtype)
        if not torch.equal(got, expected):
            raise AssertionError(f"{provider.name}: gradient {i} is wrong after three micro-batches")
    return provider


def check_first_step(
    name: str, given: Given, params: Sequence[Tensor], masters: Sequence[Tensor] | None, tolerance: float, eps: float
) -> None:
    """The first update from zero states against fp64, on the head of every parameter.

    AdamW moves by ``lr * g / (|g| + eps)``, SGD by ``lr * (g + weight_decay * p)``, g clipped.

    Args:
        masters: None where the parameters are what is updated; ``tolerance`` is then theirs.
        tolerance: absolute, on masters.
        eps: of AdamW.
    """
    grads = given.grads
    norm = sum(float(grad.double().square().sum()) for grad in grads) ** 0.5
    factor = min(1.0, MAX_NORM / (norm + 1e-6)) if given.clips else 1.0
    head = slice(0, 4096)
    starts = given.params(torch.float32)
    for i, (param, start, grad) in enumerate(zip(params, starts, grads, strict=True)):
        before = start.detach().reshape(-1)[head].double()
        g = grad.reshape(-1)[head].double() * factor
        if given.rule == "AdamW":
            expected = before * (1 - LR * WEIGHT_DECAY) - LR * g / (g.abs() + eps)
        else:
            expected = before - LR * (g + WEIGHT_DECAY * before)
        moved = param if masters is None else masters[i]
        error = (moved.detach().reshape(-1)[head].double() - expected).abs().max()
        if not error <= tolerance:  # a NaN is an error too
            raise AssertionError(f"{name}: parameter {i} is off by {float(error):.2g}, more than {tolerance:.2g}")
        if masters is not None and not torch.equal(param.detach(), masters[i].detach().to(param.dtype)):
            raise AssertionError(f"{name}: parameter {i} is not its rounded master")
