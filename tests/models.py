"""Toy models, and what plain torch makes of them: the oracles of the optimizer's tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fusedaccum
from fusedaccum import FusedAccumOptimizer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
U32 = 2.0**-24  # half an ulp of fp32, relative

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.5),  # has no fused rule
}


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two layers whose sizes are no multiple of anything."""
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3)).to(dtype)


def inputs(n_micro_batches: int, dtype: torch.dtype = torch.float32, n_features: int = 7) -> list[Tensor]:
    """Micro-batches for ``mlp``."""
    return [torch.randn(5, n_features, dtype=dtype) for _ in range(n_micro_batches)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss whose gradients differ from batch to batch."""
    return (model(batch).float() ** 2).mean()


def wrap(model: nn.Module, name: str = "adamw", **options: Any) -> FusedAccumOptimizer:
    """The optimizer ``name`` over all parameters, wrapped."""
    return FusedAccumOptimizer(OPTIMIZERS[name](model.parameters()), **options)


def micro_grads(model: nn.Module, batches: Iterable[Tensor]) -> list[list[Tensor | None]]:
    """For each micro-batch the gradients as autograd produces them, without touching the model or its ``.grad``."""
    twin = copy.deepcopy(model)  # neither .grad nor hooks are copied
    params = [param for param in twin.parameters() if param.requires_grad]
    grads = []
    for batch in batches:
        found = iter(torch.autograd.grad(loss_of(twin, batch), params, allow_unused=True))
        grads.append([next(found) if param.requires_grad else None for param in twin.parameters()])
    return grads


def fp32_sums(grads: Sequence[Sequence[Tensor | None]], scale: float = 1.0) -> list[Tensor | None]:
    """``sum(grad * scale)`` for each parameter, in fp32 in the order given: what ``.grad`` must be, bit for bit."""
    sums: list[Tensor | None] = []
    for column in zip(*grads, strict=True):
        total = None
        for grad in column:
            if grad is not None:
                scaled = grad.float() * scale
                total = scaled if total is None else total + scaled
        sums.append(total)
    return sums


def norm_of(grads: Iterable[Tensor | None]) -> float:
    """The norm of all gradients together, in fp64."""
    return sum(float(grad.double().square().sum()) for grad in grads if grad is not None) ** 0.5


def norm_rtol(n_elems: int) -> float:
    """Relative error of a kept norm: a lane adds at most 32 squares in fp32, each rounded once; halving costs log2 of
    1024 more, in fp64. The square root halves the relative error, the fp32 result adds U32."""
    return (min(n_elems, 32) + 1) * U32 / 2 + U32 + 2.0**-40


def snapshot(optimizer: FusedAccumOptimizer) -> list[Any]:
    """Copies of all parameters and states, to see later that nothing has moved."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [
        {name: value.clone() if isinstance(value, Tensor) else value for name, value in optimizer.state[param].items()}
        for param in params
        if param in optimizer.state
    ]
    return [[param.detach().clone() for param in params], states]


def assert_unmoved(before: list[Any], after: list[Any]) -> None:
    """That two snapshots are the same bits."""
    for was, now in zip(before[0], after[0], strict=True):
        assert torch.equal(was, now)
    for was, now in zip(before[1], after[1], strict=True):
        assert was.keys() == now.keys()
        for name, value in was.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(now[name])), name


class Oracle:
    """The plain torch optimizer ``name`` on fp64 copies of a model's parameters, given the gradients.

    Gradients come in as fp32 (the accumulator's bits, which tests compare by themselves), so that what is left to
    differ is the arithmetic of the update.
    """

    def __init__(self, model: nn.Module, name: str | Callable[[Any], torch.optim.Optimizer] = "adamw") -> None:
        self.params = [nn.Parameter(p.detach().double(), requires_grad=p.requires_grad) for p in model.parameters()]
        self._start = [param.detach().clone() for param in self.params]
        self.optimizer = (OPTIMIZERS[name] if isinstance(name, str) else name)(self.params)
        self._n_steps = 0

    def step(self, grads: Sequence[Tensor | None], max_norm: float | None = None, divisor: float = 1.0) -> float:
        """One update; returns the norm before clipping."""
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = None if grad is None else grad.detach().double() / divisor
        norm = norm_of(param.grad for param in self.params)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.params, max_norm)
        self.optimizer.step()
        self._n_steps += 1
        return norm

    def assert_matches(self, optimizer: FusedAccumOptimizer) -> None:
        """That masters (parameters, where there is none) are as here, and 16-bit parameters the rounded masters.

        A step rounds the parameter once or twice: U32 * |param| each. Its update is off by a few roundings relative to
        the largest it is made of; Adam's quotient of averages magnifies those of its numerator by at most
        1 / sqrt(1 - beta2) = 32, so 2^8 * U32 of the distance moved. Error adds up over the steps.
        """
        ours = [param for group in optimizer.param_groups for param in group["params"]]
        for param, want, start in zip(ours, self.params, self._start, strict=True):
            if not param.numel():
                continue
            want = want.detach()
            master = optimizer.state[param].get("master_param") if param in optimizer.state else None
            got = param.detach() if master is None else master
            moved = (want - start).abs().max()
            bound = self._n_steps * U32 * (2 * torch.maximum(want.abs(), start.abs()).max() + 2**8 * moved)
            torch.testing.assert_close(got.double(), want, rtol=0, atol=float(bound))
            if master is not None:
                assert master.dtype is torch.float32
                assert torch.equal(param.detach(), master.to(param.dtype))


def run_window(
    model: nn.Module, optimizer: FusedAccumOptimizer, batches: Sequence[Tensor], weight: float = 1.0
) -> None:
    """Backward of each micro-batch; with ``accumulation_steps`` a ``step()`` after each."""
    for batch in batches:
        (loss_of(model, batch) * weight).backward()
        if optimizer.accumulation_steps is not None:
            optimizer.step()


class Usage(nn.Module):
    """Layers of which each micro-batch says which it uses."""

    def __init__(self, n_layers: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(n_layers)).to(dtype)
        self.used: Sequence[int] = range(n_layers)

    def forward(self, x: Tensor) -> Tensor:
        for i in self.used:
            x = torch.tanh(self.layers[i](x))
        return x


def slot_of(optimizer: FusedAccumOptimizer, param: Tensor) -> fusedaccum.slot.Slot:
    """The parameter's slot."""
    return optimizer._registry.slots[param]
