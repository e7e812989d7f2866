"""A rank of a training run of which rank 1 kills itself.

``python fault_worker.py FOLDER N_MICRO_BATCHES DIES_AT``, with RANK, WORLD_SIZE and STORE in the environment. Rank 1
dies before micro-batch DIES_AT; the others leave what they then see in FOLDER/lost-RANK.json, and fail.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from breaking_run import begin, micro_batch
from torch import Tensor


def bits_of(tensors: list[Tensor]) -> bytes:
    """All bits of some tensors."""
    return torch.cat([each.detach().contiguous().view(torch.uint8).view(-1) for each in tensors]).numpy().tobytes()


def train(folder: Path, n_micro_batches: int, dies_at: int) -> None:
    """See the module's text."""
    torch.set_num_threads(1)
    rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=os.environ["STORE"], rank=rank, world_size=n_ranks, timeout=timedelta(seconds=30)
    )
    model, data, optimizer = begin(rank, n_ranks, n_micro_batches)
    at_boundary = bits_of(list(model.parameters()))
    for at in range(n_micro_batches):
        if at == dies_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            micro_batch(model, data, optimizer, at, rank)
        except RuntimeError as error:
            _report_loss(folder / f"lost-{rank}.json", error, time.monotonic() - start, model, optimizer, at_boundary)
            raise
        optimizer.zero_grad()
        if optimizer.stepped:
            at_boundary = bits_of(list(model.parameters()))


def _report_loss(
    path: Path, error: Exception, waited_s: float, model: torch.nn.Module, optimizer: object, at_boundary: bytes
) -> None:
    """What a survivor sees after the error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            optimizer.step()
            again = "no error"
        except RuntimeError as second:
            again = str(second)
        found = {
            "type": type(error).__name__,
            "message": str(error),
            "again": again,
            "waited_s": waited_s,
            "parameters_are_those_of_the_last_boundary": bits_of(list(model.parameters())) == at_boundary,
            "open_window": optimizer.state_dict()["fusedaccum"]["open"] is not None,
        }
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(found))
    os.replace(unfinished, path)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
