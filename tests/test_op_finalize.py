"""finalize_: norm, non-finite test, clip, steps and the scalars of every slot. test_op_window.py has the window."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import U32, Buffers, adam_hyper, assert_same_bits, assert_same_buffers, finalize, sgd_hyper

from fusedaccum import layout
from fusedaccum.backends import Backend
from fusedaccum.layout import CHUNK, LANES, RULE_ADAM, RULE_SGD

pytestmark = pytest.mark.usefixtures("one_thread")
U64 = 2.0**-53
SIZES = (5, 0, 3 * CHUNK + 1, CHUNK, 1, 700)
ALL = range(len(SIZES))
RULES = {RULE_ADAM: [adam_hyper()], RULE_SGD: [sgd_hyper()]}
by_rule = pytest.mark.parametrize("rule", RULES, ids=["adam", "sgd"])


def ready(sizes: tuple[int, ...] = SIZES, groups: list[int] | None = None, steps: float = 0.0) -> Buffers:
    """Buffers with partials as of gradients of very different sizes, and every slot at ``steps``."""
    buffers = Buffers(sizes, groups)
    buffers.partials.copy_(torch.randn(buffers.partials.numel(), dtype=torch.float64).mul(4).exp())
    buffers.steps.fill_(steps)
    return buffers


def assert_norm(buffers: Buffers, sum_sq: float, correction: float = 1.0) -> None:
    """The tree adds positive fp64 terms, each passing at most n / LANES + 10 additions (one more for the extra sum)."""
    rtol = (buffers.partials.numel() / LANES + 12) * U64
    got_sum, got_norm = buffers.control[layout.SUM_SQ].item(), buffers.control[layout.NORM].item()
    assert got_sum == pytest.approx(sum_sq, rel=rtol, abs=0)
    assert got_norm == pytest.approx(math.sqrt(sum_sq) * correction, rel=rtol + 3 * U64, abs=0)


@by_rule
class TestControl:
    # More chunks than lanes: the tree over chunks goes round.
    @pytest.mark.parametrize("sizes", [(), (0,), (1,), SIZES, (1,) * (2 * LANES + 5)], ids=lambda s: f"{len(s)} slots")
    def test_norm(self, backend: Backend, reference: Backend, rule: int, sizes: tuple[int, ...]) -> None:
        buffers, other = ready(sizes), Buffers(sizes)
        other.partials.copy_(buffers.partials)
        other.steps.copy_(buffers.steps)
        before = buffers.snapshot()
        slots = range(len(sizes))
        finalize(backend, buffers, RULES[rule], rule)
        buffers.assert_only_changed(before, {"control": [0], "window": [0], "scalars": slots, "steps": slots})
        assert_norm(buffers, math.fsum(buffers.partials.tolist()))
        assert buffers.control[layout.FOUND_INF] == 0.0
        assert buffers.control[layout.CLIP_COEF] == buffers.control[layout.GRAD_MULTIPLIER] == 1.0
        finalize(reference, other, RULES[rule], rule)
        assert_same_buffers(buffers, other)

    def test_inactive_slots_are_left_out(self, backend: Backend, rule: int) -> None:
        # Their partials are an earlier window's, whatever they hold, and they do not age.
        buffers = ready(steps=3.0)
        active = [0, 2, 4]
        for s in set(ALL) - set(active):
            buffers.of("partials", s).fill_(math.nan)
        before = buffers.snapshot()
        finalize(backend, buffers, RULES[rule], rule, active=active)
        buffers.assert_only_changed(before, {"control": [0], "window": [0], "scalars": active, "steps": active})
        assert_norm(buffers, math.fsum(x for s in active for x in buffers.of("partials", s).tolist()))
        assert buffers.control[layout.FOUND_INF] == 0.0
        assert buffers.steps.tolist() == [4.0 if s in active else 3.0 for s in ALL]

    def test_a_slot_counts_the_same_whoever_else_takes_part(self, backend: Backend, rule: int) -> None:
        buffers = ready()
        for s in ALL:
            if s != 2:
                buffers.of("partials", s).zero_()
        finalize(backend, buffers, RULES[rule], rule)
        together = buffers.control.clone()
        finalize(backend, buffers, RULES[rule], rule, active=[2])
        assert_same_bits(buffers.control, together)

    @pytest.mark.parametrize("bad", [math.inf, math.nan])
    @pytest.mark.parametrize("slot", [0, 2, 5])
    @pytest.mark.parametrize("max_norm", [1.0, math.inf])
    def test_found_inf_changes_no_slot(
        self, backend: Backend, reference: Backend, rule: int, bad: float, slot: int, max_norm: float
    ) -> None:
        buffers = ready(steps=7.0)
        buffers.of("partials", slot)[-1] = bad
        before = buffers.snapshot()
        finalize(backend, buffers, RULES[rule], rule, max_norm=max_norm)
        buffers.assert_only_changed(before, {"control": [0], "window": [0]})
        assert buffers.control[layout.FOUND_INF] == buffers.control[layout.SKIPPED] == 1.0
        assert not buffers.control[layout.NORM].isfinite()
        control = buffers.control.clone()
        finalize(reference, buffers, RULES[rule], rule, max_norm=max_norm)
        assert_same_bits(buffers.control, control)

    def test_without_advance_only_control_is_written(self, backend: Backend, rule: int) -> None:
        buffers = ready()
        before = buffers.snapshot()
        finalize(backend, buffers, RULES[rule], rule, advance=False)
        buffers.assert_only_changed(before, {"control": [0]})
        assert_norm(buffers, math.fsum(buffers.partials.tolist()))

    def test_sums_kept_elsewhere_count(self, backend: Backend, rule: int) -> None:
        buffers = ready()
        buffers.micro_partials.copy_(buffers.partials * 0.7)
        elsewhere = torch.tensor([12345.678, 333.25], dtype=torch.float64)
        for micro in (False, True):
            finalize(backend, buffers, RULES[rule], rule, extra=elsewhere, micro=micro)
            assert_norm(buffers, math.fsum([*buffers.partials.tolist(), elsewhere[0].item()]))
            micro_sum = math.fsum([*buffers.micro_partials.tolist() * micro, elsewhere[1].item()])
            rtol = (buffers.partials.numel() / LANES + 12) * U64
            assert buffers.control[layout.MICRO_SUM_SQ].item() == pytest.approx(micro_sum, rel=rtol, abs=0)
        before = buffers.snapshot()
        finalize(backend, buffers, RULES[rule], rule, extra=torch.tensor([math.inf, 1.0], dtype=torch.float64))
        buffers.assert_only_changed(before, {"control": [0], "window": [0]})
        assert buffers.control[layout.FOUND_INF] == 1.0

    def test_micro_batches_that_overflow_are_no_reason_to_skip(self, backend: Backend, rule: int) -> None:
        buffers = ready()
        buffers.micro_partials.fill_(math.inf)
        finalize(backend, buffers, RULES[rule], rule, micro=True)
        assert buffers.control[layout.MICRO_NORM] == buffers.control[layout.MICRO_SUM_SQ] == math.inf
        assert buffers.control[layout.FOUND_INF] == buffers.control[layout.SKIPPED] == 0.0
        assert buffers.steps.tolist() == [1.0] * len(SIZES)

    @pytest.mark.parametrize("correction", [1.0, 1 / 3, 2.0**-16, 64.0])
    @pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6, math.inf])
    def test_clip_is_that_of_torch(self, backend: Backend, rule: int, correction: float, max_norm: float) -> None:
        grads = [torch.randn(n, dtype=torch.float64) for n in (40, 3, 17)]
        buffers = Buffers((40, 3, 17))
        buffers.steps.zero_()
        buffers.partials.copy_(torch.stack([g.square().sum() for g in grads]))
        finalize(backend, buffers, RULES[rule], rule, numerator=correction, max_norm=max_norm)
        params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad * correction
        norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
        # torch computes in fp64 here: a sum of 60 squares, the root, and a handful of operations on it.
        rtol = 70 * U64
        multiplier = buffers.control[layout.GRAD_MULTIPLIER].item()
        assert buffers.control[layout.NORM].item() == pytest.approx(norm.item(), rel=rtol, abs=0)
        for param, grad in zip(params, grads, strict=True):
            torch.testing.assert_close(grad * multiplier, param.grad, rtol=rtol, atol=0.0)
        assert buffers.control[layout.CLIP_COEF].item() * correction == multiplier
        # Each row's multiplier is that of the control block, in fp32.
        assert buffers.scalars[:, 0].tolist() == [np.float32(multiplier)] * 3

    def test_clip_agrees_with_the_reference_to_the_bit(self, backend: Backend, reference: Backend, rule: int) -> None:
        # max_norm times a reciprocal is not max_norm over the norm.
        for max_norm in np.random.default_rng(0).uniform(0.0, 1.0, 50):
            results = []
            for each in (backend, reference):
                buffers = Buffers((3,))
                buffers.steps.zero_()
                buffers.partials.fill_(3.0)
                finalize(each, buffers, RULES[rule], rule, numerator=0.7, max_norm=float(max_norm))
                results.append(buffers)
            assert_same_buffers(*results)


# step_size, bias corrections and the rest are computed in fp64 and rounded to fp32 once. In fp64, beta**n by squaring
# has a relative error of at most n units, and 1 - beta**n magnifies it by beta**n / (1 - beta**n): in all less than
# 2 / (1 - beta) units, below 2^-39 for the betas here.
SCALAR_RTOL = U32 * (1 + 2.0**-10)

ADAM_GROUPS = [
    adam_hyper(),
    adam_hyper(lr=3e-4, betas=(0.95, 0.9999), eps=1e-6, weight_decay=0.1, maximize=True),
    adam_hyper(lr=0.5, betas=(0.0, 0.5), weight_decay=0.3, decoupled=False, amsgrad=True),
    adam_hyper(lr=0.0, weight_decay=0.3),
]
SGD_GROUPS = [
    sgd_hyper(),
    sgd_hyper(lr=0.3, momentum=0.9, dampening=0.1, weight_decay=1e-4),
    sgd_hyper(momentum=0.99, nesterov=True, maximize=True),
]
STEPS = [1, 2, 3, 100, 1001]


def exact_adam_row(hyper: list[float], multiplier: float, step: int) -> list[float]:
    lr, beta1, beta2, eps, weight_decay, decoupled, sign, amsgrad = hyper
    bias1, bias2 = (float(1 - Fraction(beta) ** step) for beta in (beta1, beta2))
    decay, coupled = (1 - lr * weight_decay, 0.0) if decoupled else (1.0, weight_decay)
    moments = [beta1, 1 - beta1, beta2, 1 - beta2]
    return [multiplier * sign, lr / bias1, 1 / math.sqrt(bias2), decay, *moments, eps, coupled, amsgrad, 0.0]


def exact_sgd_row(hyper: list[float], multiplier: float, step: int) -> list[float]:
    lr, momentum, dampening, nesterov, weight_decay, _, sign, _ = hyper
    row = [multiplier * sign, lr, momentum, 1 - dampening, weight_decay, nesterov, float(step == 1)]
    return row + [0.0] * 5


class TestScalars:
    @pytest.mark.parametrize(
        ("rule", "groups", "exact_row"),
        [(RULE_ADAM, ADAM_GROUPS, exact_adam_row), (RULE_SGD, SGD_GROUPS, exact_sgd_row)],
        ids=["adam", "sgd"],
    )
    def test_every_group_and_step(
        self, backend: Backend, reference: Backend, rule: int, groups: list, exact_row: object
    ) -> None:
        # Groups and steps interleaved: a backend may reuse its neighbour's row only where both agree.
        pairs = [(group, step) for step in STEPS for group in range(len(groups))] + [(0, 1), (0, 1), (0, 2), (1, 2)]
        results = []
        for each in (backend, reference):
            buffers = Buffers([3] * len(pairs), [group for group, _ in pairs])
            buffers.partials.fill_(2.0)
            buffers.steps.copy_(torch.tensor([step - 1.0 for _, step in pairs]))
            finalize(each, buffers, groups, rule, numerator=0.25, max_norm=0.5)
            results.append(buffers)
        multiplier = results[0].control[layout.GRAD_MULTIPLIER].item()
        assert results[0].steps.tolist() == [step for _, step in pairs]
        for s, (group, step) in enumerate(pairs):
            exact = exact_row(groups[group], multiplier, step)
            np.testing.assert_allclose(results[0].scalars[s].double().numpy(), exact, rtol=SCALAR_RTOL, err_msg=str(s))
        assert_same_buffers(*results)

    @by_rule
    def test_steps_count_windows_that_took_part(self, backend: Backend, rule: int) -> None:
        buffers = ready()
        for active in ([0, 2], [2], [], [2, 5]):
            finalize(backend, buffers, RULES[rule], rule, active=active)
        assert buffers.steps.tolist() == [1.0, 0.0, 3.0, 0.0, 0.0, 1.0]

    @pytest.mark.parametrize("steps", [2.0**20, 2.0**24 - 2, 2.0**24 - 1, 2.0**24])
    def test_the_largest_counts(self, backend: Backend, reference: Backend, steps: float) -> None:
        # fp32 counts stop at 2^24, where every bias correction is 1 long since.
        results = []
        for each in (backend, reference):
            buffers = Buffers([4])
            buffers.partials.fill_(1.0)
            buffers.steps.fill_(steps)
            finalize(each, buffers, [adam_hyper(betas=(0.9, 1 - 2.0**-20))], RULE_ADAM)
            results.append(buffers)
        assert results[0].steps.item() == min(steps + 1, 2.0**24)
        exact = 1 / math.sqrt(-math.expm1((steps + 1) * math.log1p(-(2.0**-20))))
        assert results[0].scalars[0, 2].item() == pytest.approx(exact, rel=SCALAR_RTOL, abs=0)
        assert_same_buffers(*results)


@by_rule
@pytest.mark.parametrize("with_extra", [False, True])
@pytest.mark.usefixtures("native")
def test_opcheck(rule: int, with_extra: bool) -> None:
    buffers = ready()
    buffers.control.zero_()
    buffers.scalars.zero_()
    hyper = torch.tensor(RULES[rule], dtype=torch.float64)
    active = torch.ones(len(SIZES), dtype=torch.uint8)
    extra = torch.ones(2, dtype=torch.float64) if with_extra else None
    micro = buffers.micro_partials.fill_(2.0) if with_extra else None
    written = (buffers.control, buffers.scalars, buffers.steps, buffers.window)
    arguments = (*written, buffers.partials, micro, buffers.table, hyper, active, rule, 0.5, 2.0, 2.0, 1.0, extra, True)
    torch.library.opcheck(torch.ops.fusedaccum.finalize_.default, arguments)
