"""Checks that run on every rank of a group: torch.distributed.checkpoint, saved by some ranks and loaded by others."""

from __future__ import annotations

import copy
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checks_window import mine, raised, step_windows
from launch import sizes
from models import OPTIMIZERS, inputs, mlp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fusedaccum import FusedAccumOptimizer

OPTIONS = {"accumulation_steps": 2, "max_grad_norm": 0.05}


def fresh(start: nn.Module, group: dist.ProcessGroup) -> tuple[nn.Module, FusedAccumOptimizer]:
    """A copy of the model and a new optimizer, on the ranks of ``group``."""
    model = copy.deepcopy(start)
    return model, FusedAccumOptimizer(OPTIMIZERS["adamw"](model.parameters()), process_group=group, **OPTIONS)


def save(model: nn.Module, optimizer: FusedAccumOptimizer, folder: str, group: dist.ProcessGroup) -> None:
    """By all ranks of ``group``."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder, process_group=group)


def load(model: nn.Module, optimizer: FusedAccumOptimizer, folder: str, group: dist.ProcessGroup) -> None:
    """By all ranks of ``group``."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    held = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(held, checkpoint_id=folder, process_group=group)
    set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])


def assert_same_state(one: tuple[nn.Module, FusedAccumOptimizer], other: tuple[nn.Module, FusedAccumOptimizer]) -> None:
    """Parameters, states and masters, bit by bit."""
    for p, q in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(p, q)
        states = one[1].state[p], other[1].state[q]
        assert states[0].keys() == states[1].keys()
        assert "master_param" in states[0]
        for name in states[0]:
            assert torch.equal(states[0][name], states[1][name]), name


@sizes(4)
def check_saved_by_4_loaded_by_2_by_1_by_4(n_ranks: int) -> None:
    """Every state on every rank, whatever saved it; an open window is dropped with a warning, and a rank's own
    state_dict of one is refused where the number of ranks is another."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    groups = {4: dist.group.WORLD, 2: dist.new_group([0, 1]), 1: dist.new_group([0])}
    start = mlp(torch.bfloat16)
    batches = mine(inputs(4 * n_ranks, torch.bfloat16), n_ranks)
    run = fresh(start, groups[4])
    step_windows(*run, batches)
    save(*run, f"{folder[0]}/4", groups[4])
    path = f"{folder[0]}/4"
    for size in (2, 1, 4):
        if dist.get_rank() < size:
            loaded = fresh(start, groups[size])
            load(*loaded, path, groups[size])
            assert_same_state(run, loaded)
            path = f"{folder[0]}/after-{size}"
            save(*loaded, path, groups[size])
        path = f"{folder[0]}/after-{size}"
        dist.barrier()
    step_windows(*run, batches)
    step_windows(*loaded, batches)
    assert_same_state(run, loaded)
    step_windows(*run, batches[:1])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        get_state_dict(*run)
    assert any("is not part of what torch.distributed.checkpoint saves" in str(each.message) for each in said)
    held = run[1].state_dict()
    if dist.get_rank() < 2:
        fewer = fresh(start, groups[2])[1]
        error = raised(fewer.load_state_dict, held)
        assert f"the open window of rank {dist.get_rank()} of 4, this is rank {dist.get_rank()} of 2" in str(error)
        fewer.load_state_dict(held, open_window="drop")
        assert fewer._window.position == 0
    run[1]._window.close()  # that it was left behind is the check's doing
