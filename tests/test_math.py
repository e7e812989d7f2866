"""csrc/math.h element by element: conversions over whole domains, formulas against exact or fp64 oracles."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from fractions import Fraction
from types import ModuleType

import numpy as np
import pytest
import torch
from helpers import U32, Rounded, adam_hyper, fresh_window, sgd_hyper

from fusedaccum import layout

EVERY_16 = np.arange(2**16, dtype=np.uint16)
Denormals = Callable[[], AbstractContextManager[None]]
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
both = pytest.mark.parametrize("narrow", NARROW)


def widened(narrow: str, bits: np.ndarray) -> np.ndarray:
    """16-bit patterns as fp32 patterns, by definition: bf16 is the upper half, numpy converts fp16."""
    if narrow == "bf16":
        return bits.astype(np.uint32) << 16
    return bits.view(np.float16).astype(np.float32).view(np.uint32)


def is_nan32(bits: np.ndarray) -> np.ndarray:
    return (bits & 0x7FFFFFFF) > 0x7F800000


@both
def test_every_16_bit_value_widens_exactly(math_module: ModuleType, narrow: str, denormals: Denormals) -> None:
    expected = widened(narrow, EVERY_16)
    with denormals():
        actual = getattr(math_module, f"{narrow}_to_float")(EVERY_16)
    nan = is_nan32(expected)
    np.testing.assert_array_equal(actual[~nan], expected[~nan])
    assert is_nan32(actual[nan]).all()
    np.testing.assert_array_equal(actual[nan] >> 31, expected[nan] >> 31)


def grid(narrow: str) -> tuple[np.ndarray, np.ndarray]:
    """The non-negative 16-bit values, whose patterns count up from 0, with the overflow threshold's upper end in the
    place of infinity; and the midpoints between neighbours. All exact in fp64."""
    infinity = {"bf16": 0x7F80, "fp16": 0x7C00}[narrow]
    values = widened(narrow, EVERY_16[: infinity + 1]).view(np.float32).astype(np.float64)
    values[-1] = 2.0 * values[-2] - values[-3]
    return values, (values[:-1] + values[1:]) / 2


def values_to_round(narrow: str) -> np.ndarray:
    """fp32 patterns: every 16-bit value, every midpoint between neighbours, what is next to them, and random ones."""
    values, midpoints = grid(narrow)
    exact = np.concatenate([values[:-1], midpoints])
    assert (exact.astype(np.float32) == exact).all()
    bases = exact.astype(np.float32).view(np.uint32).astype(np.int64)
    around = np.concatenate([bases + step for step in (-2, -1, 0, 1, 2)])
    special = [0x7F800000, 0x7F800001, 0x7F80FFFF, 0x7FC00000, 0x7FFF8000, 0x7FFFFFFF, 1, 0x007FFFFF, 0x7F7FFFFF]
    magnitudes = np.concatenate([around[around >= 0], special]).astype(np.uint32)
    random = np.random.default_rng(0).integers(0, 2**32, 500_000, dtype=np.uint32)
    return np.concatenate([widened(narrow, EVERY_16), magnitudes, magnitudes | 0x80000000, random])


def nearest(narrow: str, bits: np.ndarray) -> np.ndarray:
    """The pattern of the nearest 16-bit value, ties to even, by looking the midpoint up."""
    midpoints = grid(narrow)[1]
    magnitude = np.abs(bits.view(np.float32).astype(np.float64))
    below = np.searchsorted(midpoints, magnitude)  # midpoints below the value: the pattern, unless it is a tie
    tie = midpoints[np.minimum(below, midpoints.size - 1)] == magnitude
    return (below + (tie & (below % 2 == 1)) | (bits >> 16 & 0x8000)).astype(np.uint16)


@both
def test_rounding_is_to_nearest_even(math_module: ModuleType, narrow: str, denormals: Denormals) -> None:
    bits = values_to_round(narrow)
    nan = is_nan32(bits)
    expected = nearest(narrow, bits[~nan])
    with denormals():
        actual = getattr(math_module, f"round_to_{narrow}")(bits)
    np.testing.assert_array_equal(actual[~nan], expected)
    # A NaN stays one, quiet, of its sign.
    quiet = {"bf16": 0x7FC0, "fp16": 0x7E00}[narrow]
    np.testing.assert_array_equal(actual[nan], (bits[nan] >> 16 & 0x8000) | quiet)
    # The reference backend rounds by torch.
    by_torch = torch.from_numpy(bits.view(np.int32)).view(torch.float32).to(NARROW[narrow]).view(torch.int16)
    np.testing.assert_array_equal(by_torch.numpy().view(np.uint16)[~nan], expected)


@both
def test_rounding_back_gives_every_16_bit_value(math_module: ModuleType, narrow: str) -> None:
    wide = getattr(math_module, f"{narrow}_to_float")(EVERY_16)
    number = ~is_nan32(wide)
    back = getattr(math_module, f"round_to_{narrow}")(wide)
    np.testing.assert_array_equal(back[number], EVERY_16[number])


@pytest.mark.parametrize(
    ("narrow", "value", "bits"),
    [
        ("fp16", 65519.996, 0x7BFF),  # the largest that still rounds down to 65504
        ("fp16", 65520.0, 0x7C00),  # halfway to 65536, which is even
        ("fp16", 2.0**-25, 0x0000),  # half the smallest subnormal, a tie to zero
        ("fp16", math.nextafter(2.0**-25, 1), 0x0000),  # rounds to 2^-25 in fp32 already
        ("fp16", 2.0**-25 * (1 + 2.0**-23), 0x0001),
        ("fp16", -(2.0**-14) * (1 - 2.0**-11), 0x8400),  # a subnormal that rounds up to the smallest normal
        ("bf16", 3.3895313892515355e38, 0x7F7F),  # the largest finite
        ("bf16", 2.0**127 * (2 - 2.0**-8), 0x7F80),  # halfway to 2^128, which is even
        ("bf16", 2.0**127 * (2 - 2.0**-8 - 2.0**-23), 0x7F7F),  # just below
        ("bf16", 1 + 2.0**-8, 0x3F80),  # a tie to even, down
        ("bf16", 1 + 3 * 2.0**-8, 0x3F82),  # a tie to even, up
    ],
)
def test_known_roundings(math_module: ModuleType, narrow: str, value: float, bits: int) -> None:
    assert getattr(math_module, f"round_to_{narrow}")(np.array([value], np.float32).view(np.uint32)).item() == bits


def rounded_to_fp32(exact: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return exact.astype(np.float32)


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits, or both NaN."""
    same = (actual.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(actual) & np.isnan(expected))
    assert same.all(), (actual[~same][:3], expected[~same][:3])


@both
@pytest.mark.parametrize("scale", [1.0, 0.25, 0.3, 1 / 7, 2.0**-16, 65536.0, 0.0])
def test_accumulating_every_16_bit_gradient(math_module: ModuleType, narrow: str, scale: float) -> None:
    grad = widened(narrow, EVERY_16).view(np.float32)
    rng = np.random.default_rng(1)
    acc = (rng.standard_normal(grad.size) * np.exp(rng.uniform(-30, 30, grad.size))).astype(np.float32)
    scale32 = float(np.float32(scale))
    # Products of fp32 values are exact in fp64, and rounding an fp64 sum of two again gives the one correct rounding.
    with np.errstate(invalid="ignore"):
        product = rounded_to_fp32(grad.astype(np.float64) * scale32)
        total = rounded_to_fp32(acc.astype(np.float64) + product.astype(np.float64))
    assert_same(math_module.scaled(grad, scale32), product)
    assert_same(math_module.accumulated(acc, grad, scale32), total)


def test_accumulating_is_not_contracted(math_module: ModuleType) -> None:
    # 1 + 2^-12 squared is 1 + 2^-11 + 2^-24: a fused multiply-add keeps the last term, two roundings lose it.
    grad = np.array([1 + 2.0**-12], np.float32)
    assert math_module.accumulated(np.array([-(1 + 2.0**-11)], np.float32), grad, float(grad[0])).item() == 0.0


N = 20_000
ADAM = {
    "plain": adam_hyper(),
    "decay": adam_hyper(lr=0.01, weight_decay=0.1),
    "coupled": adam_hyper(lr=0.01, betas=(0.5, 0.9), eps=1e-3, weight_decay=0.1, decoupled=False, maximize=True),
}
SGD = {
    "plain": sgd_hyper(weight_decay=0.01),
    "momentum": sgd_hyper(momentum=0.9, dampening=0.2, maximize=True),
    "nesterov": sgd_hyper(momentum=0.9, nesterov=True, weight_decay=0.1),
}


def random_states(*signed: bool) -> np.ndarray:
    """(N, len(signed)) fp32 over many magnitudes; columns not ``signed`` are positive."""
    rng = np.random.default_rng(2)
    states = rng.standard_normal((N, len(signed))) * np.exp(rng.uniform(-8, 3, (N, len(signed))))
    return np.where(signed, states, np.abs(states)).astype(np.float32)


@pytest.mark.parametrize("hyper", ADAM.values(), ids=ADAM)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_update(math_module: ModuleType, hyper: list[float], amsgrad: bool) -> None:
    states, acc = random_states(True, True, False, False), random_states(True)[:, 0]
    scalars = math_module.adam_scalars(hyper, 0.3, 5.0)
    actual = math_module.adam_update(states, acc, scalars, amsgrad)
    multiplier, step_size, inv_bias2, decay, beta1, rest1, beta2, rest2, eps, coupled, *_ = map(Rounded, scalars)
    param, exp_avg, exp_avg_sq, largest = (Rounded(column) for column in states.T)
    param = param * decay
    grad = Rounded(acc) * multiplier + coupled * param
    exp_avg = beta1 * exp_avg + rest1 * grad
    exp_avg_sq = beta2 * exp_avg_sq + rest2 * (grad * grad)
    second = exp_avg_sq
    if amsgrad:
        second = largest = largest.maximum(exp_avg_sq)
    param = param - step_size * (exp_avg / (second.sqrt() * inv_bias2 + eps))
    for column, exact in enumerate((param, exp_avg, exp_avg_sq, largest)):
        exact.assert_holds(actual[:, column], f"column {column}")


@pytest.mark.parametrize("hyper", SGD.values(), ids=SGD)
@pytest.mark.parametrize("step", [1.0, 2.0])
def test_sgd_update(math_module: ModuleType, hyper: list[float], step: float) -> None:
    states, acc = random_states(True, True), random_states(True)[:, 0]
    scalars = math_module.sgd_scalars(hyper, 0.3, step)
    momentum = hyper[1] != 0
    actual = math_module.sgd_update(states, acc, scalars, momentum)
    multiplier, lr, rho, undamped, weight_decay, *_ = map(Rounded, scalars)
    param, buffer = (Rounded(column) for column in states.T)
    direction = Rounded(acc) * multiplier + weight_decay * param
    if momentum:
        buffer = direction if step == 1 else rho * buffer + undamped * direction
        direction = direction + rho * buffer if hyper[3] else buffer
    param = param - lr * direction
    param.assert_holds(actual[:, 0], "param")
    buffer.assert_holds(actual[:, 1], "momentum_buffer")


@pytest.mark.parametrize("base", [0.0, 0.5, 0.9, 0.95, 0.999, 1 - 2.0**-20, 1.0])
def test_integer_power(math_module: ModuleType, base: float) -> None:
    for exponent in [*range(130), 1000, 4095, 4096, 10_007]:
        exact = Fraction(base) ** exponent
        actual = math_module.integer_power(base, exponent)
        # Squaring doubles a relative error and adds a rounding, so that base^n is off by less than n of them.
        assert abs(Fraction(actual) - exact) <= exponent * Fraction(1, 2**53) * exact + Fraction(1, 2**1074), exponent


@pytest.mark.parametrize("step", [1, 2, 3, 10, 1000, 100_000])
@pytest.mark.parametrize("hyper", ADAM.values(), ids=ADAM)
def test_adam_scalars(math_module: ModuleType, hyper: list[float], step: int) -> None:
    lr, beta1, beta2, eps, weight_decay, decoupled, sign, amsgrad = hyper
    bias1, bias2 = (-math.expm1(step * math.log(beta)) for beta in (beta1, beta2))
    decay, coupled = (1 - lr * weight_decay, 0.0) if decoupled else (1.0, weight_decay)
    moments = [beta1, 1 - beta1, beta2, 1 - beta2]
    exact = [0.7 * sign, lr / bias1, 1 / math.sqrt(bias2), decay, *moments, eps, coupled, amsgrad, 0.0]
    # Computed in fp64 (the bias corrections to within 2 / (1 - beta) units, see test_op_finalize), then rounded once.
    np.testing.assert_allclose(math_module.adam_scalars(hyper, 0.7, step), exact, rtol=U32 * (1 + 2.0**-10))


@pytest.mark.parametrize("step", [1, 2, 1000])
@pytest.mark.parametrize("hyper", SGD.values(), ids=SGD)
def test_sgd_scalars(math_module: ModuleType, hyper: list[float], step: int) -> None:
    lr, momentum, dampening, nesterov, weight_decay, _, sign, _ = hyper
    exact = [0.7 * sign, lr, momentum, 1 - dampening, weight_decay, nesterov, float(step == 1)] + [0.0] * 5
    # fp64 throughout and one rounding: each is the fp32 value nearest to what Python computes in fp64.
    np.testing.assert_array_equal(math_module.sgd_scalars(hyper, 0.7, step), np.array(exact, np.float32))


def test_clip_coefficient(math_module: ModuleType) -> None:
    rng = np.random.default_rng(3)
    for norm, max_norm in np.exp(rng.uniform(-20, 20, (2000, 2))):
        exact = min(Fraction(max_norm) / (Fraction(norm) + Fraction(1e-6)), Fraction(1))
        # A sum and a quotient, each rounded once.
        assert abs(Fraction(math_module.clip_coefficient(norm, max_norm)) - exact) <= 3 * Fraction(1, 2**53) * exact


@pytest.mark.parametrize(
    ("norm", "max_norm", "coefficient"),
    [
        (0.0, 1.0, 1.0),
        (5.0, math.inf, 1.0),  # no clip
        (math.inf, math.inf, 1.0),
        (math.nan, 1.0, 1.0),
        (math.inf, 1.0, 0.0),
        (7.0, 0.0, 0.0),
        (1.0, 1.0, 1 / (1 + 1e-6)),  # as in torch, a norm of max_norm is scaled by a hair
    ],
)
def test_clip_coefficient_at_its_ends(
    math_module: ModuleType, norm: float, max_norm: float, coefficient: float
) -> None:
    assert math_module.clip_coefficient(norm, max_norm) == coefficient


@pytest.mark.parametrize("scale", [1.0, 0.3, 1 / 7, 0.0, 1e-46, 1e39])
@pytest.mark.parametrize("factor", [None, 1.0, 0.7, 2.0**-16, 0.0, 1e39])
def test_effective_scale(math_module: ModuleType, scale: float, factor: float | None, denormals: Denormals) -> None:
    # One fp64 product, one rounding to fp32: not the product of two fp32 values.
    with np.errstate(over="ignore"):
        expected = np.float32(scale if factor is None else scale * factor)
    with denormals():
        actual = math_module.effective_scale(scale, [] if factor is None else [factor])
    assert actual == expected


def test_loss_scale(math_module: ModuleType) -> None:
    window = fresh_window(8.0, 2.0, 0.25, 3).numpy()
    seen = []
    for found_inf in (False, False, False, False, True, False, False, False):
        window = math_module.update_loss_scale(window, found_inf)
        assert window[layout.INV_LOSS_SCALE] == 1 / window[layout.LOSS_SCALE]
        seen.append((window[layout.LOSS_SCALE], window[layout.GROWTH_TRACKER]))
    assert seen == [(8, 1), (8, 2), (16, 0), (16, 1), (4, 0), (4, 1), (4, 2), (8, 0)]


def test_noise(math_module: ModuleType) -> None:
    """The two equations in exact arithmetic: |G|^2 = g + tr / W and m^2 rho = rho g + tr / W."""
    rng = np.random.default_rng(4)
    for _ in range(300):
        true, trace, weight, device = rng.uniform(0.1, 5, 4)
        weights = rng.uniform(0.1, 0.9) * (weight + device) ** 2
        total, rho = Fraction(weight) + Fraction(device), Fraction(weights) / (Fraction(weight) + Fraction(device)) ** 2
        window = fresh_window().numpy()
        window[[layout.WEIGHT, layout.DECAY]] = device, 0.0
        norm = math.sqrt(Fraction(true) + Fraction(trace) / total)
        micro_norm = math.sqrt(Fraction(true) + Fraction(trace) / (rho * total))
        after = math_module.update_noise(window, norm, micro_norm, weight, weights)
        # Ten roundings, and differences as small as a tenth of what they are taken of, over 1 - rho, at least 0.1.
        scale = (norm**2 + micro_norm**2) * 10 * 2.0**-53 / float(1 - rho)
        assert abs(after[layout.GRAD_SQ] - true) <= scale
        assert abs(after[layout.NOISE] - trace) <= scale * float(total)
        assert after[layout.MEAN_WEIGHT] == 1.0


def test_boundary(math_module: ModuleType) -> None:
    rng = np.random.default_rng(5)
    for sum_sq, micro_sum_sq, numerator, weight, weight_sq, max_norm, device, device_sq in rng.uniform(
        0.1, 9, (300, 8)
    ):
        window = fresh_window().numpy()
        window[[layout.WEIGHT, layout.WEIGHT_SQ]] = device, device_sq
        control = math_module.boundary(window, sum_sq, micro_sum_sq, numerator, weight, weight_sq, max_norm)
        factor = numerator / (weight + device)
        norm = math.sqrt(sum_sq) * factor
        clip = min(max_norm / (norm + 1e-6), 1.0)
        # The sum of squares of contributions w g / W over that of w / W, the factor being 1 / W.
        micro_norm = math.sqrt(micro_sum_sq / (weight_sq + device_sq)) * numerator
        expected = [norm, 0.0, clip, clip * factor, sum_sq, 0.0, micro_norm, micro_sum_sq]
        np.testing.assert_allclose(control, expected, rtol=12 * 2.0**-53)


@pytest.mark.parametrize(
    ("sum_sq", "weight", "found_inf", "skipped"),
    [
        (1.0, 1.0, 0.0, 0.0),
        (0.0, 1.0, 0.0, 0.0),  # all gradients zero: a step as any other
        (math.inf, 1.0, 1.0, 1.0),
        (math.nan, 1.0, 1.0, 1.0),
        (1.0, 0.0, 0.0, 1.0),
        (1.0, -1.0, 0.0, 1.0),
        (1.0, math.nan, 0.0, 1.0),
        (math.inf, 0.0, 1.0, 1.0),
    ],
)
def test_skips(math_module: ModuleType, sum_sq: float, weight: float, found_inf: float, skipped: float) -> None:
    control = math_module.boundary(fresh_window().numpy(), sum_sq, 1.0, 1.0, weight, 1.0, math.inf)
    assert (control[layout.FOUND_INF], control[layout.SKIPPED]) == (found_inf, skipped)
    assert skipped or control[layout.GRAD_MULTIPLIER] == 1.0
