"""Checks that run on every rank of a group: models in DistributedDataParallel, and Accelerate around them."""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from checks_window import assert_same_on_all_ranks, mine, raised, wrap
from models import OPTIMIZERS, inputs, loss_of, mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedaccum import FusedAccumOptimizer

K = 3


def trained(model: nn.Module, optimizer: FusedAccumOptimizer, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Two windows of the loop's own, and the parameters after them."""
    for i, batch in enumerate(batches):
        is_ddp = isinstance(model, DistributedDataParallel)
        if is_ddp and i % K == K - 1:
            model.require_backward_grad_sync = True  # as Accelerate's trigger_sync_in_backward has it
        with model.no_sync() if is_ddp and i % K != K - 1 else nullcontext():
            (loss_of(model, batch) / K).backward()
        if i % K == K - 1:
            optimizer.step()
            optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def check_a_ddp_that_reduces_is_refused(n_ranks: int) -> None:
    """Without our message: "Expected BFloat16, got Float", or in fp32 a sum that is summed once more."""
    for dtype in (torch.bfloat16, torch.float32):
        for ddp_first in (True, False):
            model = mlp(dtype)
            if ddp_first:
                ddp, optimizer = DistributedDataParallel(model), wrap(model)
            else:
                optimizer, ddp = wrap(model), DistributedDataParallel(model)
            loss = loss_of(ddp, inputs(1, dtype)[0])
            error = raised(loss.backward)
            assert "a DistributedDataParallel reduces the gradients" in str(error), error
            assert "accepted: optimizer.reduce_instead_of(ddp) once" in str(error)
            optimizer.reduce_instead_of(ddp)
            loss_of(ddp, inputs(1, dtype)[0]).backward()
            optimizer.step()
            assert_same_on_all_ranks(model, optimizer)


def check_reduce_instead_of(n_ranks: int) -> None:
    """The bits of the same model without DDP, whatever the loop says about syncing."""
    start = mlp(torch.bfloat16)
    batches = mine(inputs(2 * K * n_ranks, torch.bfloat16), n_ranks)
    plain = copy.deepcopy(start)
    wanted = trained(plain, wrap(plain, max_grad_norm=0.05), batches)
    ddp = DistributedDataParallel(copy.deepcopy(start))
    optimizer = wrap(ddp, max_grad_norm=0.05, overlap=True)
    optimizer.reduce_instead_of(ddp)
    optimizer.reduce_instead_of(ddp)  # once more changes nothing
    assert all(torch.equal(p, q) for p, q in zip(wanted, trained(ddp, optimizer, batches), strict=True))
    assert_same_on_all_ranks(ddp, optimizer)


def check_what_reduce_instead_of_refuses(n_ranks: int) -> None:
    """A model that is no DDP, and one whose ranks are others."""
    alone = [dist.new_group([rank]) for rank in range(n_ranks)][dist.get_rank()]
    model = mlp()
    optimizer = wrap(model)
    assert "ddp is a Sequential; accepted: a DistributedDataParallel" in str(raised(optimizer.reduce_instead_of, model))
    ddp = DistributedDataParallel(model, process_group=alone)
    error = raised(optimizer.reduce_instead_of, ddp)
    assert "ddp reduces over 1 ranks and this optimizer over 2; accepted: the same" in str(error)


def check_accelerate(n_ranks: int) -> None:
    """Its documented loop, with one line after ``prepare``: the bits of the loop without Accelerate."""
    from accelerate import Accelerator

    os.environ.update(
        RANK=str(dist.get_rank()), WORLD_SIZE=str(n_ranks), LOCAL_RANK=str(dist.get_rank()), ACCELERATE_USE_CPU="true",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
    )  # fmt: skip
    start = mlp()
    batches = mine(inputs(2 * K * n_ranks), n_ranks)
    plain = copy.deepcopy(start)
    wanted = trained(plain, wrap(plain), batches)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=K)
    assert accelerator.num_processes == n_ranks
    model = copy.deepcopy(start)
    ours = FusedAccumOptimizer(OPTIMIZERS["adamw"](model.parameters()), process_group=dist.group.WORLD)
    ddp, optimizer = accelerator.prepare(model, ours)
    assert isinstance(ddp, DistributedDataParallel)
    ours.reduce_instead_of(ddp)
    for batch in batches:
        with accelerator.accumulate(ddp):
            accelerator.backward(loss_of(ddp, batch))
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(wanted, model.parameters(), strict=True))
    assert_same_on_all_ranks(model, ours)
