"""A process that trains with transformers' Trainer: ``trainer_worker.py FOLDER RANK N_RANKS`` leaves what came of it in
``FOLDER/RANK-of-N_RANKS.pt``. On two ranks each has half of every batch, in DistributedDataParallel."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

import exits  # noqa: F401
import integration.conftest  # noqa: F401 - its environment, before any framework is imported
from integration.helpers_lm import language_model, masters
from integration.helpers_trainer import logged, new_trainer, wrapped

K = 3
BATCH = 4
"""Sequences of a micro-batch, of all ranks together."""


def main(folder: Path, rank: int, n_ranks: int) -> None:
    """Two epochs of two windows."""
    torch.set_num_threads(1)
    if n_ranks > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(n_ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
        store = dist.FileStore(str(folder / "store"), n_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n_ranks)
    import transformers

    group = dist.group.WORLD if n_ranks > 1 else None
    model = language_model(transformers, "gpt2")
    optimizer = wrapped(model, max_grad_norm=0.5, process_group=group)

    class Reducing(transformers.TrainerCallback):
        """Trainer wraps the model when it begins to train."""

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            if n_ranks > 1:
                optimizer.reduce_instead_of(trainer.model_wrapped)

    trainer = new_trainer(
        transformers, folder / f"{rank}-of-{n_ranks}", model, optimizer, n_sequences=2 * K * BATCH,
        callbacks=[Reducing()], per_device_train_batch_size=BATCH // n_ranks, gradient_accumulation_steps=K,
        max_grad_norm=0.0,
    )  # fmt: skip
    start = masters(model, optimizer)
    trainer.train()
    found = {"start": start, "weights": masters(model, optimizer), "losses": logged(trainer, "loss")}
    found["norms"] = [optimizer.grad_norm.item()]
    torch.save(found, folder / f"{rank}-of-{n_ranks}.pt")
    if n_ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
