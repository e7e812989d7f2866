"""Checks that run on every rank of one launch after another: sharded states on 4, 2, 1 and again 4 ranks.

The launches share a folder. The first trains without a break and leaves checkpoints; the others go on from those.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checks_checkpoint import load, save
from checks_window import mine
from launch import sizes
from models import U32, inputs
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from zero_models import Odd, assert_equal, assert_params_agree, everything, run, wrap

from fusedaccum import FusedAccumOptimizer

FOLDER, STAGE = "FUSEDACCUM_TEST_FOLDER", "FUSEDACCUM_TEST_STAGE"
STAGES = (4, 2, 1, 4)
"""Ranks of each launch."""
N_BATCHES = 8
"""Of a window of all ranks together."""
FULL = StateDictOptions(full_state_dict=True)


def fresh(n_ranks: int) -> tuple[Odd, FusedAccumOptimizer]:
    """A model with values of its own, which loading must replace."""
    model = Odd(torch.bfloat16)
    return model, wrap(model, accumulation_steps=N_BATCHES // n_ranks, max_grad_norm=0.5)


def window(seed: int, n_ranks: int) -> list[Tensor]:
    """This rank's micro-batches of a window that is the same for any number of ranks."""
    torch.manual_seed(seed)
    return mine(inputs(N_BATCHES), n_ranks)


@sizes(1, 2, 4)
def check_other_numbers_of_ranks(n_ranks: int) -> None:
    """Whatever number of ranks has saved: the same bits everywhere, and the next step is that of the run that was
    never broken: bit by bit on as many ranks, but for the order of the sum on others."""
    folder, stage = Path(os.environ[FOLDER]), int(os.environ[STAGE])
    model, optimizer = fresh(n_ranks)
    world = dist.group.WORLD
    if stage == 0:
        for seed in (1, 2):
            run(model, optimizer, window(seed, n_ranks))
        _leave(folder / "broken.pt", everything(model, optimizer))
        full = get_optimizer_state_dict(model, optimizer, options=FULL)  # on all ranks
        _leave(folder / "full.pt", {"model": model.state_dict(), "optimizer": full})
        save(model, optimizer, str(folder / "0"), world)
        run(model, optimizer, window(3, n_ranks))
        _leave(folder / "unbroken.pt", everything(model, optimizer))
        return
    load(model, optimizer, str(folder / str(stage - 1)), world)
    assert_equal(torch.load(folder / "broken.pt"), everything(model, optimizer))
    is_sharded = isinstance(optimizer.state[model.large]["exp_avg"], DTensor)
    assert is_sharded is (n_ranks > 1)
    save(model, optimizer, str(folder / str(stage)), world)
    run(model, optimizer, window(3, n_ranks))
    assert_params_agree(model)
    _compare(torch.load(folder / "unbroken.pt"), everything(model, optimizer), exactly=n_ranks == 4)

    # The whole state that the first launch has saved on its rank 0 alone, on any number of ranks; and whole again.
    other, other_optimizer = fresh(n_ranks)
    held = torch.load(folder / "full.pt")
    other.load_state_dict(held["model"])
    set_optimizer_state_dict(other, other_optimizer, held["optimizer"], options=FULL)
    assert_equal(torch.load(folder / "broken.pt"), everything(other, other_optimizer))
    again = get_optimizer_state_dict(other, other_optimizer, options=FULL)
    for name, states in held["optimizer"]["state"].items():
        assert_equal(states, again["state"][name])
    run(other, other_optimizer, window(3, n_ranks))
    assert_equal(everything(model, optimizer), everything(other, other_optimizer))


def _leave(path: Path, what: Any) -> None:
    if dist.get_rank() == 0:
        torch.save(what, path)
    dist.barrier()


def _compare(wanted: dict[str, Tensor], got: dict[str, Tensor], exactly: bool) -> None:
    if exactly:
        assert_equal(wanted, got)
        return
    for name, value in wanted.items():
        if name.endswith(("exp_avg", "exp_avg_sq")) and value.numel():
            # 2n + 2 roundings of the sum of n magnitudes, which is at most 2^6 times what is left of it.
            bound = 2**6 * (2 * N_BATCHES + 2) * U32 * value.abs().max()
            assert ((got[name] - value).abs() <= bound).all(), name
