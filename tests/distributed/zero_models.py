"""What the checks of sharded states share: a model of odd parameters, and comparisons of all that a rank has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from checks_window import mine
from models import OPTIMIZERS, inputs, loss_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fusedaccum import FusedAccumOptimizer
from fusedaccum.sharded_boundary import ShardedBoundary

K = 2


class Odd(nn.Module):
    """Parameters of all kinds: fewer rows than ranks, no elements, no dimensions, other orders of memory."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        shapes = {
            "uneven": (7, 3), "short": (1, 5), "two": (2, 33), "empty": (0, 4), "no_columns": (3, 0), "one": (1,),
            "late": (5,), "large": (40, 31), "dimless": (), "conv": (6, 3, 2, 2), "turned": (9, 5), "frozen": (3, 3),
        }  # fmt: skip
        for name, shape in shapes.items():
            values = torch.randn(shape).to(dtype)
            if name == "conv":
                values = values.to(memory_format=torch.channels_last)
            if name == "turned":
                values = torch.randn(shape[::-1]).to(dtype).t()
            setattr(self, name, nn.Parameter(values))
        self.single = nn.Parameter(torch.randn(3, 3))  # fp32 beside the others
        self.frozen.requires_grad_(False)
        self.unused: tuple[str, ...] = ()

    def forward(self, batch: Tensor) -> Tensor:
        x = batch.float()
        outs = [
            (param.float() * (1 + x.mean() * (i + 1)) + x.std()).square().sum()
            for i, (name, param) in enumerate(self.named_parameters())
            if name not in self.unused
        ]
        return torch.stack(outs).sum() / 100


def wrap(model: nn.Module, name: str = "adamw", **options: Any) -> FusedAccumOptimizer:
    """The optimizer ``name`` over all parameters, states sharded over all ranks."""
    return FusedAccumOptimizer(
        OPTIMIZERS[name](model.parameters()), process_group=dist.group.WORLD, **{"shard_states": True, **options}
    )


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Groups whose settings change in the middle of every shard."""
    params = list(model.parameters())
    return [
        {"params": params[0::3], "lr": 1e-2, "weight_decay": 0.0},
        {"params": params[1::3], "lr": 3e-2, "weight_decay": 0.3, "amsgrad": True},
        {"params": params[2::3], "lr": 2e-3, "betas": (0.5, 0.9), "maximize": True},
    ]


def whole(value: Tensor) -> Tensor:
    """All of a state."""
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def everything(model: nn.Module, optimizer: FusedAccumOptimizer) -> dict[str, Tensor]:
    """Parameters and whole states, by name."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = param.detach().clone()
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor):
                found[f"{name}.{key}"] = whole(value)
    return found


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Bit by bit."""
    assert a.keys() == b.keys(), set(a) ^ set(b)
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def assert_params_agree(model: nn.Module) -> None:
    """The same bits on all ranks."""
    bits = torch.cat([p.detach().contiguous().reshape(-1).view(torch.uint8) for p in model.parameters()])
    everybodys = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, bits)
    assert all(torch.equal(other, bits) for other in everybodys)


def batches_of(model: nn.Module, n: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return mine(inputs(n * dist.get_world_size(), dtype), dist.get_world_size())


def run(
    model: nn.Module, optimizer: FusedAccumOptimizer, batches: list[Tensor], weights: list[float] | None = None
) -> None:
    """Micro-batches with ``accumulation_steps``; the ranks' parameters agree after each boundary."""
    for i, batch in enumerate(batches):
        loss = model(batch) if isinstance(model, Odd) else loss_of(model, batch)
        optimizer.backward(loss, weight=None if weights is None else weights[i])
        optimizer.step()
        if optimizer.stepped:
            assert_params_agree(model)
            if isinstance(optimizer._boundary, ShardedBoundary):
                assert all(param.grad is None for group in optimizer.param_groups for param in group["params"])
        optimizer.zero_grad()
