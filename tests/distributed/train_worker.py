"""A rank of a training run that saves after every micro-batch and goes on where all ranks can.

``python train_worker.py FOLDER N_MICRO_BATCHES DIES_AT`` under torchrun. Rank 1 of the first attempt kills itself
before micro-batch DIES_AT (-1: never). Each rank leaves its parameters' bits in FOLDER/final-RANK.pt; one that loses
another leaves what it then sees in FOLDER/lost-RANK.json, and fails.
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

from models import loss_of, mlp, wrap
from torch import Tensor

K = 4


def bits_of(tensors: list[Tensor]) -> bytes:
    """All bits of some tensors."""
    return torch.cat([each.detach().contiguous().view(torch.uint8).view(-1) for each in tensors]).numpy().tobytes()


def last_common(folder: Path, n_ranks: int) -> int:
    """The micro-batch after which every rank has a checkpoint; 0 for none."""
    have = [{int(path.stem.split("-")[2]) for path in folder.glob(f"at-{rank}-*.pt")} for rank in range(n_ranks)]
    return max(set.intersection(*have), default=0)


def _place() -> dict[str, int]:
    return {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}


def train(folder: Path, n_micro_batches: int, dies_at: int) -> None:
    """See the module's text."""
    torch.set_num_threads(1)
    # Without torchrun, whose agent would kill a survivor before it has said what it sees.
    store = os.environ.get("FUSEDACCUM_TEST_STORE")
    dist.init_process_group(
        "gloo", init_method=store, timeout=timedelta(seconds=30), **_place() if store else {}
    )  # fmt: skip
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    is_first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    torch.manual_seed(5)
    model = mlp(torch.bfloat16)
    data = [torch.randn(5, 7, dtype=torch.bfloat16) for _ in range(n_micro_batches * n_ranks)][rank::n_ranks]
    optimizer = wrap(
        model, accumulation_steps=K, max_grad_norm=0.05, loss_scale="dynamic", overlap=True, bucket_bytes=100,
        process_group=dist.group.WORLD,
    )  # fmt: skip
    begin = last_common(folder, n_ranks)
    dist.barrier()  # nobody writes while another looks
    if begin:
        held = torch.load(folder / f"at-{rank}-{begin}.pt", weights_only=True)
        model.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])
    (folder / f"began-{rank}.txt").open("a").write(f"{begin}\n")
    at_boundary = bits_of(list(model.parameters()))
    for at in range(begin, n_micro_batches):
        if at == dies_at and rank == 1 and is_first_attempt:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            optimizer.backward(loss_of(model, data[at]), weight=1 + (at * 7 + rank) % 5)
            optimizer.step()
        except RuntimeError as error:
            _report_loss(folder / f"lost-{rank}.json", error, time.monotonic() - start, model, optimizer, at_boundary)
            raise
        optimizer.zero_grad()
        if optimizer.stepped:
            at_boundary = bits_of(list(model.parameters()))
        unfinished = folder / f"{rank}.new"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
        os.replace(unfinished, folder / f"at-{rank}-{at + 1}.pt")
    torch.save([param.detach() for param in model.parameters()], folder / f"final-{rank}.pt")
    optimizer.flush()
    dist.destroy_process_group()


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
