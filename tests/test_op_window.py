"""finalize_ and ``window``: weights, skips, the loss scale, counts, and the averages behind the noise scale."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers import Buffers, adam_hyper, assert_same_bits, assert_same_buffers, finalize, fresh_window, sgd_hyper
from torch import Tensor

from fusedaccum import layout
from fusedaccum.backends import Backend
from fusedaccum.layout import CHUNK, LANES, RULE_ADAM, RULE_NONE, RULE_SGD

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = (5, 0, 2 * CHUNK + 1, 700)
ALL = range(len(SIZES))
RULES = {RULE_ADAM: [adam_hyper()], RULE_SGD: [sgd_hyper()], RULE_NONE: [sgd_hyper()]}
by_rule = pytest.mark.parametrize("rule", RULES, ids=["adam", "sgd", "none"])
U64 = 2.0**-53
SUM_RTOL = (4 / LANES + 12) * U64  # as test_op_finalize.assert_norm derives it
NAN = math.nan


def ready(window: Tensor | None = None, steps: float = 3.0) -> Buffers:
    """Buffers with sums as of a window in which four micro-batches of weight 1 took part."""
    buffers = Buffers(SIZES)
    buffers.partials.copy_(torch.rand(buffers.partials.numel(), dtype=torch.float64) + 0.5)
    buffers.micro_partials.copy_(buffers.partials * 2.5)
    buffers.steps.fill_(steps)
    if window is not None:
        buffers.window.copy_(window)
    return buffers


def changed(before: Tensor, after: Tensor) -> set[int]:
    return set((before != after).nonzero().flatten().tolist())


class TestWeights:
    @by_rule
    @pytest.mark.parametrize(("host", "device"), [(4.0, 0.0), (0.0, 4.0), (1.5, 2.5), (6.0, -2.0)])
    def test_it_does_not_matter_who_knows_them(self, backend: Backend, rule: int, host: float, device: float) -> None:
        buffers = ready()
        buffers.window[layout.WEIGHT], buffers.window[layout.WEIGHT_SQ] = device, device * 1.5
        before = buffers.snapshot()
        finalize(
            backend, buffers, RULES[rule], rule, numerator=3.0, weight=host, weight_sq=host * 1.5, micro=True,
            max_norm=0.1,
        )  # fmt: skip
        slots = [] if rule == RULE_NONE else ALL
        buffers.assert_only_changed(before, {"control": [0], "window": [0], "scalars": slots, "steps": slots})
        control = buffers.control
        root = math.sqrt(math.fsum(buffers.partials.tolist()))
        assert control[layout.NORM].item() == pytest.approx(root * 0.75, rel=SUM_RTOL + 3 * U64, abs=0)
        clip = 0.1 / (root * 0.75 + 1e-6)
        assert control[layout.CLIP_COEF].item() == pytest.approx(clip, rel=SUM_RTOL + 6 * U64, abs=0)
        assert control[layout.GRAD_MULTIPLIER].item() == control[layout.CLIP_COEF].item() * 0.75
        # Sum of w^2 |g|^2 over the sum of w^2, times what a scale that is no weight comes to: 3^2 / 6.
        micro = math.sqrt(math.fsum(buffers.micro_partials.tolist()) * 3.0**2 / 6.0)
        assert control[layout.MICRO_NORM].item() == pytest.approx(micro, rel=SUM_RTOL + 6 * U64, abs=0)
        window = buffers.window
        assert (window[layout.WEIGHT], window[layout.WEIGHT_SQ]) == (0.0, 0.0)
        assert window[layout.MICRO_WEIGHT] == 1.5
        assert window[layout.WINDOWS : layout.DECAY].tolist() == [1.0, 0.0, 1.0]

    @by_rule
    @pytest.mark.parametrize(("host", "device"), [(0.0, 0.0), (-1.0, 0.0), (2.0, -2.0), (NAN, 1.0), (1.0, NAN)])
    @pytest.mark.parametrize("micro", [False, True])
    def test_without_weight_nothing_is_stepped(
        self, backend: Backend, reference: Backend, rule: int, host: float, device: float, micro: bool
    ) -> None:
        results = []
        for each in (backend, reference):
            torch.manual_seed(0)
            buffers = ready(fresh_window(1024.0, 2.0, 0.5, 1))
            buffers.window[layout.GRAD_SQ], buffers.window[layout.MICRO_WEIGHT] = 7.0, 3.0
            old = buffers.window.clone()
            buffers.window[layout.WEIGHT], buffers.window[layout.WEIGHT_SQ] = device, 1.0
            before = buffers.snapshot()
            finalize(each, buffers, RULES[rule], rule, weight=host, micro=micro, max_norm=1e-9)
            buffers.assert_only_changed(before, {"control": [0], "window": [0]})
            control = buffers.control
            assert (control[layout.FOUND_INF], control[layout.SKIPPED]) == (0.0, 1.0)
            assert (control[layout.NORM], control[layout.GRAD_MULTIPLIER], control[layout.MICRO_NORM]) == (0, 0, 0)
            # The loss scale has learnt nothing, nor have the averages, and nothing was clipped.
            assert changed(old, buffers.window) == {layout.WINDOWS, layout.SKIPPED_WINDOWS}
            results.append(buffers)
        assert_same_buffers(*results)

    @by_rule
    def test_an_infinity_backs_off_whatever_the_weight(self, backend: Backend, rule: int) -> None:
        for weight in (1.0, 0.0, NAN):
            buffers = ready(fresh_window(1024.0, 2.0, 0.5, 1))
            buffers.partials[1] = math.inf
            finalize(backend, buffers, RULES[rule], rule, weight=weight)
            assert (buffers.control[layout.FOUND_INF], buffers.control[layout.SKIPPED]) == (1.0, 1.0)
            assert (buffers.window[layout.LOSS_SCALE], buffers.window[layout.SKIPPED_WINDOWS]) == (512.0, 1.0)

    @by_rule
    def test_without_advance_the_window_stays_open(self, backend: Backend, rule: int) -> None:
        buffers = ready()
        buffers.window[layout.WEIGHT], buffers.window[layout.WEIGHT_SQ] = 1.0, 1.0
        before = buffers.snapshot()
        finalize(backend, buffers, RULES[rule], rule, weight=3.0, weight_sq=3.0, advance=False, micro=True)
        buffers.assert_only_changed(before, {"control": [0]})
        asked = buffers.control.clone()
        finalize(backend, buffers, RULES[rule], rule, weight=3.0, weight_sq=3.0, micro=True)
        assert_same_bits(buffers.control, asked)


class TestLossScale:
    @pytest.mark.parametrize("interval", [1, 3, 10])
    @pytest.mark.parametrize(("growth", "backoff"), [(2.0, 0.5), (4.0, 0.125), (1.5, 0.75)])
    def test_is_that_of_torch(self, backend: Backend, interval: int, growth: float, backoff: float) -> None:
        buffers = ready(fresh_window(2.0**16, growth, backoff, interval))
        scale, tracker = torch.tensor([2.0**16]), torch.tensor([0], dtype=torch.int32)
        found = (np.random.default_rng(0).random(200) < 0.15).tolist()
        for i, is_bad in enumerate(found):
            buffers.partials[0] = math.inf if is_bad else 1.0
            finalize(backend, buffers, RULES[RULE_SGD], RULE_SGD)
            torch._amp_update_scale_(scale, tracker, torch.tensor([float(is_bad)]), growth, backoff, interval)
            # torch's scale is fp32, and rounded once a change; with powers of two it is exact.
            rtol = 0.0 if growth != 1.5 else (i + 1) * 2.0**-24
            got = buffers.window[layout.LOSS_SCALE].item()
            assert got == pytest.approx(scale.item(), rel=rtol, abs=0)
            assert buffers.window[layout.INV_LOSS_SCALE].item() == 1.0 / got
            assert buffers.window[layout.GROWTH_TRACKER].item() == tracker.item()
        assert buffers.window[layout.SKIPPED_WINDOWS].item() == sum(found)
        assert buffers.window[layout.WINDOWS].item() == len(found)

    def test_does_not_grow_out_of_fp32(self, backend: Backend) -> None:
        buffers = ready(fresh_window(2.0**125, 2.0, 0.5, 2))
        scale, tracker = torch.tensor([2.0**125]), torch.tensor([0], dtype=torch.int32)
        for _ in range(9):
            finalize(backend, buffers, RULES[RULE_SGD], RULE_SGD)
            torch._amp_update_scale_(scale, tracker, torch.tensor([0.0]), 2.0, 0.5, 2)
            assert buffers.window[layout.LOSS_SCALE].item() == scale.item()
            assert buffers.window[layout.GROWTH_TRACKER].item() == tracker.item()
        assert scale.item() == 2.0**127

    def test_stands_still_unless_asked(self, backend: Backend) -> None:
        buffers = ready()
        for i in range(5):
            buffers.partials[0] = math.inf if i == 2 else 1.0
            finalize(backend, buffers, RULES[RULE_SGD], RULE_SGD)
            assert (buffers.window[layout.LOSS_SCALE], buffers.window[layout.INV_LOSS_SCALE]) == (1.0, 1.0)

    def test_is_no_part_of_the_norm(self, backend: Backend) -> None:
        # Gradients are multiplied by its inverse as they are added.
        plain, scaled = ready(), ready(fresh_window(4.0, 2.0, 0.5))
        scaled.partials.copy_(plain.partials)
        for buffers in (plain, scaled):
            finalize(backend, buffers, RULES[RULE_SGD], RULE_SGD, max_norm=1.0)
        assert_same_bits(scaled.control, plain.control)


def test_counts(backend: Backend) -> None:
    buffers = ready()
    for norm, max_norm, weight in ((2.0, 1.0, 1.0), (2.0, 4.0, 1.0), (math.inf, 1.0, 1.0), (2.0, 1.0, 0.0)):
        buffers.partials.zero_()
        buffers.partials[0] = norm**2
        finalize(backend, buffers, RULES[RULE_ADAM], RULE_ADAM, max_norm=max_norm, weight=weight)
    counts = [layout.WINDOWS, layout.SKIPPED_WINDOWS, layout.CLIPPED_WINDOWS]
    assert buffers.window[counts].tolist() == [4.0, 2.0, 1.0]
    assert buffers.steps.tolist() == [5.0] * len(SIZES)


def measured(grads: np.ndarray, weights: Sequence[float]) -> tuple[float, float, dict[str, float]]:
    """The sums that a window of gradients (n_micro_batches, n) leaves, and the weights of ``finalize_``."""
    added = np.asarray(weights)[:, None] * grads
    host = {"weight": sum(weights), "weight_sq": sum(w * w for w in weights)}
    return float((added.sum(0) ** 2).sum()), float((added**2).sum()), host


class TestNoise:
    """The window's averages, with the estimates of McCandlish et al. (2018), appendix A.1."""

    @staticmethod
    def run(backend: Backend, buffers: Buffers, grads: np.ndarray, weights: Sequence[float], **options: object) -> None:
        sum_sq, micro_sum_sq, host = measured(grads, weights)
        for partials, value in ((buffers.partials, sum_sq), (buffers.micro_partials, micro_sum_sq)):
            partials.zero_()
            partials[0] = value
        finalize(backend, buffers, RULES[RULE_SGD], RULE_SGD, **{"micro": True, **host, **options})

    @pytest.mark.parametrize("n_micro", [2, 3, 8])
    def test_equal_weights_are_the_paper(self, backend: Backend, n_micro: int) -> None:
        rng = np.random.default_rng(n_micro)
        buffers = ready()
        grad_sq = noise = mean_weight = 0.0
        for _ in range(20):
            grads = rng.standard_normal((n_micro, 40)) + 0.3
            self.run(backend, buffers, grads, [2.0] * n_micro, max_norm=0.5)
            # B_small = 2 and B_big = 2 n: a batch of B has |G_B|^2 = |G|^2 + tr / B in the mean.
            small, big = (grads**2).sum(1).mean(), (grads.mean(0) ** 2).sum()
            b_small, b_big = 2.0, 2.0 * n_micro
            estimate = (b_big * big - b_small * small) / (b_big - b_small)
            trace = (small - big) / (1 / b_small - 1 / b_big)
            grad_sq, noise = 0.99 * grad_sq + 0.01 * estimate, 0.99 * noise + 0.01 * trace
            mean_weight = 0.99 * mean_weight + 0.01
            assert buffers.control[layout.NORM].item() == pytest.approx(math.sqrt(big), rel=1e-13)
            assert buffers.control[layout.MICRO_NORM].item() == pytest.approx(math.sqrt(small), rel=1e-13)
        got = buffers.window[[layout.GRAD_SQ, layout.NOISE, layout.MEAN_WEIGHT, layout.MICRO_WEIGHT]]
        # Some thirty fp64 operations a window; differences of numbers that agree to one digit lose another one.
        np.testing.assert_allclose(got.numpy(), [grad_sq, noise, mean_weight, 2.0], rtol=1e-12)

    @pytest.mark.parametrize("weights", [(1.0, 2.0, 5.0), (0.5, 0.5), (3.0, 1.0, 1.0, 7.0), (2.0, 0.0, 1.0)])
    def test_estimates_are_unbiased_for_any_weights(self, backend: Backend, weights: Sequence[float]) -> None:
        """The mean over every sign that the noise can have is the truth.

        A micro-batch of weight w has the true gradient and noise of variance trace / w; an empty one has no part in it.
        """
        true, trace = np.array([0.7, -1.1]), 3.0
        estimates = []
        for signs in itertools.product((1, -1), repeat=len(weights)):
            noise = [sign * math.sqrt(trace / w) if w else 0.0 for sign, w in zip(signs, weights, strict=True)]
            grads = true + np.outer(noise, [0.6, 0.8])
            buffers = ready()
            buffers.window[layout.DECAY] = 0.0  # the averages are the last estimates
            self.run(backend, buffers, grads, weights)
            estimates.append(buffers.window[[layout.GRAD_SQ, layout.NOISE]].numpy().copy())
            assert buffers.window[layout.MEAN_WEIGHT] == 1.0
        np.testing.assert_allclose(np.mean(estimates, 0), [(true**2).sum(), trace], rtol=1e-12)

    def test_scaled_sums_give_the_same(self, backend: Backend) -> None:
        # As where the accumulator holds the mean already: numerator 4 for gradients that were added times 1/4.
        grads = np.random.default_rng(0).standard_normal((4, 9))
        windows = []
        for scale in (1.0, 0.25):
            buffers = ready()
            self.run(backend, buffers, grads * scale, [1.0] * 4, numerator=1.0 / scale)
            windows.append(buffers.window.clone())
        assert_same_bits(*windows)

    @pytest.mark.parametrize(
        ("why", "weights", "options"),
        [
            ("one micro-batch says nothing of the noise", [2.0], {}),
            ("all weight on one", [2.0, 0.0], {}),
            ("no statistics", [1.0, 1.0], {"micro": False}),
            ("no weight", [1.0, 1.0], {"weight": 0.0}),
            ("found_inf", [1.0, 1.0], {"extra": (math.inf, 0.0)}),
            ("squares beyond fp32", [1.0, 1.0], {"extra": (0.0, math.inf)}),
            ("a norm whose square overflows", [1.0, 1.0], {"extra": (1e300, 1.0), "numerator": 1e20}),
        ],
    )
    def test_what_says_nothing_changes_no_average(
        self, backend: Backend, why: str, weights: list[float], options: dict
    ) -> None:
        buffers = ready()
        averages = [layout.GRAD_SQ, layout.NOISE, layout.MEAN_WEIGHT]
        buffers.window[averages] = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
        if "extra" in options:
            options = options | {"extra": torch.tensor(options["extra"], dtype=torch.float64)}
        self.run(backend, buffers, np.ones((len(weights), 3)), weights, **options)
        assert buffers.window[averages].tolist() == [1.0, 2.0, 0.5], why


def test_many_windows_agree_with_the_reference_to_the_bit(backend: Backend, reference: Backend) -> None:
    """Ordinary windows, and some in which a number is anything at all."""
    odd = [0.0, -1.0, 1e-320, 1e308, math.inf, -math.inf, NAN]
    results = []
    for each in (backend, reference):
        rng = np.random.default_rng(5)
        buffers = ready(fresh_window(2.0**120, 1.7, 0.3, 2))
        for i in range(300):
            numbers = dict(zip(("numerator", "weight", "weight_sq", "max_norm"), rng.uniform(0.1, 4, 4), strict=True))
            buffers.partials.copy_(torch.from_numpy(np.exp(rng.uniform(-9, 9, buffers.partials.numel()))))
            buffers.micro_partials.copy_(torch.from_numpy(np.exp(rng.uniform(-9, 9, buffers.partials.numel()))))
            buffers.window[layout.WEIGHT], buffers.window[layout.WEIGHT_SQ] = rng.uniform(0, 2, 2).tolist()
            spoilt = odd[i % len(odd)]
            where = rng.integers(12)
            if where < 4:
                numbers[list(numbers)[where]] = spoilt
            elif where < 6:
                (buffers.partials, buffers.micro_partials)[where - 4][2] = spoilt
            elif where < 8:
                buffers.window[where - 6] = spoilt
            extra = torch.from_numpy(rng.uniform(0, 1, 2)) if i % 3 == 0 else None
            rule, micro = list(RULES)[i % 3], bool(rng.integers(2))
            finalize(each, buffers, RULES[rule], rule, extra=extra, micro=micro, advance=i % 7 != 0, **numbers)
            results.append((each.name, i, buffers.control.clone(), buffers.window.clone(), buffers.steps.clone()))
            if not buffers.window.isfinite().all():  # else every later window is the same
                buffers.window.copy_(fresh_window(2.0**120, 1.7, 0.3, 2))
    for got, expected in zip(results[:300], results[300:], strict=True):
        for i, name in ((2, "control"), (3, "window"), (4, "steps")):
            assert_same_bits(got[i], expected[i], f"{name} of window {got[1]}")
