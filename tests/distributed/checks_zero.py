"""Checks that run on every rank of a group: sharded states step as whole ones do, and take 1/N of their memory."""

from __future__ import annotations

import copy
import math

import torch
import torch.distributed as dist
from checks_window import mine, raised
from launch import sizes
from models import DTYPES, U32, Oracle, inputs, loss_of, micro_grads, mlp, norm_rtol
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from zero_models import K, Odd, assert_equal, assert_params_agree, batches_of, everything, groups_of, run, whole, wrap

import fusedaccum
from fusedaccum import FusedAccumOptimizer


def check_the_same_bits_as_without(n_ranks: int) -> None:
    """The sum of two ranks is one rounding whoever makes it, and the step is elementwise. Overlapped and not, in
    pieces of all sizes, in bfloat16 too, with settings that differ inside of a shard."""
    for dtype in DTYPES:
        start = Odd(dtype)
        batches = batches_of(start, 3 * K, dtype)
        for options in (
            {},
            {"bucket_bytes": 100},
            {"bucket_bytes": 700, "overlap": True},
            {"reduce_dtype": torch.bfloat16, "bucket_bytes": 300, "overlap": True},
            {"master_weights": False},
        ):
            if options and dtype is not torch.bfloat16:
                continue  # the way over the ranks is that of fp32 sums, whatever the parameters are
            results = []
            for shard in (False, True):
                model = copy.deepcopy(start)
                inner = torch.optim.AdamW(groups_of(model))
                optimizer = FusedAccumOptimizer(
                    inner, accumulation_steps=K, process_group=dist.group.WORLD, shard_states=shard,
                    statistics=True, **options
                )  # fmt: skip
                run(model, optimizer, batches)
                assert optimizer.stats()["windows"].item() == 3
                results.append(everything(model, optimizer))
                stats = optimizer.stats()["micro_batch_norm"]
                results[-1]["micro_batch_norm"] = stats.nan_to_num()
            micro = [result.pop("micro_batch_norm").item() for result in results]
            assert micro[0] == micro[1]
            assert_equal(*results)
            assert not torch.equal(results[0]["large"], start.large.detach())


def check_momentum_too(n_ranks: int) -> None:
    """SGD, whose first gradient becomes the buffer."""
    start = Odd(torch.bfloat16)
    batches = batches_of(start, 3 * K)
    results = []
    for shard in (False, True):
        model = copy.deepcopy(start)
        optimizer = wrap(model, "sgd", accumulation_steps=K, shard_states=shard)
        run(model, optimizer, batches)
        results.append(everything(model, optimizer))
    assert_equal(*results)


@sizes(2, 4)
def check_a_window_is_the_whole_batch(n_ranks: int) -> None:
    """Against fp64 on everybody's micro-batches: the norm, the clip, weights, and the update."""
    for dtype in (torch.float32, torch.bfloat16):
        for name in ("adamw", "sgd"):
            for weights in (None, [float(1 + 7 * i % 5) for i in range(4 * n_ranks)]):
                _compare_windows(dtype, name, weights, n_ranks)


def _compare_windows(dtype: torch.dtype, name: str, weights: list[float] | None, n_ranks: int) -> None:
    model = mlp(dtype)
    optimizer = wrap(model, name, accumulation_steps=4, max_grad_norm=0.05)
    alone = copy.deepcopy(model)
    oracle = Oracle(model, name)
    for _ in range(3):
        batches = inputs(4 * n_ranks, dtype)
        counts = weights or [1.0] * len(batches)
        with torch.no_grad():
            for param, other in zip(model.parameters(), alone.parameters(), strict=True):
                other.copy_(param)
        grads = micro_grads(alone, batches)
        for batch, weight in zip(mine(batches, n_ranks), mine(counts, n_ranks), strict=True):
            optimizer.backward(loss_of(model, batch), weight=None if weights is None else weight)
            optimizer.step()
        # The fp32 sums in some order of their own: of each term and of each addition the step sees one rounding.
        sums = [sum(g.double() * w for g, w in zip(column, counts, strict=True)) for column in zip(*grads, strict=True)]
        wanted = oracle.step(sums, max_norm=0.05, divisor=sum(counts))
        n_elems = sum(param.numel() for param in model.parameters())
        # 2n + 2 roundings of the sum of magnitudes, which here is at most 2^6 times the sum of those that count.
        assert abs(optimizer.grad_norm.item() / wanted - 1) <= norm_rtol(n_elems) + 2**6 * (2 * len(counts) + 2) * U32
        optimizer.zero_grad()
    # An average of Adam's may be as small as the error of its sum, where the update then is anybody's: compare by a
    # thousandth of what it moves in all.
    for param, want, before in zip(model.parameters(), oracle.params, oracle._start, strict=True):
        master = optimizer.state[param].get("master_param")
        got = param.detach() if master is None else whole(master)
        moved = (want.detach() - before).abs().max()
        assert (got.double() - want.detach()).abs().max() <= 1e-3 * moved
        if master is not None:
            assert torch.equal(param.detach(), got.to(dtype))
    assert_params_agree(model)


@sizes(2, 4)
def check_clip_as_without(n_ranks: int) -> None:
    """A clip multiplies by a norm whose squares are added in another order: a factor that is off by some U32, of
    which Adam's first steps see next to nothing, but every state does."""
    start = Odd()
    batches = batches_of(start, 2 * K)
    results = []
    for shard in (False, True):
        model = copy.deepcopy(start)
        optimizer = wrap(model, "sgd", accumulation_steps=K, max_grad_norm=0.5, shard_states=shard)
        run(model, optimizer, batches)
        results.append(everything(model, optimizer))
        results[-1]["norm"] = optimizer.grad_norm
    n_elems = sum(param.numel() for param in start.parameters())
    rtol = 2 * (norm_rtol(n_elems) + 2 * n_ranks * U32)
    for name, value in results[0].items():
        scale = value.abs().max() if value.numel() else torch.zeros(())
        # Two windows, of which the second begins at other parameters.
        assert ((results[1][name] - value).abs() <= 8 * rtol * scale + 8 * U32 * scale).all(), name


@sizes(1, 2, 4)
def check_state_bytes(n_ranks: int) -> None:
    """12/N a parameter element: all that lies in the arena's buffers, which are aligned to 256 bytes."""
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256), nn.Linear(256, 4)).to(torch.bfloat16)
    optimizer = wrap(model, accumulation_steps=1)
    run(model, optimizer, batches := [torch.randn(5, 256, dtype=torch.bfloat16)])
    n_elems = sum(param.numel() for param in model.parameters())
    n_params = len(list(model.parameters()))
    arenas = list(optimizer._registry.arenas.values())
    if n_ranks > 1:
        assert all(not arena.states and not arena.master.numel() for arena in arenas)
        assert arenas[0].acc.numel() * 4 <= 4 * n_elems + 256 * n_params
        shards = optimizer._boundary.shards.arenas
        assert all(
            part.acc.untyped_storage().data_ptr() == w.acc.untyped_storage().data_ptr() for w, part in shards.items()
        )
        arenas = list(shards.values())
    buffers = [buffer for arena in arenas for buffer in (*arena.states.values(), arena.master, arena.extra)]
    n_bytes = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
    assert 12 * n_elems / n_ranks <= n_bytes <= 12 * n_elems / n_ranks + 3 * 256 * n_params
    assert batches
    local = sum(
        (value.to_local() if isinstance(value, DTensor) else value).numel() * 4
        for param in model.parameters()
        for name, value in optimizer.state[param].items()
        if name != "step"
    )
    assert local == 12 * n_elems / n_ranks


@sizes(2, 4)
def check_which_part(n_ranks: int) -> None:
    """Cut along the dimension that is outermost in memory; the local part is where DTensor has it."""
    model = Odd(torch.bfloat16)
    optimizer = wrap(model, accumulation_steps=1)
    run(model, optimizer, batches_of(model, 1))
    dims = {"turned": 1, "short": 1, "empty": 1, "dimless": None}
    for name, param in model.named_parameters():
        if name == "frozen":
            assert param not in optimizer.state
            continue
        held = optimizer.state[param]
        wanted = Replicate() if dims.get(name, 0) is None else Shard(dims.get(name, 0))
        for key, value in held.items():
            if key == "step":
                assert value.item() == 1
                continue
            assert value.shape == param.shape
            assert value.placements == (wanted,), name
            assert whole(value).shape == param.shape
        if "master_param" in held:
            assert torch.equal(whole(held["master_param"]).to(param.dtype), param)


@sizes(2, 4)
def check_a_nan_on_one_rank_skips_on_all(n_ranks: int) -> None:
    """Parameters, states and counts are as they were, and the next window goes on."""
    for options in ({}, {"overlap": True, "loss_scale": fusedaccum.LossScale(init_scale=64.0)}):
        model = Odd(torch.float16)
        optimizer = wrap(model, accumulation_steps=K, **options)
        batches = batches_of(model, 3 * K)
        run(model, optimizer, batches[:K])
        before = everything(model, optimizer)
        bad = [batch.clone() for batch in batches[:K]]
        if dist.get_rank() == n_ranks - 1:
            bad[0][0, 0] = math.nan
        run(model, optimizer, bad)
        assert optimizer.found_inf.item() == 1
        assert optimizer.stats()["skipped"].item() == 1
        assert_equal(before, everything(model, optimizer))
        run(model, optimizer, batches[K : 2 * K])
        assert optimizer.found_inf.item() == 0
        assert optimizer.state[model.large]["step"].item() == 2


def check_nonfinite_modes(n_ranks: int) -> None:
    """ "raise" names the parameter on all ranks and leaves the window; "skip_micro_batch" leaves one out."""
    start = Odd()
    batches = batches_of(start, 2 * K)
    bad = [batch.clone() for batch in batches]
    if dist.get_rank() == 1:
        bad[0][0, 0] = math.inf
    model = copy.deepcopy(start)
    optimizer = wrap(model, accumulation_steps=1, nonfinite="raise")
    run(model, optimizer, batches[:1])
    before = everything(model, optimizer)
    model(bad[0]).backward()
    assert "on rank 1 holds an inf or NaN" in str(raised(optimizer.step))
    assert_equal(before, everything(model, optimizer))
    assert model.large.grad is not None
    optimizer.reset()
    run(model, optimizer, batches[1:2])
    results = []
    for shard in (False, True):
        model = copy.deepcopy(start)
        optimizer = wrap(model, accumulation_steps=K, nonfinite="skip_micro_batch", shard_states=shard)
        run(model, optimizer, bad)
        results.append(everything(model, optimizer))
    assert_equal(*results)


def check_unused_on_some_ranks(n_ranks: int) -> None:
    """What any rank has used steps everywhere; what none has does not, and does not age. Empty windows are none."""
    for overlap in (False, True):
        results = []
        for shard in (False, True):
            torch.manual_seed(3)
            model = Odd(torch.bfloat16)
            optimizer = wrap(model, accumulation_steps=K, overlap=overlap, shard_states=shard, bucket_bytes=200)
            batches = batches_of(model, 4 * K)
            run(model, optimizer, batches[:K])
            model.unused = ("large", "conv", "dimless", "one") if dist.get_rank() else ("large", "turned", "short")
            run(model, optimizer, batches[K : 2 * K])
            model.unused = ()
            run(model, optimizer, batches[2 * K : 3 * K])
            assert optimizer.state[model.large]["step"].item() == 2
            assert optimizer.state[model.conv]["step"].item() == 3
            for _ in range(K):
                optimizer.step()
                optimizer.zero_grad()
            results.append(everything(model, optimizer))
        assert_equal(*results)


def check_groups_and_parameters_that_come_later(n_ranks: int) -> None:
    """``add_param_group``, and a frozen parameter that is unfrozen: the states of the others stay."""
    results = []
    for shard in (False, True):
        torch.manual_seed(3)
        model, more = Odd(torch.bfloat16), Odd(torch.bfloat16)
        optimizer = wrap(model, accumulation_steps=K, shard_states=shard)
        batches = batches_of(model, 4 * K)
        run(model, optimizer, batches[:K])
        model.frozen.requires_grad_(True)
        run(model, optimizer, batches[K : 2 * K])
        optimizer.add_param_group({"params": [more.large, more.turned, more.one], "lr": 1e-3, "amsgrad": True})
        for group in optimizer.param_groups:
            group["amsgrad"] = True
        for batch in batches[2 * K :]:
            (model(batch) + more(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_params_agree(more)
        found = everything(model, optimizer)
        found.update({f"more.{name}": value for name, value in everything(more, optimizer).items()})
        assert "frozen.exp_avg" in found
        assert "more.one.max_exp_avg_sq" in found
        results.append(found)
    assert_equal(*results)


def check_a_parameter_that_leaves(n_ranks: int) -> None:
    """Its parts go; those of the others stay where they are. When it comes back it begins anew."""
    results = []
    for shard in (False, True):
        torch.manual_seed(3)
        model = Odd(torch.bfloat16)
        optimizer = wrap(model, accumulation_steps=K, shard_states=shard)
        batches = batches_of(model, 3 * K)
        run(model, optimizer, batches[:K])
        params = optimizer.param_groups[0]["params"]
        gone = params.pop(0)
        assert gone is model.uneven
        run(model, optimizer, batches[K : 2 * K])
        assert shard is (gone not in optimizer.state)
        optimizer.state.pop(gone, None)
        gone.grad = None
        optimizer.add_param_group({"params": [gone], "lr": 1e-3})
        run(model, optimizer, batches[2 * K :])
        assert optimizer.state[gone]["step"].item() == 1
        results.append(everything(model, optimizer))
    assert_equal(*results)
