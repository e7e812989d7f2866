"""The wrapper under FSDP2: accumulation, norm, skip and step. Run by worker.py on every rank.

What must be accumulated is known to the bit: a twin under plain FSDP2 tells each micro-batch's gradient, and their fp32
sum is the accumulator.
"""

from __future__ import annotations

import torch
from fsdp_models import (
    SETUPS,
    Net,
    assert_matches,
    batches,
    fp32_sums,
    here,
    loss_of,
    norm_of,
    part,
    same_on_all_ranks,
    sharded,
    whole,
    wrap,
)
from launch import sizes
from models import OPTIMIZERS, U32, Oracle, norm_rtol
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor


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
