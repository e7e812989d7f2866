"""The wrapper under FSDP2: skips, weights, loss scales, modules that run twice. Run by worker.py on every rank."""

from __future__ import annotations

import pytest
import torch
from fsdp_models import (
    Net,
    assert_matches,
    batches,
    fp32_sums,
    here,
    loss_of,
    norm_of,
    part,
    sharded,
    whole,
    wrap,
)
from launch import sizes
from models import U32, Oracle, norm_rtol
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from fusedaccum import FusedAccumOptimizer


@sizes(2, 4)
def check_a_nan_on_one_rank_skips_on_all(n_ranks: int) -> None:
    """An element of one rank's shard only: what the others hold is finite, and they must not step."""
    ranks = here()
    model = sharded(ranks.flat, torch.bfloat16)
    optimizer = wrap(model)
    for bad in (True, False):
        before = [part(param) for param in model.parameters()]
        loss_of(model, batches(1, ranks.rank, dtype=torch.bfloat16)[0]).backward()
        if bad and ranks.rank == 0:
            model.inner.weight.grad.to_local()[0, 0] = torch.nan
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.found_inf.item() == bad
        moved = [
            not torch.equal(part(p), was) for p, was in zip(model.parameters(), before, strict=True) if was.numel()
        ]
        assert not any(moved) if bad else any(moved)
        assert all(state["step"].item() == (not bad) for state in optimizer.state.values())


def check_found_inf_that_one_rank_was_told_of(n_ranks: int) -> None:
    ranks = here()
    model = sharded(ranks.flat)
    optimizer = wrap(model)
    loss_of(model, batches(1, ranks.rank)[0]).backward()
    optimizer.found_inf = torch.tensor(float(ranks.rank == 1))
    optimizer.step()
    assert optimizer.found_inf.item() == 1
    del optimizer.found_inf


def check_nonfinite_raise(n_ranks: int) -> None:
    """All ranks raise, the one that has it with the parameter's name."""
    ranks = here()
    model = sharded(ranks.flat)
    optimizer = wrap(model, nonfinite="raise")
    loss_of(model, batches(1, ranks.rank)[0]).backward()
    if ranks.rank == 1:
        model.inner.weight.grad.to_local()[0, 0] = torch.inf
    name = r"param_groups\[0\]\['params'\]\[\d\]" if ranks.rank == 1 else "a parameter, on another rank,"
    with pytest.raises(FloatingPointError, match=f"gradient of {name} holds an inf"):
        optimizer.step()
    optimizer.zero_grad()


@sizes(2, 4)
def check_nonfinite_skip_micro_batch(n_ranks: int) -> None:
    """A NaN in one rank's micro-batch: all leave that micro-batch out, and the others make the mean."""
    ranks = here()
    model = sharded(ranks.flat)
    given = batches(3, ranks.rank)
    want = fp32_sums(model, [given[0], given[2]], 1 / 3)
    if ranks.rank == 0:
        given[1][0, 0] = torch.nan
    optimizer = wrap(model, nonfinite="skip_micro_batch", accumulation_steps=3)
    for i, batch in enumerate(given):
        loss_of(model, batch).backward()
        if i < 2:
            optimizer.step()
    for param, sum_ in zip(model.parameters(), want, strict=True):
        assert torch.equal(part(param.grad), sum_)
    want_norm = norm_of(model) * 3 / 2
    optimizer.step()
    assert optimizer.found_inf.item() == 0
    assert abs(optimizer.grad_norm.item() - want_norm) <= norm_rtol(91) * want_norm


def check_windows_without_gradient_sync(n_ranks: int) -> None:
    """FSDP2 adds up unsharded gradients by itself and reduces once: one gradient, divided as the window says.

    With ``reduce_dtype`` its sum is in that, exact to fp32; without it is autograd's, in bf16 here.
    """
    ranks = here()
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.float32)):
        model, twin = (sharded(ranks.flat, torch.bfloat16, policy) for _ in range(2))
        given = batches(3, ranks.rank, dtype=torch.bfloat16)
        optimizer = wrap(model, accumulation_steps=3)
        for i, batch in enumerate(given):
            for each in (model, twin):
                each.set_requires_gradient_sync(i == 2)
                loss_of(each, batch).backward()
            if i < 2:
                assert all(param.grad is None for param in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(part(param.grad), part(other.grad).float() * (1 / 3))
        optimizer.step()
        assert optimizer.stepped
        assert optimizer.skipped.item() == 0


@sizes(2, 4)
def check_weights(n_ranks: int) -> None:
    """Micro-batches of other weights on each rank: sum(w g) / sum(w) over all of them. One rank has one of weight 0.

    Also where FSDP2 reduces once, at the end of the window. Tolerance as in
    ``check_equals_one_process_with_the_whole_batch``, with one more rounding for the weight.
    """
    ranks = here()

    def weight_of(i: int, rank: int) -> int:
        return 0 if (i, rank) == (1, 1) else 3 + 2 * i + 5 * rank

    n = 3
    single = Net().double()
    pieces, total = [], 0
    for rank in range(ranks.world):
        for i, batch in enumerate(batches(n, rank)):
            grads = torch.autograd.grad((single(batch.double()) ** 2).mean(), list(single.parameters()))
            pieces.append([grad * weight_of(i, rank) for grad in grads])
            total += weight_of(i, rank)
    for steps, syncs, on_device in ((None, True, False), (n, True, True), (n, False, False)):
        model = sharded(ranks.flat)
        start = [whole(param).double() for param in model.parameters()]
        optimizer = FusedAccumOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), accumulation_steps=steps)
        for i, batch in enumerate(batches(n, ranks.rank)):
            weight = weight_of(i, ranks.rank)
            model.set_requires_gradient_sync(syncs or i == n - 1)
            optimizer.backward(loss_of(model, batch), weight=torch.tensor(weight) if on_device else weight)
            if steps is not None:
                optimizer.step()
        if steps is None:
            optimizer.step()
        assert optimizer.stepped
        for i, (param, was) in enumerate(zip(model.parameters(), start, strict=True)):
            want = sum(piece[i] for piece in pieces) / total
            magnitude = 13 * max(float(piece[i].abs().max()) for piece in pieces) * len(pieces) / total
            bound = (40 + ranks.world + n) * U32 * magnitude + U32 * float(was.abs().max() + want.abs().max())
            torch.testing.assert_close(was - whole(param).double(), want, rtol=0, atol=bound)


def check_a_window_without_weight_is_no_step(n_ranks: int) -> None:
    ranks = here()
    model = sharded(ranks.flat)
    optimizer = wrap(model)
    before = [part(param) for param in model.parameters()]
    optimizer.backward(loss_of(model, batches(1, ranks.rank)[0]), weight=0)
    optimizer.step()
    assert optimizer.skipped.item() == 1
    assert all(torch.equal(part(p), was) for p, was in zip(model.parameters(), before, strict=True))


def check_loss_scale(n_ranks: int) -> None:
    """A scaled backward is announced by its loss: each is divided as it is added, in a loop of any kind."""
    ranks = here()
    model = sharded(ranks.flat)
    given = batches(2, ranks.rank)
    want = fp32_sums(model, given, 1.0)
    optimizer = wrap(model, loss_scale=2.0**10)
    for batch in given:
        optimizer.scale(loss_of(model, batch)).backward()
    for param, sum_ in zip(model.parameters(), want, strict=True):
        assert torch.equal(part(param.grad), sum_)  # a power of two changes no bit
    optimizer.step()


def check_dynamic_loss_scale_backs_off_on_all_ranks(n_ranks: int) -> None:
    ranks = here()
    model = sharded(ranks.flat)
    optimizer = wrap(model, loss_scale="dynamic")
    (batch,) = batches(1, ranks.rank)
    optimizer.backward(loss_of(model, batch * (torch.inf if ranks.rank == 0 else 1.0)))
    optimizer.step()
    assert optimizer.loss_scale.item() == 2.0**15


def check_torch_grad_scaler(n_ranks: int) -> None:
    """Its found_inf is one of all ranks."""
    ranks = here()
    model = sharded(ranks.flat)
    optimizer = wrap(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for bad in (True, False):
        scaler.scale(loss_of(model, batches(1, ranks.rank)[0])).backward()
        if bad and ranks.rank == 1:
            model.inner.weight.grad.to_local()[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        norm = norm_of(model)
        scaler.step(optimizer)
        scaler.update()
        if not bad:
            assert abs(optimizer.grad_norm.item() - norm) <= norm_rtol(91) * norm
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**7
    assert all(state["step"].item() == 1 for state in optimizer.state.values())


def check_an_optimizer_without_a_fused_rule(n_ranks: int) -> None:
    """Its own step runs on fp32 masters that are DTensors, with the fp32 gradients."""
    ranks = here()
    for dtype in (torch.float32, torch.bfloat16):
        oracle = Oracle(Net(dtype), "rmsprop")
        model = sharded(ranks.flat, dtype)
        optimizer = wrap(model, "rmsprop", max_grad_norm=0.05)
        for step in range(2):
            loss_of(model, batches(1, ranks.rank, seed=step, dtype=dtype)[0]).backward()
            oracle.step([whole(param.grad) for param in model.parameters()], max_norm=0.05)
            optimizer.step()
            optimizer.zero_grad()
        assert_matches(oracle, optimizer)


def check_a_module_that_runs_twice(n_ranks: int) -> None:
    """FSDP2 may then reduce twice in one backward."""
    ranks = here()

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.layer = torch.nn.Linear(7, 7)
            self.last = torch.nn.Linear(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.layer(torch.tanh(self.layer(x))))

    from torch.distributed.fsdp import fully_shard

    def make() -> Twice:
        model = Twice()
        fully_shard(model.layer, mesh=ranks.flat)
        fully_shard(model, mesh=ranks.flat)
        return model

    model, twin = make(), make()
    optimizer = wrap(model, accumulation_steps=3)
    sums = [torch.zeros_like(part(param)).double() for param in twin.parameters()]
    for i, batch in enumerate(batches(3, ranks.rank)):
        loss_of(model, batch).backward()
        loss_of(twin, batch).backward()
        for total, param in zip(sums, twin.parameters(), strict=True):
            total += part(param.grad).double() / 3
        twin.zero_grad()
        if i < 2:
            optimizer.step()
    for param, total in zip(model.parameters(), sums, strict=True):
        # Three scaled gradients added in fp32: three roundings of the products, three of the sums.
        bound = 6 * U32 * 3 * float(total.abs().max()) if total.numel() else 0.0
        torch.testing.assert_close(part(param.grad).double(), total, rtol=0, atol=bound)
    optimizer.step()


def check_remove_gives_the_model_back(n_ranks: int) -> None:
    ranks = here()
    model = sharded(ranks.flat, torch.bfloat16)
    optimizer = wrap(model)
    loss_of(model, batches(1, ranks.rank, dtype=torch.bfloat16)[0]).backward()
    optimizer.step()
    held = [part(param.grad) for param in model.parameters()]
    inner = optimizer.remove()
    for param, grad in zip(model.parameters(), held, strict=True):
        assert param.grad.dtype is torch.bfloat16
        assert torch.equal(part(param.grad), grad.bfloat16())
    inner.zero_grad()
    loss_of(model, batches(1, ranks.rank, dtype=torch.bfloat16)[0]).backward()
    assert model.gain.grad.dtype is torch.bfloat16
    inner.step()
