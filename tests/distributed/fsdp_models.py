"""What the checks of FSDP2 share: meshes, models, batches, and looks at what a rank has."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from models import OPTIMIZERS, Oracle
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fusedaccum import FusedAccumOptimizer

BF16_FORWARD = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SETUPS = {
    "fp32": (torch.float32, MixedPrecisionPolicy()),
    "bf16 forward on fp32 parameters": (torch.float32, BF16_FORWARD),
    "bf16": (torch.bfloat16, MixedPrecisionPolicy()),
    "bf16, reduced in fp32": (torch.bfloat16, MixedPrecisionPolicy(reduce_dtype=torch.float32)),
}


@dataclass
class Ranks:
    """What a check needs to know: where it is, a mesh of one dimension, and one whose first dimension replicates."""

    rank: int
    world: int
    flat: DeviceMesh
    square: DeviceMesh


@cache
def here() -> Ranks:
    """Of this process."""
    world = dist.get_world_size()
    warnings.filterwarnings("error", message="fusedaccum")
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    return Ranks(dist.get_rank(), world, flat, square)


class Net(nn.Module):
    """Layers whose first dimensions leave ranks with uneven shards (13), and on four ranks with none (3, 1)."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(7, 13)
        self.outer = nn.Linear(13, 3)
        self.gain = nn.Parameter(torch.ones(1))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x))) * self.gain


def sharded(mesh: DeviceMesh, dtype: torch.dtype = torch.float32, policy: MixedPrecisionPolicy | None = None) -> Net:
    """``Net`` under FSDP2: two groups of parameters."""
    model = Net(dtype)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy()}
    fully_shard(model.inner, **options)
    fully_shard(model, **options)
    return model


def batches(n: int, rank: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Micro-batches of a rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [torch.randn(5, 7, generator=generator).to(dtype) for _ in range(n)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """A mean over the batch, whose gradients differ from batch to batch."""
    return (model(batch).float() ** 2).mean()


def whole(tensor: Tensor) -> Tensor:
    """All ranks' parts of a DTensor together."""
    return tensor.detach().full_tensor().clone()


def part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor."""
    return tensor.detach().to_local().clone()


def same_on_all_ranks(tensor: Tensor) -> bool:
    """Whether every rank has the same bits."""
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor.detach().clone().contiguous())
    return all(torch.equal(each, tensor) for each in every)


def fp32_sums(model: Net, given: list[Tensor], scale: float) -> list[Tensor]:
    """What ``.grad`` must be on this rank, bit for bit: the fp32 sum of what FSDP2 makes of each batch."""
    sums: list[Tensor] = []
    for batch in given:
        loss_of(model, batch).backward()
        grads = [part(param.grad).float() * scale for param in model.parameters()]
        sums = grads if not sums else [total + grad for total, grad in zip(sums, grads, strict=True)]
        model.zero_grad()
    return sums


def wrap(model: Net, name: str = "adamw", **options) -> FusedAccumOptimizer:
    return FusedAccumOptimizer(OPTIMIZERS[name](model.parameters()), **options)


def norm_of(model: Net) -> float:
    """The norm of all gradients of all ranks, in fp64."""
    return sum(float(whole(param.grad).double().square().sum()) for param in model.parameters()) ** 0.5


def assert_matches(oracle: Oracle, optimizer: FusedAccumOptimizer) -> None:
    """``Oracle.assert_matches`` of the whole parameters and masters."""
    copies: list[Tensor] = []
    masters: dict[Tensor, dict[str, Tensor]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            copies.append(whole(param))
            held = optimizer.state[param]
            masters[copies[-1]] = {"master_param": whole(held["master_param"])} if "master_param" in held else {}
    oracle.assert_matches(SimpleNamespace(param_groups=[{"params": copies}], state=masters))
