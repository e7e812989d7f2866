"""The wrapper under FSDP2: accumulation, norm, skip and step. Run by worker.py on every rank.

What must be accumulated is known to the bit: a twin under plain FSDP2 tells each micro-batch's gradient, and their fp32
sum is the accumulator.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fsdp_models import Net, batches, here, loss_of, part, same_on_all_ranks, sharded, whole
from launch import sizes
from models import OPTIMIZERS, U32, Oracle, norm_rtol
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fusedaccum import FusedAccumOptimizer

BF16_FORWARD = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SETUPS = {
    "fp32": (torch.float32, MixedPrecisionPolicy()),
    "bf16 forward on fp32 parameters": (torch.float32, BF16_FORWARD),
    "bf16": (torch.bfloat16, MixedPrecisionPolicy()),
    "bf16, reduced in fp32": (torch.bfloat16, MixedPrecisionPolicy(reduce_dtype=torch.float32)),
}


def fp32_sums(model: Net, given: list[Tensor], scale: float) -> list[Tensor]:
    """What ``.grad`` must be on this rank, bit for bit: the fp32 sum of what FSDP2 makes of each batch."""
    sums: list[Tensor] = []
    for batch in given:
        loss_of(model, batch).backward()
        grads = [part(param.grad).float() * scale for param in model.parameters()]
        sums = grads if not sums else [total + grad for total, grad in zip(sums, grads, strict=True)]
        model.zero_grad()
    return sums


def wrap(model: Net, name: str = "adamw", **options) -> FusedAccumOptimizer:
    return FusedAccumOptimizer(OPTIMIZERS[name](model.parameters()), **options)


@sizes(2, 4)
def check_accumulates_what_fsdp_reduces(n_ranks: int) -> None:
    """Every setup, in a window of ``accumulation_steps``, whose scale is no power of two."""
    ranks = here()
    for name, (dtype, policy) in SETUPS.items():
        model = sharded(ranks.flat, dtype, policy)
        given = batches(3, ranks.rank, dtype=dtype)
        want = fp32_sums(model, given, 1 / 3)
        optimizer = wrap(model, accumulation_steps=3)
        for i, batch in enumerate(given):
            loss_of(model, batch).backward()
            for param in model.parameters():
                assert type(param.grad) is DTensor, name
                assert param.grad.placements == param.placements
                assert param.grad.dtype is torch.float32
                assert param.grad.shape == param.shape
            if i < 2:
                optimizer.step()
                optimizer.zero_grad()
        for param, sum_ in zip(model.parameters(), want, strict=True):
            assert torch.equal(part(param.grad), sum_), name
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.stepped
        assert all(param.grad is None for param in model.parameters())


def check_accumulates_in_the_users_own_loop(n_ranks: int) -> None:
    """Without ``accumulation_steps`` FSDP2 finds ``.grad`` and adds to it by itself: in fp32, which is what we want."""
    ranks = here()
    for name, (dtype, policy) in SETUPS.items():
        model = sharded(ranks.flat, dtype, policy)
        given = batches(3, ranks.rank, dtype=dtype)
        want = fp32_sums(model, given, 1.0)
        optimizer = wrap(model, max_grad_norm=1e9, statistics=True)
        for batch in given:
            loss_of(model, batch).backward()
        for param, sum_ in zip(model.parameters(), want, strict=True):
            assert torch.equal(part(param.grad), sum_), name
        norm = norm_of(model)
        optimizer.step()
        assert abs(optimizer.grad_norm.item() - norm) <= norm_rtol(91) * norm
        # Nobody has seen the micro-batches by themselves.
        assert optimizer.stats()["micro_batch_norm"].isinf()
        assert optimizer.stats()["noise_scale"].isnan()


def check_a_backward_announced_to_the_optimizer(n_ranks: int) -> None:
    """``optimizer.backward`` hides ``.grad`` for its time: each micro-batch is seen, in a loop without a count too."""
    ranks = here()
    model = sharded(ranks.flat)
    given = batches(3, ranks.rank)
    want = fp32_sums(model, given, 1.0)
    optimizer = wrap(model, statistics=True)
    for batch in given:
        optimizer.backward(loss_of(model, batch))
    for param, sum_ in zip(model.parameters(), want, strict=True):
        assert torch.equal(part(param.grad), sum_)
    optimizer.step()
    assert optimizer.stats()["micro_batch_norm"].isfinite()


def norm_of(model: Net) -> float:
    """The norm of all gradients of all ranks, in fp64."""
    return sum(float(whole(param.grad).double().square().sum()) for param in model.parameters()) ** 0.5


@sizes(2, 4)
def check_norm_and_clip(n_ranks: int) -> None:
    """One norm for all ranks; replicas of a 2-D mesh count once. Clipping by it is the fp64 oracle's."""
    ranks = here()
    for mesh in (ranks.flat, ranks.square):
        for dtype in (torch.float32, torch.bfloat16):
            oracle = Oracle(Net(dtype))
            model = sharded(mesh, dtype)
            optimizer = wrap(model, accumulation_steps=2, max_grad_norm=0.05)
            for _ in range(3):
                for batch in batches(2, ranks.rank, dtype=dtype):
                    loss_of(model, batch).backward()
                    optimizer.step()
                    if not optimizer.stepped:
                        optimizer.zero_grad()
                grads = [whole(param.grad) for param in model.parameters()]
                want = oracle.step(grads, max_norm=0.05)
                assert want > 0.05
                assert abs(optimizer.grad_norm.item() - want) <= norm_rtol(91) * want
                assert same_on_all_ranks(optimizer.grad_norm)
                optimizer.zero_grad()
            assert_matches(oracle, optimizer)
            for param in model.parameters():
                assert same_on_all_ranks(whole(param))


def assert_matches(oracle: Oracle, optimizer: FusedAccumOptimizer) -> None:
    """``Oracle.assert_matches`` of the whole parameters and masters."""
    copies: list[Tensor] = []
    masters: dict[Tensor, dict[str, Tensor]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            copies.append(whole(param))
            held = optimizer.state[param]
            masters[copies[-1]] = {"master_param": whole(held["master_param"])} if "master_param" in held else {}
    oracle.assert_matches(SimpleNamespace(param_groups=[{"params": copies}], state=masters))


@sizes(2, 4)
def check_equals_one_process_with_the_whole_batch(n_ranks: int) -> None:
    """The accumulated gradient against fp64 on all micro-batches of all ranks at once.

    An fp32 gradient of this net is a sum over at most 5 rows of products of at most 13-term sums: 13 + 5 + 8 roundings
    on the way, of terms no larger than the largest that it is made of, which cancellation leaves as they are. So
    32 * U32 of the sum of magnitudes; the mean over ranks and micro-batches adds one rounding each.
    """
    ranks = here()
    n = 3
    model = sharded(ranks.flat)
    optimizer = wrap(model, accumulation_steps=n)
    for i, batch in enumerate(batches(n, ranks.rank)):
        loss_of(model, batch).backward()
        if i < n - 1:
            optimizer.step()
    single = Net().double()
    pieces = []
    for rank in range(ranks.world):
        for batch in batches(n, rank):
            loss_of_double = (single(batch.double()) ** 2).mean()
            pieces.append(torch.autograd.grad(loss_of_double, list(single.parameters())))
    together = torch.cat([batch for rank in range(ranks.world) for batch in batches(n, rank)])
    want = torch.autograd.grad((single(together.double()) ** 2).mean(), list(single.parameters()))
    for i, param in enumerate(model.parameters()):
        # The terms themselves, before any cancellation inside a micro-batch: no larger than these, times 13.
        magnitude = 13 * max(float(piece[i].abs().max()) for piece in pieces)
        bound = (32 + ranks.world + n) * U32 * magnitude
        torch.testing.assert_close(whole(param.grad).double(), want[i], rtol=0, atol=bound)
    optimizer.step()


def check_follows_plain_adamw_under_fsdp(n_ranks: int) -> None:
    """fp32, one gradient a step: the same gradients, so that only the roundings of the update differ.

    Both round each parameter about twice a step, and the update by a few roundings that Adam's quotient magnifies by at
    most 1 / sqrt(1 - beta2) = 32; see ``Oracle.assert_matches``. The distance is at most twice that to the oracle.
    """
    ranks = here()
    mine, plain = sharded(ranks.flat), sharded(ranks.flat)
    start = [whole(param) for param in mine.parameters()]
    optimizer = wrap(mine)
    reference = OPTIMIZERS["adamw"](plain.parameters())
    n_steps = 4
    for step in range(n_steps):
        (batch,) = batches(1, ranks.rank, seed=step)
        for model, each in ((mine, optimizer), (plain, reference)):
            loss_of(model, batch).backward()
            if step == 0 and each is optimizer:
                first = [part(param.grad) for param in model.parameters()]
            if step == 0 and each is reference:
                assert all(torch.equal(part(p.grad), g) for p, g in zip(model.parameters(), first, strict=True))
            each.step()
            each.zero_grad()
    for was, a, b in zip(start, mine.parameters(), plain.parameters(), strict=True):
        want = whole(b)
        moved = (want - was).abs().max()
        assert moved > 0
        # The gradients of later steps differ by what the parameters do, so the steps' errors add up twice over.
        bound = 2 * n_steps**2 * U32 * (2 * torch.maximum(want.abs(), was.abs()).max() + 2**8 * moved)
        torch.testing.assert_close(whole(a), want, rtol=0, atol=float(bound))
        assert reference.state[b].keys() == optimizer.state[a].keys()
        for name in ("exp_avg", "exp_avg_sq"):
            assert type(optimizer.state[a][name]) is DTensor
            assert optimizer.state[a][name].placements == reference.state[b][name].placements


@sizes(2, 4)
def check_a_second_run_has_the_same_bits(n_ranks: int) -> None:
    ranks = here()

    def run(mesh) -> list[Tensor]:
        model = sharded(mesh, torch.bfloat16, MixedPrecisionPolicy(reduce_dtype=torch.float32))
        optimizer = wrap(model, accumulation_steps=2, max_grad_norm=0.1)
        for batch in batches(6, ranks.rank, dtype=torch.bfloat16):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        masters = [part(optimizer.state[param]["master_param"]) for param in model.parameters()]
        return [*masters, *map(part, model.parameters()), optimizer.grad_norm]

    for mesh in (ranks.flat, ranks.square):
        assert all(torch.equal(a, b) for a, b in zip(run(mesh), run(mesh), strict=True))


def check_torch_clip_is_seen(n_ranks: int) -> None:
    """torch's clip multiplies DTensors by a foreach op that moves no version counter: the norm must still be theirs."""
    ranks = here()
    for foreach in (None, True):
        model, ours = sharded(ranks.flat), sharded(ranks.flat)
        optimizer, clips = wrap(model), wrap(ours, max_grad_norm=0.02)
        (batch,) = batches(1, ranks.rank)
        for each in (model, ours):
            loss_of(each, batch).backward()
        before = norm_of(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.02, foreach=foreach)
        assert abs(norm.full_tensor().item() - before) <= 32 * U32 * before  # torch's own sums in fp32
        optimizer.step()
        clips.step()
        # The clip's quotient and product are rounded in fp32, and so are the squares; torch adds 1e-6 to the norm.
        assert abs(optimizer.grad_norm.item() - 0.02) <= (1e-6 / before + 100 * U32) * 0.02
        assert abs(clips.grad_norm.item() - before) <= norm_rtol(91) * before


def check_our_clip_grad_norm(n_ranks: int) -> None:
    ranks = here()
    model = sharded(ranks.square)
    optimizer = wrap(model)
    loss_of(model, batches(1, ranks.rank)[0]).backward()
    norm = optimizer.clip_grad_norm_(0.02)
    want = norm_of(model)
    assert abs(norm.item() - want) <= norm_rtol(91) * want
    optimizer.step()
    assert optimizer.stats()["clip_fraction"].item() == 1.0


def check_a_look_at_the_norm_between_micro_batches(n_ranks: int) -> None:
    """It shows ``.grad`` for its time; a backward that found it there would be refused, as FSDP2 adds to it."""
    ranks = here()
    model = sharded(ranks.flat)
    given = batches(3, ranks.rank)
    want = fp32_sums(model, given, 1 / 3)
    optimizer = wrap(model, accumulation_steps=3)
    for i, batch in enumerate(given):
        loss_of(model, batch).backward()
        held = norm_of(model)
        if i < 2:
            optimizer.step()
            optimizer.zero_grad()
        if i == 0:
            norm = optimizer.clip_grad_norm_(0.02).item()
            assert abs(norm - held) <= norm_rtol(91) * held
    for param, sum_ in zip(model.parameters(), want, strict=True):
        assert torch.equal(part(param.grad), sum_)
    optimizer.step()
    assert optimizer.stats()["clip_fraction"].item() == 0.0  # what is asked for inside a window has no boundary


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
