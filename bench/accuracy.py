"""How far each way's sum of K micro-batches is from the exact one, as K grows.

Gradients are normal values with a mean of their own for each element, as those of a parameter that still learns, in
bfloat16. Every way gets the same ones, and what is compared is the mean over K. The exact sum is fp64's: it holds 1024
values of 8 bits without rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedaccum import FusedAccumOptimizer

from . import peers
from .measure import FP32, LESS
from .providers import LR, NAME, AbsentError, Delivery

FILE = "accuracy.csv"
N = 2**14
MICRO_BATCHES = (4, 16, 64, 256, 1024)
SEED = 3


@dataclass(frozen=True)
class AccuracyRow:
    """``relative_error``: norm of the difference to fp64's mean gradient over the norm of that. ``max_error``: the
    largest difference of an element over the root mean square of the mean gradient."""

    provider: str
    precision: str
    micro_batches: int
    n: int
    relative_error: float
    max_error: float
    device: str
    versions: str
    commit: str
    date: str


def _gradients(k: int) -> Iterator[Tensor]:
    random = torch.Generator().manual_seed(SEED)
    mean = torch.randn(N, generator=random)
    for _ in range(k):
        yield (mean + torch.randn(N, generator=random)).to(torch.bfloat16)


class Way(ABC):
    """Takes gradients one by one; ``mean`` is what it makes of them."""

    precision = FP32

    def __init__(self, k: int) -> None:
        self.k = k
        self.begin()

    def begin(self) -> None:
        """Its buffers."""
        self.acc = torch.zeros(N)

    @abstractmethod
    def add(self, grad: Tensor) -> None:
        """One micro-batch."""

    def mean(self) -> Tensor:
        """Over the micro-batches, as it would be used."""
        return self.acc.double()


class _Exact(Way):
    def begin(self) -> None:
        self.acc = torch.zeros(N, dtype=torch.float64)

    def add(self, grad: Tensor) -> None:
        self.acc += grad

    def mean(self) -> Tensor:
        return self.acc / self.k


class _Ours(Way):
    def begin(self) -> None:
        self._param = Parameter(torch.zeros(N, dtype=torch.bfloat16))
        self._optimizer = FusedAccumOptimizer(torch.optim.SGD([self._param], lr=LR), accumulation_steps=self.k)

    def add(self, grad: Tensor) -> None:
        Delivery([grad], [self._param]).loss().backward()

    def mean(self) -> Tensor:
        return self._param.grad.double()


class _Naive(Way):
    def add(self, grad: Tensor) -> None:
        self.acc += grad.float() * (1 / self.k)


class _Foreach(Way):
    def add(self, grad: Tensor) -> None:
        torch._foreach_add_([self.acc], [grad], alpha=1 / self.k)


class _Autograd(Way):
    """Autograd's accumulation; the loss is scaled, so the gradients are."""

    dtype = torch.bfloat16

    def begin(self) -> None:
        self._param = Parameter(torch.zeros(N, dtype=torch.bfloat16))
        self._param.grad_dtype = self.dtype
        self._param.grad = torch.zeros(N, dtype=self.dtype)

    def add(self, grad: Tensor) -> None:
        Delivery([grad * (1 / self.k)], [self._param]).loss().backward()

    def mean(self) -> Tensor:
        return self._param.grad.double()


class _GradDtype(_Autograd):
    dtype = torch.float32


class _Native(_Autograd):
    precision = LESS


class _Kahan(Way):
    """Kahan's sum in bfloat16, with a bfloat16 compensation: 10 bytes an element and four roundings."""

    precision = LESS

    def begin(self) -> None:
        self.acc, self._lost = (torch.zeros(N, dtype=torch.bfloat16) for _ in range(2))

    def add(self, grad: Tensor) -> None:
        corrected = grad * (1 / self.k) - self._lost
        total = self.acc + corrected
        self._lost = (total - self.acc) - corrected
        self.acc = total


class _Optimi(Way):
    """torch-optimi's accumulation goes into AdamW's first average, which is (1 - beta) times the sum here."""

    precision = LESS

    def begin(self) -> None:
        optimi = peers.module("optimi")
        self._param = Parameter(torch.zeros(N, dtype=torch.bfloat16))
        self._optimizer = optimi.AdamW([self._param], lr=LR, weight_decay=0.0, gradient_release=True)
        self._optimizer.optimizer_accumulation = True

    def add(self, grad: Tensor) -> None:
        self._param.grad = grad * (1 / self.k)
        self._optimizer.step(param=self._param)

    def mean(self) -> Tensor:
        # A running average of scaled micro-batches; its weights depend on how far back each is. K times it is the
        # nearest thing to their mean that it holds.
        return self._optimizer.state[self._param]["exp_avg"].double() * self.k


WAYS: dict[str, type[Way]] = {
    NAME: _Ours,
    "naive fp32": _Naive,
    "foreach": _Foreach,
    "grad_dtype": _GradDtype,
    "Kahan bf16": _Kahan,
    "native bf16": _Native,
    "optimi, release": _Optimi,
}


def measure(
    where: Mapping[str, str], progress: Callable[[float], object], counts: tuple[int, ...] = MICRO_BATCHES
) -> tuple[list[AccuracyRow], dict[str, str]]:
    """Rows of every way at every K, and which ways are absent, and why."""
    rows: list[AccuracyRow] = []
    absent: dict[str, str] = {}
    for done, k in enumerate(counts):
        exact = _Exact(k)
        ways: dict[str, Way] = {}
        for name, make in WAYS.items():
            try:
                ways[name] = make(k)
            except AbsentError as error:
                absent[name] = str(error)
        for grad in _gradients(k):
            for way in (exact, *ways.values()):
                way.add(grad)
        expected = exact.mean()
        for name, way in ways.items():
            difference = way.mean() - expected
            relative = float(difference.norm() / expected.norm())
            largest = float(difference.abs().max() / expected.square().mean().sqrt())
            rows.append(AccuracyRow(name, way.precision, k, N, relative, largest, **where))
        progress((done + 1) / len(counts))
    return rows, absent
