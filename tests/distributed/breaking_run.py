"""The training run that a rank breaks off: ``fault_worker.py`` and ``restart_worker.py``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from models import loss_of, mlp, wrap
from torch import Tensor, nn

from fusedaccum import FusedAccumOptimizer

K = 4


def begin(rank: int, n_ranks: int, n_micro_batches: int) -> tuple[nn.Module, list[Tensor], FusedAccumOptimizer]:
    """Model, this rank's data and optimizer: all that a window can have, in pieces that overlap."""
    torch.manual_seed(5)
    model = mlp(torch.bfloat16)
    data = [torch.randn(5, 7, dtype=torch.bfloat16) for _ in range(n_micro_batches * n_ranks)][rank::n_ranks]
    optimizer = wrap(
        model, accumulation_steps=K, max_grad_norm=0.05, loss_scale="dynamic", overlap=True, bucket_bytes=100,
        process_group=dist.group.WORLD,
    )  # fmt: skip
    return model, data, optimizer


def micro_batch(model: nn.Module, data: list[Tensor], optimizer: FusedAccumOptimizer, at: int, rank: int) -> None:
    """Backward of micro-batch ``at``, with a weight of its own, and ``step()``."""
    optimizer.backward(loss_of(model, data[at]), weight=1 + (at * 7 + rank) % 5)
    optimizer.step()
