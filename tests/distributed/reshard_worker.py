"""A rank that loads what another number of ranks has saved: ``python reshard_worker.py FOLDER RANK N_RANKS STEP``.

For models that are replicated (``process_group``) and sharded (FSDP2). Step 0 trains, leaves its state in three ways
(through ``torch.distributed.checkpoint``; rank 0's plain or full state; each rank's own in an open window), and what
comes of training on. Each later step loads what the step before it has saved, must find all bits of step 0, and saves
anew. The last one, of as many ranks as the first, trains on and must end where that did.
"""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import exits  # noqa: F401
from fsdp_models import Net, batches, loss_of, sharded
from models import OPTIMIZERS

from fusedaccum import FusedAccumOptimizer

KINDS = ("replicated", "sharded")
K = 2
WINDOWS_BEFORE = 2 * K
ALL = K * 4
"""Micro-batches of a rank: two windows before the save, then one whole and one that is left open half way."""


class Run:
    """A model and its optimizer, from the beginning."""

    def __init__(self, kind: str) -> None:
        n_ranks = dist.get_world_size()
        self.is_sharded = kind == "sharded"
        self.model: nn.Module
        options: dict[str, Any] = {"accumulation_steps": K, "max_grad_norm": 0.05}
        if self.is_sharded:
            self.model = sharded(init_device_mesh("cpu", (n_ranks,)), torch.bfloat16)
        else:
            self.model = Net(torch.bfloat16)
            options["process_group"] = dist.group.WORLD
        self.optimizer = FusedAccumOptimizer(OPTIMIZERS["adamw"](self.model.parameters()), **options)

    def train(self, first: int, last: int) -> None:
        """This rank's micro-batches from ``first`` to before ``last``."""
        for batch in batches(ALL, dist.get_rank(), dtype=torch.bfloat16)[first:last]:
            loss_of(self.model, batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def bits(self) -> dict[str, Tensor]:
        """Whole parameters, states and masters. All ranks must call it."""
        found = {}
        for name, param in self.model.named_parameters():
            for key, value in {"value": param.detach(), **self.optimizer.state[param]}.items():
                found[f"{name}.{key}"] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
        return found

    def save(self, path: Path) -> None:
        """Through torch.distributed.checkpoint."""
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)

    def load(self, path: Path) -> None:
        """What ``save`` has written, on however many ranks."""
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        held = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(held, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])

    def save_from_rank_0(self, path: Path) -> None:
        """One file with everything: the plain ``state_dict``, or under FSDP2 torch's full one."""
        if self.is_sharded:
            whole = get_state_dict(
                self.model, self.optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
            )
        else:
            whole = self.model.state_dict(), self.optimizer.state_dict()
        if dist.get_rank() == 0:
            torch.save(whole, path)

    def load_from_one_file(self, path: Path) -> None:
        """What ``save_from_rank_0`` has written, read by every rank."""
        model_state, optimizer_state = torch.load(path, weights_only=True)
        if self.is_sharded:
            set_state_dict(
                self.model, self.optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state,
                options=StateDictOptions(full_state_dict=True),
            )  # fmt: skip
        else:
            self.model.load_state_dict(model_state)
            self.optimizer.load_state_dict(optimizer_state)


def assert_same(found: dict[str, Tensor], path: Path) -> None:
    """The bits that rank 0 has left in ``path``."""
    wanted = torch.load(path, weights_only=True)
    assert found.keys() == wanted.keys()
    assert any(name.endswith("master_param") for name in wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def begin(kind: str, folder: Path) -> None:
    """Step 0."""
    run = Run(kind)
    run.train(0, WINDOWS_BEFORE)
    run.save(folder / "step-0")
    run.save_from_rank_0(folder / "rank-0.pt")
    found = run.bits()
    run.train(WINDOWS_BEFORE, WINDOWS_BEFORE + K)
    later = run.bits()
    run.train(WINDOWS_BEFORE + K, WINDOWS_BEFORE + K + 1)
    torch.save((run.model.state_dict(), run.optimizer.state_dict()), folder / f"open-{dist.get_rank()}.pt")
    run.train(WINDOWS_BEFORE + K + 1, ALL)
    last = run.bits()
    if dist.get_rank() == 0:
        for name, bits in (("saved", found), ("later", later), ("last", last)):
            torch.save(bits, folder / f"{name}.pt")


def go_on(kind: str, folder: Path, step: int) -> None:
    """Steps 1 and later."""
    run = Run(kind)
    run.load(folder / f"step-{step - 1}")
    assert_same(run.bits(), folder / "saved.pt")
    run.save(folder / f"step-{step}")
    other = Run(kind)
    other.load_from_one_file(folder / "rank-0.pt")
    assert_same(other.bits(), folder / "saved.pt")
    is_last = len(list(folder.glob("open-*.pt"))) == dist.get_world_size()
    if not is_last:
        refuse_open_window(kind, folder)
        return
    for each in (run, other):
        each.train(WINDOWS_BEFORE, WINDOWS_BEFORE + K)
        assert_same(each.bits(), folder / "later.pt")
    resumed = Run(kind)
    # Whole DTensors, which weights_only does not let through.
    model_state, optimizer_state = torch.load(folder / f"open-{dist.get_rank()}.pt", weights_only=False)
    resumed.model.load_state_dict(model_state)
    resumed.optimizer.load_state_dict(optimizer_state)
    resumed.train(WINDOWS_BEFORE + K + 1, ALL)
    assert_same(resumed.bits(), folder / "last.pt")


def refuse_open_window(kind: str, folder: Path) -> None:
    """A rank's own open window, where the number of ranks is another: refused, and dropped on demand."""
    run = Run(kind)
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    model_state, optimizer_state = torch.load(folder / f"open-{rank}.pt", weights_only=kind == "replicated")
    if kind == "sharded":
        # Of two more ranks' parts nothing is known here, so that there is nothing to go on with either.
        for open_window in ("restore", "drop"):
            with pytest.raises(
                ValueError, match=r"on the mesh .*; accepted: on the parameter's \(.*torch.distributed.ch"
            ):
                run.optimizer.load_state_dict(optimizer_state, open_window=open_window)
        return
    with pytest.raises(ValueError, match=f"the open window of rank {rank} of 4, this is rank {rank} of {n_ranks}"):
        run.optimizer.load_state_dict(optimizer_state)
    run.model.load_state_dict(model_state)
    run.optimizer.load_state_dict(optimizer_state, open_window="drop")
    assert_same(run.bits(), folder / "later.pt")


def main(folder: Path, rank: int, n_ranks: int, step: int) -> None:
    """See the module's text."""
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message="fusedaccum")
    store = dist.FileStore(str(folder / f"store-{step}"), n_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n_ranks, timeout=timedelta(seconds=30))
    for kind in KINDS:
        (folder / kind).mkdir(exist_ok=True)
        if step == 0:
            begin(kind, folder / kind)
        else:
            go_on(kind, folder / kind, step)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
