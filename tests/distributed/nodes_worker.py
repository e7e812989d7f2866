"""A rank under torchrun: ``torchrun ... nodes_worker.py FOLDER`` trains ``exact_model`` and leaves its parameters and
states in FOLDER/rank-RANK.pt."""

from __future__ import annotations

import sys
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

import exits  # noqa: F401
from models import OPTIMIZERS

from fusedaccum import FusedAccumOptimizer

N_WINDOWS = 3
K = 4  # a power of two, as is the number of ranks: no scale rounds


def exact_batches(n: int) -> list[tuple[Tensor, Tensor]]:
    """Small whole numbers: every gradient, sum of gradients and sum of their squares is exact, in whatever order."""
    generator = torch.Generator().manual_seed(7)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).bfloat16()

    return [(numbers(5, 7), numbers(5, 13)) for _ in range(n)]


def exact_model() -> nn.Linear:
    """The same on each call, in bfloat16."""
    torch.manual_seed(8)
    return nn.Linear(7, 13).bfloat16()


kept: list[FusedAccumOptimizer] = []
"""Those that ``train`` has made, which must not keep the process group alive."""


def train(batches: list[tuple[Tensor, Tensor]], steps: int, **options: Any) -> list[Tensor]:
    """All micro-batches in windows of ``steps``. Returns parameters, and states and masters of each."""
    model = exact_model()
    optimizer = FusedAccumOptimizer(
        OPTIMIZERS["adamw"](model.parameters()), accumulation_steps=steps, max_grad_norm=0.5, **options
    )
    kept.append(optimizer)
    for x, weights in batches:
        (model(x) * weights).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.stepped
    return [
        tensor.detach().clone()
        for param in model.parameters()
        for tensor in (param, *(value for _, value in sorted(optimizer.state[param].items())))
    ]


def main(folder: Path) -> None:
    """See the module's text."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    group = weakref.ref(dist.group.WORLD)
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    mine = exact_batches(N_WINDOWS * K * n_ranks)[rank::n_ranks]
    for overlap in (False, True):
        found = train(mine, K, process_group=dist.group.WORLD, overlap=overlap, bucket_bytes=100)
        torch.save(found, folder / f"rank-{rank}-{overlap}.pt")
    dist.destroy_process_group()
    assert group() is None, "gloo's threads may outlive the interpreter"
    with pytest.raises(ValueError, match="process_group has been destroyed; accepted: one that lives as long"):
        kept[-1].flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
