"""Checks that run on every rank of a group: a window of all ranks is a window of one process with the whole batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from launch import sizes
from models import DTYPES, U32, Oracle, Usage, inputs, loss_of, micro_grads, mlp, norm_of, norm_rtol
from models import wrap as wrap_alone
from torch import Tensor, nn

from fusedaccum import FusedAccumOptimizer

K = 4


def wrap(model: nn.Module, name: str = "adamw", **options: Any) -> FusedAccumOptimizer:
    """The optimizer ``name`` over all parameters, wrapped, on all ranks."""
    return wrap_alone(model, name, process_group=dist.group.WORLD, **options)


def mine(everybodys: Sequence[Any], n_ranks: int) -> list[Any]:
    """This rank's share of what one process would have."""
    return list(everybodys[dist.get_rank() :: n_ranks])


def assert_same_on_all_ranks(model: nn.Module, optimizer: FusedAccumOptimizer) -> None:
    """Parameters, states and masters, bit by bit."""
    values = [param.detach() for param in model.parameters()]
    for param in model.parameters():
        values += [value for value in optimizer.state.get(param, {}).values() if isinstance(value, Tensor)]
    values += [value.nan_to_num(-1.0) for value in optimizer.stats().values()]
    bits = torch.cat([value.contiguous().reshape(-1).view(torch.uint8) for value in values])
    everybodys = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, bits)
    for others in everybodys:
        assert torch.equal(others, bits)


def raised(what: Any, *args: Any, **kwargs: Any) -> BaseException:
    """What a call raises; it must."""
    try:
        what(*args, **kwargs)
    except Exception as error:
        return error
    raise AssertionError(f"{what} did not raise")


def step_windows(
    model: nn.Module, optimizer: FusedAccumOptimizer, batches: list[Tensor], weights: list[float] | None = None
) -> None:
    """Micro-batches with ``accumulation_steps``."""
    for i, batch in enumerate(batches):
        optimizer.backward(loss_of(model, batch), weight=None if weights is None else weights[i])
        optimizer.step()
        optimizer.zero_grad()


@sizes(2, 4)
def check_a_window_is_the_whole_batch(n_ranks: int) -> None:
    """The sum, the norm and the update, against fp64 on everybody's micro-batches."""
    for dtype in DTYPES:
        for name in ("adamw", "sgd", "rmsprop"):
            for weights in (None, [float(1 + 7 * i % 5) for i in range(K * n_ranks)]):
                _compare_windows(dtype, name, weights, n_ranks)


def _compare_windows(dtype: torch.dtype, name: str, weights: list[float] | None, n_ranks: int) -> None:
    model = mlp(dtype)
    optimizer = wrap(model, name, accumulation_steps=K, max_grad_norm=0.05)
    oracle = Oracle(model, name)
    for _ in range(3):
        whole = inputs(K * n_ranks, dtype)
        grads = micro_grads(model, whole)
        counts = weights or [1.0] * len(whole)
        for batch, weight in zip(mine(whole, n_ranks), mine(counts, n_ranks), strict=True):
            optimizer.backward(loss_of(model, batch), weight=None if weights is None else weight)
            optimizer.step()
        assert optimizer.stepped
        # An optimizer without a fused rule is handed the mean, clipped, in .grad; the others multiply as they read.
        norm = optimizer.grad_norm.item()
        is_multiplied = name == "rmsprop"
        factor = K / sum(counts) * min(0.05 / (norm + 1e-6), 1.0) if is_multiplied else 1.0
        sums = []
        for param, column in zip(model.parameters(), zip(*grads, strict=True), strict=True):
            terms = [g.double() * w / K * factor for g, w in zip(column, counts, strict=True)]
            # Each of the n terms is rounded once when it is scaled, and the sums over micro-batches and over ranks
            # round n - 1 times, each time at most U32 of the sum of magnitudes; the factor rounds twice more.
            bound = (2 * len(terms) + 2 + 16 * is_multiplied) * U32 * sum(term.abs() for term in terms)
            assert param.grad.dtype is torch.float32
            assert ((param.grad.double() - sum(terms)).abs() <= bound).all()
            sums.append(param.grad.clone())
        # From here on with the bits that the step has seen, so that only the update's own arithmetic is left.
        if is_multiplied:
            wanted = oracle.step(sums) / factor * K / sum(counts)
        else:
            wanted = oracle.step(sums, max_norm=0.05, divisor=sum(counts) / K)
        n_elems = sum(param.numel() for param in model.parameters())
        assert abs(norm / wanted - 1) <= norm_rtol(n_elems) + 4 * U32 * is_multiplied
        optimizer.zero_grad()
    oracle.assert_matches(optimizer)
    assert_same_on_all_ranks(model, optimizer)


@sizes(2, 4)
def check_a_second_run_gives_the_same_bits(n_ranks: int) -> None:
    """With and without overlap too: the same pieces are summed in the same order. In bfloat16 as well."""
    start = Usage(6, torch.bfloat16)
    batches = mine(inputs(2 * K * n_ranks, torch.bfloat16), n_ranks)
    for reduce_dtype in (torch.float32, torch.bfloat16):
        runs = []
        for overlap in (False, False, True):
            model = copy.deepcopy(start)
            optimizer = wrap(
                model, accumulation_steps=K, overlap=overlap, reduce_dtype=reduce_dtype, bucket_bytes=500
            )  # fmt: skip
            step_windows(model, optimizer, batches)
            assert_same_on_all_ranks(model, optimizer)
            runs.append([param.detach() for param in model.parameters()])
        for other in runs[1:]:
            assert all(torch.equal(p, q) for p, q in zip(runs[0], other, strict=True))


def check_two_ranks_add_once(n_ranks: int) -> None:
    """The sum of two accumulators is one rounding: bit by bit what one addition gives, wherever it is cut."""
    for bucket_bytes in (100, 32 * 2**20):
        model = mlp(torch.bfloat16)
        optimizer = wrap(model, accumulation_steps=2, bucket_bytes=bucket_bytes)
        whole = inputs(2 * n_ranks, torch.bfloat16)
        grads = [micro_grads(model, whole[rank::n_ranks]) for rank in range(n_ranks)]
        for batch in mine(whole, n_ranks):
            loss_of(model, batch).backward()
            optimizer.step()
        for i, param in enumerate(model.parameters()):
            zero, one = (g[0][i].float() * 0.5 + g[1][i].float() * 0.5 for g in grads)
            assert torch.equal(param.grad, zero + one)


def check_bfloat16_rounds_each_ranks_sum(n_ranks: int) -> None:
    """Bit by bit: both sums are rounded, added in bfloat16, and widened again; 8 bits, so 2^-8 of the magnitudes."""
    model = mlp()
    optimizer = wrap(model, reduce_dtype=torch.bfloat16)
    whole = inputs(n_ranks)
    grads = micro_grads(model, whole)
    loss_of(model, mine(whole, n_ranks)[0]).backward()
    optimizer.step()
    for i, param in enumerate(model.parameters()):
        zero, one = (g[i].bfloat16() for g in grads)
        assert torch.equal(param.grad, (zero + one).float())


@sizes(2, 4)
def check_the_loops_own_windows(n_ranks: int) -> None:
    """Without accumulation_steps: the mean over the ranks of what the loop accumulated, as DDP has it."""
    model = mlp()
    optimizer = wrap(model, "sgd")
    oracle = Oracle(model, "sgd")
    whole = inputs(K * n_ranks)
    for batch in mine(whole, n_ranks):
        (loss_of(model, batch) / K).backward()
    optimizer.step()
    oracle.step([param.grad.clone() for param in model.parameters()], divisor=n_ranks)
    oracle.assert_matches(optimizer)
    assert_same_on_all_ranks(model, optimizer)


@sizes(2, 4)
def check_unused_parameters(n_ranks: int) -> None:
    """Some on this rank, some on that, some nowhere: the union takes part, and what lay in the buffers before does
    not. The others do not age. With overlap too, where nobody knows yet what the others have used."""
    for overlap in (False, True):
        model = Usage(6)
        optimizer = wrap(model, accumulation_steps=2, overlap=overlap, bucket_bytes=300)
        for window in range(4):
            used = [
                [[(rank + micro + window) % 6, (rank + window + 2) % 6] for micro in range(2)]
                for rank in range(n_ranks)
            ]  # layers of each rank's micro-batches
            grads = []
            whole = [inputs(2) for _ in range(n_ranks)]
            for batches, layers in zip(whole, used, strict=True):
                for batch, model.used in zip(batches, layers, strict=True):
                    grads += micro_grads(model, [batch])
            steps = [optimizer.state[p]["step"].item() if p in optimizer.state else 0 for p in model.parameters()]
            for batch, model.used in zip(whole[dist.get_rank()], used[dist.get_rank()], strict=True):
                loss_of(model, batch).backward()
                optimizer.step()
            for param, column, step in zip(model.parameters(), zip(*grads, strict=True), steps, strict=True):
                terms = [g.double() / 2 for g in column if g is not None]
                assert (param.grad is None) == (not terms)
                if terms:
                    bound = 2 * len(terms) * U32 * sum(term.abs() for term in terms)
                    assert ((param.grad.double() - sum(terms)).abs() <= bound).all()
                    assert optimizer.state[param]["step"].item() == step + 1
                elif param in optimizer.state:
                    assert optimizer.state[param]["step"].item() == step
            norm = norm_of(param.grad for param in model.parameters()) / n_ranks
            assert abs(optimizer.grad_norm.item() / norm - 1) <= norm_rtol(10**6)
            optimizer.zero_grad()
        assert_same_on_all_ranks(model, optimizer)


@sizes(2, 4)
def check_empty_windows(n_ranks: int) -> None:
    """A rank without a backward, with each kind of window; and all of them."""
    for steps, weighted, overlap in (
        (None, False, False), (None, True, True), (2, False, True), (2, True, False), (1, True, True),
    ):  # fmt: skip
        model = mlp()
        optimizer = wrap(model, accumulation_steps=steps, overlap=overlap, max_grad_norm=1.0)
        before = [param.detach().clone() for param in model.parameters()]
        batch = inputs(1)[0]
        if dist.get_rank() > 0:
            optimizer.backward(loss_of(model, batch), weight=3.0 if weighted else None)
        for _ in range(steps or 1):
            optimizer.step()
        assert optimizer.stepped
        (whole,) = micro_grads(Usage_of(model, before), [batch])
        # A micro-batch without a backward counts 1, on a rank without any among weighted ones 0.
        share = 3 / (3 + (steps or 1) - 1) if weighted else (n_ranks - 1) / n_ranks / (steps or 1)
        norm = norm_of(whole) * share
        assert abs(optimizer.grad_norm.item() / norm - 1) <= 1e-5  # fp32 sums of at most 12 equal gradients
        assert_same_on_all_ranks(model, optimizer)
        optimizer.zero_grad()
        before = [param.detach().clone() for param in model.parameters()]
        for _ in range(steps or 1):
            optimizer.step()  # nobody has anything
        assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
        assert_same_on_all_ranks(model, optimizer)


def Usage_of(model: nn.Module, values: list[Tensor]) -> nn.Module:  # noqa: N802
    """The model with other values."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param, value in zip(twin.parameters(), values, strict=True):
            param.copy_(value)
    return twin


def check_weights_of_the_device(n_ranks: int) -> None:
    """A weight that is a tensor, on one rank; on the other a number."""
    model = mlp()
    optimizer = wrap(model, "sgd", accumulation_steps=2)
    oracle = Oracle(model, "sgd")
    whole = inputs(2 * n_ranks)
    weights = [2.0, 5.0, 0.0, 7.0]
    for batch, weight in zip(mine(whole, n_ranks), mine(weights, n_ranks), strict=True):
        optimizer.backward(loss_of(model, batch), weight=torch.tensor(weight) if dist.get_rank() else weight)
        optimizer.step()
    oracle.step([param.grad.clone() for param in model.parameters()], divisor=14.0 / 2)
    oracle.assert_matches(optimizer)
    assert_same_on_all_ranks(model, optimizer)
    optimizer.zero_grad()
    for batch in mine(whole, n_ranks):
        optimizer.backward(loss_of(model, batch), weight=0)
        optimizer.step()
    assert optimizer.stepped
    assert optimizer.skipped.item() == 1
    assert optimizer.found_inf.item() == 0


@sizes(2, 4)
def check_statistics_are_those_of_one_process(n_ranks: int) -> None:
    """micro_batch_norm and the noise scale, over everybody's micro-batches."""
    model = mlp()
    optimizer = wrap(model, accumulation_steps=K, statistics=True)
    whole = inputs(K * n_ranks)
    grads = micro_grads(model, whole)
    step_windows(model, optimizer, mine(whole, n_ranks))
    squares = [norm_of(grad) ** 2 for grad in grads]
    small = sum(squares) / len(squares)
    mean = [sum(g.double() for g in column) / len(whole) for column in zip(*grads, strict=True)]
    big, n = norm_of(mean) ** 2, len(whole)
    stats = optimizer.stats()
    assert abs(stats["micro_batch_norm"].item() / math.sqrt(small) - 1) <= 1e-5
    grad_sq, noise = (n * big - small) / (n - 1), (small - big) / (1 - 1 / n)
    # The differences of sums of fp32 squares; each is known to about 1e-6.
    assert abs(stats["noise_scale"].item() / (noise / grad_sq) - 1) <= 1e-3
    assert_same_on_all_ranks(model, optimizer)


def check_flush_waits_for_the_longest(n_ranks: int) -> None:
    """Rank 0 has 5 micro-batches, rank 1 has 13, of windows of 4: flush() takes part until all have come."""
    for overlap in (False, True):
        torch.manual_seed(1)
        model = mlp()
        optimizer = wrap(model, "sgd", accumulation_steps=4, overlap=overlap)
        for batch in inputs(13 if dist.get_rank() else 5):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.flush() is True
        assert optimizer.stepped
        optimizer.zero_grad()
        assert optimizer.stats()["windows"].item() == 4
        assert optimizer.flush() is False
        assert not optimizer.stepped
        assert_same_on_all_ranks(model, optimizer)


def check_flush_divides_by_what_all_had(n_ranks: int) -> None:
    """3 micro-batches here and 1 there, of 4: sum(g) / 4 of these, not of 8."""
    model = mlp()
    optimizer = wrap(model, "sgd", accumulation_steps=4)
    oracle = Oracle(model, "sgd")
    for batch in inputs(1 if dist.get_rank() else 3):
        loss_of(model, batch).backward()
        optimizer.step()
    assert optimizer.flush()
    oracle.step([param.grad.clone() for param in model.parameters()], divisor=4 / 4)
    oracle.assert_matches(optimizer)


def check_clip_grad_norm(n_ranks: int) -> None:
    """The norm of everybody's gradient, and a clip that the step then makes; without a second sum."""
    for steps, overlap in ((None, False), (2, True)):
        model = mlp()
        optimizer = wrap(model, "sgd", accumulation_steps=steps, overlap=overlap)
        oracle = Oracle(model, "sgd")
        whole = inputs(2 * n_ranks)
        for i, batch in enumerate(mine(whole, n_ranks)):
            loss_of(model, batch).backward()
            if i == 1:
                norm = optimizer.clip_grad_norm_(0.01)
                error = raised(loss_of(model, batch).backward)
                assert "came after the sum over the ranks had begun" in str(error)
            if steps or i == 1:
                optimizer.step()
        grads = [param.grad.clone() for param in model.parameters()]
        wanted = oracle.step(grads, max_norm=0.01, divisor=n_ranks)
        assert abs(norm.item() / wanted - 1) <= norm_rtol(10**6)
        oracle.assert_matches(optimizer)
        optimizer.zero_grad()
        loss_of(model, whole[0]).backward()
        optimizer.clip_grad_norm_(0.01)
        if steps is None:
            optimizer.zero_grad()  # dropped on all ranks, as loops do that see a norm they do not like
            loss_of(model, whole[0]).backward()
            optimizer.step()
            assert abs(optimizer.grad_norm.item() / norm_of(micro_grads(model, whole[:1])[0]) - 1) < 0.1
        else:
            optimizer.zero_grad()
            optimizer.step()
            optimizer.flush()
        assert_same_on_all_ranks(model, optimizer)


def check_used_gradients_count_once(n_ranks: int) -> None:
    """What a boundary has left in .grad is a sum over the ranks already, and must not be summed again."""
    model = mlp()
    optimizer = wrap(model, "sgd")
    loss_of(model, inputs(1)[0]).backward()
    optimizer.step()
    after = [param.detach().clone() for param in model.parameters()]
    error = raised(loss_of(model, inputs(1)[0]).backward)
    assert "summed over the ranks; accepted: zero_grad() after each boundary" in str(error)
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(after, model.parameters(), strict=True))
    loss_of(model, inputs(1)[0]).backward()
    optimizer.step()
    assert not any(torch.equal(p, q) for p, q in zip(after, model.parameters(), strict=True))


def check_a_parameter_unfrozen_on_the_way(n_ranks: int) -> None:
    """It gets the same place on all ranks, whoever uses it first."""
    model = Usage(4)
    for i in (0, 2):
        model.layers[i].requires_grad_(False)
    optimizer = wrap(model, accumulation_steps=1)
    for _ in range(2):
        loss_of(model, inputs(1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for i in (0, 2):
        model.layers[i].requires_grad_(True)
    model.used = [2, 1] if dist.get_rank() else [0, 3]
    loss_of(model, inputs(1)[0]).backward()
    optimizer.step()
    assert all(param.grad is not None for param in model.parameters())
    assert_same_on_all_ranks(model, optimizer)
