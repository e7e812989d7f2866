"""A training run that saves after every micro-batch and goes on where the last save left it.

``python resume_worker.py FOLDER BACKEND OPTIMIZER N_MICRO_BATCHES``: resumes from FOLDER/checkpoint.pt if it is there,
trains until micro-batch N, and leaves the parameters' bits in FOLDER/final.pt. Prints a line after each save, so that
whoever wants to kill it knows where it is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from models import mlp, wrap


def train(folder: Path, backend: str, name: str, n_micro_batches: int) -> None:
    """See the module's text."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = mlp(torch.bfloat16)
    data = [torch.randn(5, 7, dtype=torch.bfloat16) for _ in range(n_micro_batches)]
    weights = [1 + i * 7 % 5 for i in range(n_micro_batches)]
    optimizer = wrap(
        model, name, accumulation_steps=4, max_grad_norm=0.05, loss_scale="dynamic", statistics=True, backend=backend,
    )  # fmt: skip
    at = 0
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        held = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])
        at = held["at"]
    while at < n_micro_batches:
        # A weight from the device in every second window, from the host in the others.
        weight = torch.tensor(float(weights[at])) if at // 4 % 2 else weights[at]
        optimizer.backward((model(data[at]).float() ** 2).mean(), weight=weight)
        optimizer.step()
        optimizer.zero_grad()
        at += 1
        unfinished = checkpoint.with_suffix(".new")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "at": at}, unfinished)
        os.replace(unfinished, checkpoint)
        print(at, flush=True)
    torch.save([p.detach() for p in model.parameters()], folder / "final.pt")
    optimizer.flush()


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
