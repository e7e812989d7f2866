"""The wrapper under FSDP2 and tensor parallelism: checkpoints, other placements, and what is refused. On every rank."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_models import Net, batches, here, loss_of, part, same_on_all_ranks, sharded, whole
from launch import sizes
from models import OPTIMIZERS, U32, norm_rtol
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fusedaccum import FusedAccumOptimizer


def wrap(model: nn.Module, name: str = "adamw", **options: Any) -> FusedAccumOptimizer:
    return FusedAccumOptimizer(OPTIMIZERS[name](model.parameters()), **options)


def train(model: nn.Module, optimizer: FusedAccumOptimizer, given: list[Tensor]) -> None:
    for batch in given:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model: nn.Module, optimizer: FusedAccumOptimizer) -> dict[str, Tensor]:
    """All bits that this rank has of parameters and states."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = part(param)
        for key, value in optimizer.state[param].items():
            found[f"{name}.{key}"] = part(value) if isinstance(value, DTensor) else value.clone()
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


@sizes(2, 4)
def check_distributed_checkpoint(n_ranks: int) -> None:
    """Through ``torch.distributed.checkpoint`` onto the disk and back into a fresh model: the same bits, masters too,
    and training goes on with the same bits."""
    ranks = here()
    for mesh, dtype, name in (
        (ranks.flat, torch.bfloat16, "adamw"),
        (ranks.square, torch.float32, "adamw"),
        (ranks.flat, torch.bfloat16, "sgd"),
    ):
        model = sharded(mesh, dtype)
        optimizer = wrap(model, name, accumulation_steps=2)
        given = batches(4, ranks.rank, dtype=dtype)
        train(model, optimizer, given)
        before = everything(model, optimizer)
        saved_model, saved_optimizer = get_state_dict(model, optimizer)
        assert_same(before, everything(model, optimizer))
        folder = folder_of_all()
        dcp.save({"model": saved_model, "optimizer": saved_optimizer}, checkpoint_id=folder)

        fresh = sharded(mesh, dtype)
        with torch.no_grad():
            for param in fresh.parameters():
                param.zero_()
        other = wrap(fresh, name, accumulation_steps=2)
        held_model, held_optimizer = get_state_dict(fresh, other)
        held = {"model": held_model, "optimizer": held_optimizer}
        dcp.load(held, checkpoint_id=folder)
        set_state_dict(fresh, other, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
        assert_same(before, everything(fresh, other))
        for each, owner in ((model, optimizer), (fresh, other)):
            train(each, owner, batches(2, ranks.rank, seed=1, dtype=dtype))
        assert_same(everything(model, optimizer), everything(fresh, other))
        assert not torch.equal(part(model.inner.bias), before["inner.bias"])


def folder_of_all() -> str:
    """A new folder that all ranks see."""
    import tempfile

    told = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    return str(told[0])


def check_state_dict_in_an_open_window(n_ranks: int) -> None:
    """``state_dict`` of each rank, after micro-batch 2 of 3: the same bits as without the break. What is saved stays
    open: ``.grad`` is hidden again between micro-batches."""
    ranks = here()
    model = sharded(ranks.flat, torch.bfloat16)
    optimizer = wrap(model, accumulation_steps=3, statistics=True)
    given = batches(6, ranks.rank, dtype=torch.bfloat16)
    train(model, optimizer, given[:5])
    saved = copy.deepcopy(optimizer.state_dict())
    values = {name: part(param) for name, param in model.named_parameters()}
    fresh = sharded(ranks.flat, torch.bfloat16)
    with torch.no_grad():
        for name, param in fresh.named_parameters():
            param.to_local().copy_(values[name])
    other = wrap(fresh, accumulation_steps=3, statistics=True)
    other.load_state_dict(saved)
    for each, owner in ((model, optimizer), (fresh, other)):
        train(each, owner, given[5:])
        assert owner.stepped
    assert_same(everything(model, optimizer), everything(fresh, other))
    assert torch.equal(optimizer.stats()["micro_batch_norm"], other.stats()["micro_batch_norm"])


def check_states_of_plain_adamw_load(n_ranks: int) -> None:
    """A checkpoint of plain AdamW under FSDP2, sharded, and one of a single process, whole."""
    ranks = here()
    plain_model = sharded(ranks.flat)
    plain = OPTIMIZERS["adamw"](plain_model.parameters())
    loss_of(plain_model, batches(1, ranks.rank)[0]).backward()
    plain.step()
    saved = plain.state_dict()
    full = copy.deepcopy(saved)
    for held in full["state"].values():
        held.update({name: whole(value) for name, value in held.items() if isinstance(value, DTensor)})
    for state in (saved, full):
        model = sharded(ranks.flat)
        optimizer = wrap(model)
        optimizer.load_state_dict(state)
        for param, other in zip(model.parameters(), plain_model.parameters(), strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(part(optimizer.state[param][name]), part(plain.state[other][name]))
            assert optimizer.state[param]["step"].item() == 1
    full["state"][1]["exp_avg"] = full["state"][1]["exp_avg"][:1]
    with pytest.raises(ValueError, match=re.escape("exp_avg of shape (1, 7)")):
        optimizer.load_state_dict(full)


def check_masters_follow_a_load_of_the_model(n_ranks: int) -> None:
    ranks = here()
    model = sharded(ranks.flat, torch.bfloat16)
    optimizer = wrap(model, "sgd")
    train(model, optimizer, batches(1, ranks.rank, dtype=torch.bfloat16))
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    optimizer.step()
    assert all(torch.equal(part(param), torch.ones_like(part(param))) for param in model.parameters())


@sizes(4)
def check_two_meshes_in_one_optimizer(n_ranks: int) -> None:
    """A module that is sharded over all ranks and one that is replicated over half: each element counts once."""
    ranks = here()
    model = Net(torch.bfloat16)
    fully_shard(model.inner, mesh=ranks.flat)
    fully_shard(model.outer, mesh=ranks.square)
    model.gain.requires_grad_(False)
    optimizer = FusedAccumOptimizer(OPTIMIZERS["adamw"]([*model.inner.parameters(), *model.outer.parameters()]))
    loss_of(model, batches(1, ranks.rank, dtype=torch.bfloat16)[0]).backward()
    grads = [whole(param.grad) for group in optimizer.param_groups for param in group["params"]]
    want = sum(float(grad.double().square().sum()) for grad in grads) ** 0.5
    optimizer.step()
    assert abs(optimizer.grad_norm.item() - want) <= norm_rtol(91) * want
    assert same_on_all_ranks(optimizer.grad_norm)


def tensor_parallel(mesh: DeviceMesh, shard_mesh: DeviceMesh | None = None) -> tuple[nn.Module, nn.Module]:
    """A block whose first layer is split by columns and whose second by rows, and the same as one process has it."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 5))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    plain = copy.deepcopy(model)
    parallelize_module(model, mesh, plan)
    if shard_mesh is not None:
        fully_shard(model, mesh=shard_mesh)
    return model, plain


def check_tensor_parallel(n_ranks: int) -> None:
    """Without FSDP2: gradients come through autograd's own node. All ranks have the same batches.

    The bias of the second layer is on all ranks, and counts once in the norm. Tolerance: a gradient is a sum over 5
    rows (and 12 columns, cut in pieces) of products: 32 roundings at most of terms no larger than 13 times the largest.
    """
    ranks = here()
    model, plain = tensor_parallel(ranks.flat)
    optimizer = wrap(model, accumulation_steps=3, statistics=True)
    given = batches(3, 0)
    for i, batch in enumerate(given):
        (model(batch) ** 2).mean().backward()
        ((plain(batch) ** 2).mean() / 3).backward()
        if i < 2:
            optimizer.step()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        bound = 32 * U32 * 13 * float(other.grad.abs().max()) * 3
        torch.testing.assert_close(whole(param.grad), other.grad, rtol=0, atol=bound)
    want = sum(float(whole(param.grad).double().square().sum()) for param in model.parameters()) ** 0.5
    optimizer.step()
    assert abs(optimizer.grad_norm.item() - want) <= norm_rtol(91) * want
    assert same_on_all_ranks(optimizer.grad_norm)
    assert optimizer.stats()["micro_batch_norm"].isfinite()


@sizes(4)
def check_tensor_parallel_under_fsdp(n_ranks: int) -> None:
    """2 x 2: ranks of one tensor-parallel group have the same batches, the groups have their own."""
    ranks = here()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model, plain = tensor_parallel(mesh["tensor"], mesh["data"])
    optimizer = wrap(model, accumulation_steps=2, max_grad_norm=1e9)
    group = ranks.rank // 2
    for batch in batches(2, group):
        (model(batch) ** 2).mean().backward()
        held = [whole(param.grad) for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    for each in (0, 1):
        for batch in batches(2, each):
            ((plain(batch) ** 2).mean() / 4).backward()
    for grad, other in zip(held, plain.parameters(), strict=True):
        bound = 32 * U32 * 13 * float(other.grad.abs().max()) * 4
        torch.testing.assert_close(grad, other.grad, rtol=0, atol=bound)
    want = sum(float(grad.double().square().sum()) for grad in held) ** 0.5
    assert abs(optimizer.grad_norm.item() - want) <= norm_rtol(91) * want
    assert same_on_all_ranks(optimizer.grad_norm)


def check_a_gradient_that_is_still_a_sum_over_the_ranks(n_ranks: int) -> None:
    """A replicated parameter whose gradient the engine delivers as Partial: it is added up before it is accumulated."""
    ranks = here()
    torch.manual_seed(4)
    param = nn.Parameter(distribute_tensor(torch.randn(6, 3), ranks.flat, [Replicate()]))
    optimizer = FusedAccumOptimizer(torch.optim.SGD([param], lr=1.0), accumulation_steps=2)
    rows = torch.arange(8.0).view(4, 2, 1).expand(4, 2, 6)  # integers: every sum is exact
    seen: list[Any] = []
    for row in rows[:2]:
        x = distribute_tensor(row.contiguous(), ranks.flat, [Shard(0)])
        out = x @ param
        out.register_hook(lambda grad: seen.append(grad.placements))
        out.sum().backward()
        if len(seen) == 1:
            optimizer.step()
    want = rows[:2].sum((0, 1)).unsqueeze(1).expand(6, 3) / 2
    assert param.grad.placements == (Replicate(),)
    assert torch.equal(part(param.grad), want)
    optimizer.step()
    want_norm = float(want.double().square().sum()) ** 0.5
    assert abs(optimizer.grad_norm.item() - want_norm) <= norm_rtol(18) * want_norm


def check_refusals(n_ranks: int) -> None:
    ranks = here()
    sgd = torch.optim.SGD
    model = sharded(ranks.flat)
    plain = nn.Parameter(torch.zeros(2))
    with pytest.raises(RuntimeError, match="accepted: 1, or parameters that are all sharded by fully_shard"):
        FusedAccumOptimizer(sgd([*model.parameters(), plain], lr=0.1))
    split = DTensor.from_local(torch.zeros(2), ranks.flat, [Partial()], run_check=False)
    with pytest.raises(TypeError, match=r"is a DTensor with placement .*P.*; accepted: Shard, Replicate"):
        FusedAccumOptimizer(sgd([nn.Parameter(split)], lr=0.1))
    alone = init_device_mesh("cpu", (n_ranks // 2, 2), mesh_dim_names=("a", "b"))["a"]
    there = nn.Parameter(distribute_tensor(torch.zeros(4), alone, [Shard(0)]))
    with pytest.raises(ValueError, match=rf"mesh of {n_ranks // 2} of the {n_ranks} ranks .*; accepted: a mesh of all"):
        FusedAccumOptimizer(sgd([there], lr=0.1))
    with pytest.raises(TypeError, match="is a DTensor; accepted with process_group: plain tensors"):
        FusedAccumOptimizer(sgd(model.parameters(), lr=0.1), process_group=dist.group.WORLD)


def check_refused_backwards(n_ranks: int) -> None:
    """What FSDP2 would add without the window's scale is refused, on all ranks alike, and can be dropped."""
    ranks = here()
    model = sharded(ranks.flat)
    optimizer = wrap(model, accumulation_steps=2)
    a, b = batches(2, ranks.rank)
    loss_of(model, a).backward()
    with pytest.raises(RuntimeError, match=r"found the .grad of param_groups.* there, and FSDP2 added .* \(0.5\)"):
        loss_of(model, b).backward()
    optimizer.reset()
    assert all(param.grad is None for param in model.parameters())
    with pytest.raises(RuntimeError, match=r"micro_batch was called with sharded parameters.*backward\(loss, weight"):
        optimizer.micro_batch(3).__enter__()
    optimizer.backward(loss_of(model, a))
    optimizer.backward(loss_of(model, b))  # two in one micro-batch, announced
    twin = sharded(ranks.flat)
    for batch in (a, b):
        loss_of(twin, batch).backward()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(part(param.grad), part(other.grad) * 0.5)  # a power of two: no rounding


def check_judged_backwards(n_ranks: int) -> None:
    """A second backward that could not be judged by itself is refused; announced ones are judged."""
    ranks = here()
    model = sharded(ranks.flat)
    optimizer = wrap(model, nonfinite="skip_micro_batch")
    a, b = batches(2, ranks.rank)
    loss_of(model, a).backward()
    with pytest.raises(RuntimeError, match="FSDP2 added to it before it could be judged"):
        loss_of(model, b).backward()
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, a))
    optimizer.backward(loss_of(model, b))
    optimizer.step()
    assert optimizer.found_inf.item() == 0


def check_hooks_of_others_see_the_sum(n_ranks: int) -> None:
    ranks = here()
    model = sharded(ranks.flat)
    seen: list[Tensor] = []
    model.inner.weight.register_post_accumulate_grad_hook(lambda param: seen.append(part(param.grad)))
    optimizer = wrap(model, accumulation_steps=2)
    for batch in batches(2, ranks.rank):
        loss_of(model, batch).backward()
        assert torch.equal(seen[-1], part(model.inner.weight.grad))
        if len(seen) == 1:
            optimizer.step()
    assert len(seen) == 2
    assert not torch.equal(*seen)


def check_hyperparameters_by_group_and_flush(n_ranks: int) -> None:
    """Groups with settings of their own, and a short last window with its true divisor."""
    ranks = here()
    model = sharded(ranks.flat)
    groups = [{"params": [model.inner.weight], "lr": 0.0}, {"params": [model.outer.weight], "lr": 1.0}]
    optimizer = FusedAccumOptimizer(torch.optim.SGD(groups, lr=0.5), accumulation_steps=4)
    optimizer.add_param_group({"params": [model.inner.bias, model.outer.bias, model.gain]})
    before = {name: part(param) for name, param in model.named_parameters()}
    for batch in batches(2, ranks.rank):
        loss_of(model, batch).backward()
        grads = {name: part(param.grad) for name, param in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.flush()
    for name, param in model.named_parameters():
        lr = {"inner.weight": 0.0, "outer.weight": 1.0}.get(name, 0.5)
        # Two products and a difference in fp32; the accumulator holds a half of the mean.
        want = before[name].double() - lr * 2 * grads[name].double()
        bound = 4 * U32 * (float(want.abs().max()) + float(before[name].abs().max())) if want.numel() else 0.0
        torch.testing.assert_close(part(param).double(), want, rtol=0, atol=bound)
    optimizer.zero_grad()
    loss_of(model, batches(1, ranks.rank)[0]).backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="window of 1 of 4"):
        optimizer.reset()
    assert all(param.grad is None for param in model.parameters())
