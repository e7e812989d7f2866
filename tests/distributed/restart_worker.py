"""A rank under torchrun, of a training run that is broken off once and goes on from its last checkpoint.

``torchrun ... restart_worker.py FOLDER``: rank 0 leaves a checkpoint at each boundary. In its first life rank 1 kills
itself inside a window; torchrun then starts all anew. At the end each rank trains once more from the beginning, without
a break, and leaves in FOLDER/ended-RANK.json whether both runs have the same bits, and where the second life began.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

import exits  # noqa: F401
from breaking_run import K, begin, micro_batch

N_MICRO_BATCHES = 14
"""Of each rank: three windows, and one of two."""
DIES_AT = 10
"""In the middle of the third window."""


def train(checkpoint: Path | None, rank: int, n_ranks: int) -> tuple[bytes, int]:
    """All bits of the parameters and states at the end, and the micro-batch that the run began with.

    With ``checkpoint`` the run goes on from there, keeps it up to date, and rank 1 dies in its first life.
    """
    model, data, optimizer = begin(rank, n_ranks, N_MICRO_BATCHES)
    began = 0
    if checkpoint is not None and checkpoint.exists():
        held = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])
        began = held["at"]
    for at in range(began, N_MICRO_BATCHES):
        if checkpoint is not None and at == DIES_AT and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            _die_after(checkpoint, 2 * K)
        micro_batch(model, data, optimizer, at, rank)
        optimizer.zero_grad()
        if optimizer.stepped and rank == 0 and checkpoint is not None:
            unfinished = checkpoint.with_suffix(".new")
            held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "at": at + 1}
            torch.save(held, unfinished)
            os.replace(unfinished, checkpoint)
    optimizer.flush()
    tensors = [param.detach() for param in model.parameters()]
    tensors += [value for param in model.parameters() for value in optimizer.state[param].values()]
    bits = torch.cat([each.contiguous().reshape(-1).view(torch.uint8) for each in tensors])
    return bits.numpy().tobytes(), began


def _die_after(checkpoint: Path, at: int) -> None:
    """Without a word to anybody, once the checkpoint of micro-batch ``at`` is there."""
    while not checkpoint.exists() or torch.load(checkpoint, weights_only=True)["at"] < at:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
    """See the module's text."""
    torch.set_num_threads(1)
    rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=30)
    # The agent's store outlives the ranks, with the addresses that the dead ones had: without a prefix for each life a
    # new rank may connect to one of those, and fails (seen on torch 2.13).
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    store = dist.PrefixStore(f"life-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n_ranks, timeout=timeout)
    broken, began = train(folder / "checkpoint.pt", rank, n_ranks)
    whole, _ = train(None, rank, n_ranks)
    found = {
        "same_bits": broken == whole,
        "n_bytes": len(whole),
        "began": began,
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    }
    (folder / f"ended-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
