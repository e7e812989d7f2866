"""Checks that run on every rank of a group: what users and torch do to an optimizer with sharded states."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks_window import mine, raised, step_windows
from launch import sizes
from models import OPTIMIZERS, U32, Usage, inputs, loss_of, micro_grads, mlp, norm_of, norm_rtol
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from zero_models import K, Odd, assert_equal, assert_params_agree, batches_of, everything, run, whole, wrap

import fusedaccum
from fusedaccum import FusedAccumOptimizer


@sizes(2, 4)
def check_copies_are_bounded(n_ranks: int) -> None:
    """Two matrices travel at a time, together no larger than ``bucket_bytes``, whatever the parameters' sizes; and a
    rank that is alone in asking for its state_dict does not wait for the others."""
    model = Odd(torch.bfloat16)
    optimizer = wrap(model, accumulation_steps=1, bucket_bytes=1024)
    ranks = optimizer._boundary.shards.ranks
    n_bytes: dict[str, list[int]] = {"start_scatter": [], "start_gather": []}
    for name, place in (("start_scatter", 1), ("start_gather", 0)):
        start = getattr(ranks, name)

        def noting(*tensors: Tensor, start: Any = start, name: str = name, place: int = place) -> Any:
            n_bytes[name].append(tensors[place].numel() * tensors[place].element_size())
            return start(*tensors)

        setattr(ranks, name, noting)
    run(model, optimizer, batches_of(model, 1))
    for sizes_of in n_bytes.values():
        assert len(sizes_of) > 3
        assert max(sizes_of) <= 512
    if dist.get_rank() == 0:
        optimizer.state_dict()


def check_a_rank_lost_on_the_way_back(n_ranks: int) -> None:
    """The exchange of stepped parameters fails: says what is and is not done, and every later step is refused."""
    model = mlp()
    optimizer = wrap(model, accumulation_steps=1)
    run(model, optimizer, batches_of(model, 1))
    ranks = optimizer._boundary.shards.ranks

    class Lost:
        def wait(self) -> None:
            raise RuntimeError("Connection closed by peer")

    ranks.start_gather = lambda into, mine: Lost()  # type: ignore[method-assign, assignment]
    loss_of(model, inputs(1)[0]).backward()
    error = raised(optimizer.step)
    assert type(error).__name__ == "RankLostError"
    assert "the exchange of the stepped parameters failed" in str(error)
    assert "This rank has stepped its own shard, and may not have all parameters of the others" in str(error)
    assert str(raised(optimizer.step)) == str(error)


def check_only_empty_parts_are_new(n_ranks: int) -> None:
    """A new parameter of which rank 1 has nothing: its count is a live one there too."""
    model = mlp()
    optimizer = wrap(model, accumulation_steps=1)
    run(model, optimizer, batches_of(model, 1))
    extra = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [extra]})
    for batch in batches_of(model, 2):
        (loss_of(model, batch) * extra.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state[extra]["step"].item() == 2
    assert optimizer.state[model[0].weight]["step"].item() == 3


def check_writes_between_boundaries(n_ranks: int) -> None:
    """A parameter that somebody has written to is taken into the master, on the rank whose part it is."""
    results = []
    for shard in (False, True):
        torch.manual_seed(3)
        model = Odd(torch.bfloat16)
        optimizer = wrap(model, accumulation_steps=1, shard_states=shard)
        batches = batches_of(model, 3)
        run(model, optimizer, batches[:1])
        with torch.no_grad():
            model.large[3:30:5] = 2.0
            model.dimless.fill_(1.5)
        run(model, optimizer, batches[1:2])
        model.turned.data = torch.randn(5, 9).to(torch.bfloat16).t()
        model.large.data.copy_(torch.ones(40, 31))
        optimizer.sync_masters()
        run(model, optimizer, batches[2:])
        results.append(everything(model, optimizer))
    assert_equal(*results)


@sizes(2, 4)
def check_clip_grad_norm(n_ranks: int) -> None:
    """Makes the sum, returns everybody's norm, and takes ``.grad`` away; a window may be dropped after it."""
    for steps, overlap in ((None, False), (2, True)):
        model = mlp()
        optimizer = wrap(model, "sgd", accumulation_steps=steps, overlap=overlap)
        whole_batch = inputs(2 * n_ranks)
        grads = micro_grads(model, whole_batch)
        mean = [sum(g.double() for g in c) / n_ranks / (steps or 1) for c in zip(*grads, strict=True)]
        before = [param.detach().clone() for param in model.parameters()]
        for i, batch in enumerate(mine(whole_batch, n_ranks)):
            loss_of(model, batch).backward()
            if i == 1:
                norm = optimizer.clip_grad_norm_(0.01)
                assert torch.equal(norm, optimizer.clip_grad_norm_(0.01))
                assert all(param.grad is None for param in model.parameters())
                assert "came after the sum over the ranks had begun" in str(raised(loss_of(model, batch).backward))
                assert "are being summed over the ranks" in str(raised(optimizer.state_dict))
            if steps or i == 1:
                optimizer.step()
        # 3 roundings a term, of magnitudes that are not 2^6 times what is left of them.
        assert abs(norm.item() / norm_of(mean) - 1) <= norm_rtol(10**6) + 2**6 * 6 * n_ranks * U32
        factor = 0.01 / (norm_of(mean) + 1e-6)
        for param, was, g in zip(model.parameters(), before, mean, strict=True):
            wanted = was.double() - 1e-2 * (factor * g + 0.01 * was.double())
            assert (param.detach().double() - wanted).abs().max() <= 4 * U32 * was.abs().max()
        loss_of(model, whole_batch[0]).backward()
        if steps is None:
            optimizer.clip_grad_norm_(0.01)
            optimizer.zero_grad()  # dropped on all ranks
            loss_of(model, whole_batch[0]).backward()
            optimizer.step()
            assert abs(optimizer.grad_norm.item() / norm_of(micro_grads(model, whole_batch[:1])[0]) - 1) < 0.1
        else:
            optimizer.step()
            optimizer.flush()
        assert_params_agree(model)


def check_flush_and_scalers(n_ranks: int) -> None:
    """A short window of unequal ranks, and ``fusedaccum.GradScaler``: as without."""
    results = []
    for shard in (False, True):
        torch.manual_seed(3)
        model = Odd(torch.float16)
        optimizer = wrap(model, accumulation_steps=4, shard_states=shard)
        batches = batches_of(model, 8)
        for batch in batches[: 5 if dist.get_rank() else 2]:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.flush()
        optimizer.zero_grad()
        assert_params_agree(model)
        scaler = fusedaccum.GradScaler("cpu", init_scale=256.0)
        for batch in batches[:4]:
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert optimizer.stats()["windows"].item() == 3
        results.append(everything(model, optimizer))
    assert_equal(*results)


def check_statistics(n_ranks: int) -> None:
    """The noise scale is that of the run without shards, but for the order in which squares are added."""
    told = []
    for shard in (False, True):
        torch.manual_seed(3)
        model = mlp()
        optimizer = wrap(model, accumulation_steps=4, shard_states=shard, statistics=True)
        run(model, optimizer, batches_of(model, 8))
        told.append(optimizer.stats())
    for name in told[0]:
        assert math.isclose(told[0][name].item(), told[1][name].item(), rel_tol=1e-5), name
    assert not math.isnan(told[1]["noise_scale"].item())


def check_resume_in_an_open_window(n_ranks: int) -> None:
    """Each rank's own state_dict, after micro-batch 1 of 2, through torch.save: goes on with the same bits."""
    import io

    start = Odd(torch.bfloat16)
    batches = batches_of(start, 3 * K)
    runs = []
    for breaks in (False, True):
        model = copy.deepcopy(start)
        optimizer = wrap(model, accumulation_steps=K)
        run(model, optimizer, batches[: K + 1])
        if breaks:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer._window.close()
            model = copy.deepcopy(model)
            optimizer = wrap(model, accumulation_steps=K)
            optimizer.load_state_dict(torch.load(file, weights_only=False))
        run(model, optimizer, batches[K + 1 :])
        assert optimizer.stats()["windows"].item() == 3
        runs.append(everything(model, optimizer))
    assert_equal(*runs)


def check_states_of_plain_adamw(n_ranks: int) -> None:
    """A plain optimizer's whole states load, and ours, gathered, load into a plain wrapper on one process; back too."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model = Odd(torch.bfloat16)
    optimizer = wrap(model, accumulation_steps=1)
    batches = batches_of(model, 2)
    run(model, optimizer, batches[:1])
    full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    names = [name for name, _ in model.named_parameters()]
    index = {name: i for i, name in enumerate(names)}
    assert not any(isinstance(v, DTensor) for held in full["state"].values() for v in held.values())
    plain_format = optimizer.state_dict()
    plain_format.pop("fusedaccum")
    plain_format["state"] = {index[name]: held for name, held in full["state"].items()}
    alone_model = copy.deepcopy(model)
    alone = FusedAccumOptimizer(OPTIMIZERS["adamw"](alone_model.parameters()), accumulation_steps=1,
                                process_group=dist.group.WORLD)  # fmt: skip
    alone.load_state_dict(plain_format)
    assert_equal(everything(model, optimizer), everything(alone_model, alone))
    assert "as a DTensor" in str(raised(alone.load_state_dict, optimizer.state_dict()))
    back_model = copy.deepcopy(model)
    back = wrap(back_model, accumulation_steps=1)
    back.load_state_dict(alone.state_dict())
    for each, owner in ((model, optimizer), (alone_model, alone), (back_model, back)):
        run(each, owner, batches[1:])
    assert_equal(everything(model, optimizer), everything(alone_model, alone))
    assert_equal(everything(model, optimizer), everything(back_model, back))


def check_remove(n_ranks: int) -> None:
    """Gives back whole states, which the plain optimizer steps with."""
    model = mlp()
    optimizer = wrap(model, accumulation_steps=1)
    run(model, optimizer, batches_of(model, 1))
    held = everything(model, optimizer)
    inner = optimizer.remove()
    assert_equal(held, {**{n: p.detach() for n, p in model.named_parameters()}, **{
        f"{n}.{k}": v for n, p in model.named_parameters() for k, v in inner.state[p].items()}})  # fmt: skip
    loss_of(model, inputs(1)[0]).backward()
    inner.step()


def check_refusals(n_ranks: int) -> None:
    """Each names the option, what was found and what is accepted, on all ranks."""
    model = mlp()
    wrapped = OPTIMIZERS["adamw"](model.parameters())
    error = raised(FusedAccumOptimizer, wrapped, process_group=dist.group.WORLD, shard_states=1)
    assert str(error) == "shard_states is 1; accepted: True, False"
    error = raised(FusedAccumOptimizer, wrapped, shard_states=True)
    assert "shard_states is True without a process_group; accepted: False" in str(error)
    error = raised(wrap, model, "rmsprop")
    assert "shard_states is True with RMSprop" in str(error)
    assert "accepted: torch.optim's Adam, AdamW and SGD" in str(error)
    optimizer = wrap(model, accumulation_steps=1)
    run(model, optimizer, batches_of(model, 1))
    held = optimizer.state_dict()
    before = everything(model, optimizer)
    mesh = init_device_mesh("cpu", (2, 1))
    average = whole(held["state"][0]["exp_avg"])
    placed = distribute_tensor(average, mesh, [Shard(0), Replicate()])
    held["state"] = {**held["state"], 0: {**held["state"][0], "exp_avg": placed}}
    error = raised(optimizer.load_state_dict, held)
    assert "loaded state dict has exp_avg of param_groups[0]['params'][0] on the mesh DeviceMesh" in str(error)
    assert "accepted: on the parameter's (DeviceMesh" in str(error)
    assert_equal(before, everything(model, optimizer))
    run(model, optimizer, batches_of(model, 1))
    optimizer.remove()
    error = raised(wrap, model, shard_states=dist.get_rank() == 0)
    assert "shard_states is True on rank 0 and False on rank 1; accepted: the same" in str(error)
    turned = nn.Parameter(torch.randn(4, 3, 2, 2))
    optimizer = FusedAccumOptimizer(
        torch.optim.SGD([turned], lr=0.1), process_group=dist.group.WORLD, shard_states=True
    )
    turned.square().sum().backward()
    optimizer.step()
    turned.data = turned.data.to(memory_format=torch.channels_last)
    turned.square().sum().backward()
    error = raised(optimizer.step)
    assert "had the strides (12, 4, 2, 1) and now has (12, 1, 6, 3), and its states are sharded; accepted" in str(error)


def check_a_group_of_some_ranks(n_ranks: int) -> None:
    """Subgroups of one: as plain. Nothing of torch warns on the way."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        groups = [dist.new_group([rank]) for rank in range(n_ranks)]
        model = mlp()
        inner = OPTIMIZERS["adamw"](model.parameters())
        optimizer = FusedAccumOptimizer(inner, process_group=groups[dist.get_rank()], shard_states=True)
        loss_of(model, inputs(1)[0]).backward()
        optimizer.step()
        assert not any(isinstance(value, DTensor) for value in optimizer.state[model[0].weight].values())
        model = mlp()
        optimizer = wrap(model)
        loss_of(model, inputs(1)[0]).backward()
        optimizer.step()


@sizes(2, 4)
def check_more_layers_than_buckets(n_ranks: int) -> None:
    """Layers that ranks use in other orders and numbers, overlapped, over many windows: nobody waits in vain."""
    model = Usage(6, torch.bfloat16)
    optimizer = wrap(model, accumulation_steps=K, overlap=True, bucket_bytes=500)
    batches = batches_of(model, 4 * K, torch.bfloat16)
    step_windows(model, optimizer, batches)
    assert_params_agree(model)
    assert optimizer.stats()["windows"].item() == 4


def check_names_of_older_torch(n_ranks: int) -> None:
    """Before torch 2.13 both collectives have another name: that is then called, and gives the same bits."""
    start = Odd(torch.bfloat16)
    batches = batches_of(start, 2 * K)
    results, called = [], []

    def noting(name: str) -> Any:
        call = getattr(dist, name)

        def note(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # newer torch's, of the name
                return call(*args, **kwargs)

        return note

    for is_older in (False, True):
        model = copy.deepcopy(start)
        optimizer = wrap(model, accumulation_steps=K)
        with pytest.MonkeyPatch.context() as patch:
            for new, old in (
                ("reduce_scatter_single", "reduce_scatter_tensor"),
                ("all_gather_single", "all_gather_into_tensor"),
            ):
                patch.setattr(dist, old, noting(old))
                if is_older:
                    patch.delattr(dist, new, raising=False)
            run(model, optimizer, batches)
        if hasattr(dist, "reduce_scatter_single"):
            assert is_older is bool(called)
        results.append(everything(model, optimizer))
    assert set(called) == {"reduce_scatter_tensor", "all_gather_into_tensor"}
    assert_equal(*results)
