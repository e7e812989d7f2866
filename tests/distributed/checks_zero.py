"""Checks that run on every rank of a group: sharded states step as whole ones do, and take 1/N of their memory."""

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
from models import DTYPES, OPTIMIZERS, U32, Oracle, Usage, inputs, loss_of, micro_grads, mlp, norm_of, norm_rtol
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fusedaccum
from fusedaccum import FusedAccumOptimizer
from fusedaccum.sharded_boundary import ShardedBoundary

K = 2


class Odd(nn.Module):
    """Parameters of all kinds: fewer rows than ranks, no elements, no dimensions, other orders of memory."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        shapes = {
            "uneven": (7, 3), "short": (1, 5), "two": (2, 33), "empty": (0, 4), "no_columns": (3, 0), "one": (1,),
            "late": (5,), "large": (40, 31), "dimless": (), "conv": (6, 3, 2, 2), "turned": (9, 5), "frozen": (3, 3),
        }  # fmt: skip
        for name, shape in shapes.items():
            values = torch.randn(shape).to(dtype)
            if name == "conv":
                values = values.to(memory_format=torch.channels_last)
            if name == "turned":
                values = torch.randn(shape[::-1]).to(dtype).t()
            setattr(self, name, nn.Parameter(values))
        self.single = nn.Parameter(torch.randn(3, 3))  # fp32 beside the others
        self.frozen.requires_grad_(False)
        self.unused: tuple[str, ...] = ()

    def forward(self, batch: Tensor) -> Tensor:
        x = batch.float()
        outs = [
            (param.float() * (1 + x.mean() * (i + 1)) + x.std()).square().sum()
            for i, (name, param) in enumerate(self.named_parameters())
            if name not in self.unused
        ]
        return torch.stack(outs).sum() / 100


def wrap(model: nn.Module, name: str = "adamw", **options: Any) -> FusedAccumOptimizer:
    """The optimizer ``name`` over all parameters, states sharded over all ranks."""
    return FusedAccumOptimizer(
        OPTIMIZERS[name](model.parameters()), process_group=dist.group.WORLD, **{"shard_states": True, **options}
    )


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Groups whose settings change in the middle of every shard."""
    params = list(model.parameters())
    return [
        {"params": params[0::3], "lr": 1e-2, "weight_decay": 0.0},
        {"params": params[1::3], "lr": 3e-2, "weight_decay": 0.3, "amsgrad": True},
        {"params": params[2::3], "lr": 2e-3, "betas": (0.5, 0.9), "maximize": True},
    ]


def whole(value: Tensor) -> Tensor:
    """All of a state."""
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def everything(model: nn.Module, optimizer: FusedAccumOptimizer) -> dict[str, Tensor]:
    """Parameters and whole states, by name."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = param.detach().clone()
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor):
                found[f"{name}.{key}"] = whole(value)
    return found


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Bit by bit."""
    assert a.keys() == b.keys(), set(a) ^ set(b)
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def assert_params_agree(model: nn.Module) -> None:
    """The same bits on all ranks."""
    bits = torch.cat([p.detach().contiguous().reshape(-1).view(torch.uint8) for p in model.parameters()])
    everybodys = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, bits)
    assert all(torch.equal(other, bits) for other in everybodys)


def batches_of(model: nn.Module, n: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return mine(inputs(n * dist.get_world_size(), dtype), dist.get_world_size())


def run(
    model: nn.Module, optimizer: FusedAccumOptimizer, batches: list[Tensor], weights: list[float] | None = None
) -> None:
    """Micro-batches with ``accumulation_steps``; the ranks' parameters agree after each boundary."""
    for i, batch in enumerate(batches):
        loss = model(batch) if isinstance(model, Odd) else loss_of(model, batch)
        optimizer.backward(loss, weight=None if weights is None else weights[i])
        optimizer.step()
        if optimizer.stepped:
            assert_params_agree(model)
            if isinstance(optimizer._boundary, ShardedBoundary):
                assert all(param.grad is None for group in optimizer.param_groups for param in group["params"])
        optimizer.zero_grad()


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
