"""adam_step_ and sgd_step_: the fp32 update to a derived bound, everything else to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cuda_cases import Param, every_param, normal, ready_to_step
from helpers import (
    SIZES,
    Buffers,
    Rounded,
    accumulate,
    adam_hyper,
    assert_same_bits,
    assert_same_buffers,
    finalize,
    fp64,
    sgd_hyper,
)
from torch import Tensor

from fusedaccum import layout
from fusedaccum import reference as reference_ops
from fusedaccum.backends import Backend
from fusedaccum.layout import CHUNK, LANES, RULE_ADAM, RULE_SGD

pytestmark = pytest.mark.usefixtures("one_thread")
ALL = range(len(SIZES))
# (dtype, has a master)
KINDS = [
    (torch.float32, False),
    (torch.bfloat16, True),
    (torch.float16, True),
    (torch.bfloat16, False),
    (torch.float16, False),
]
every_kind = pytest.mark.parametrize(
    "kind", KINDS, ids=[f"{str(dtype)[6:]}{'+master' if master else ''}" for dtype, master in KINDS]
)


@dataclass(frozen=True)
class Case:
    """A rule and its settings, with torch's optimizer for the same."""

    rule: int
    hyper: Sequence[float]
    torch_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]

    @property
    def has_extra(self) -> bool:
        return bool(self.hyper[7] if self.rule == RULE_ADAM else self.hyper[1])


def adam_case(**options: object) -> Case:
    named = {"lr": 0.01, **options}
    optimizer = torch.optim.AdamW if named.pop("decoupled", True) else torch.optim.Adam
    decoupled = optimizer is torch.optim.AdamW
    torch_named = {"weight_decay": 0.0, **named}
    return Case(RULE_ADAM, adam_hyper(decoupled=decoupled, **named), lambda params: optimizer(params, **torch_named))


def sgd_case(**options: object) -> Case:
    named = {"lr": 0.01, **options}
    return Case(RULE_SGD, sgd_hyper(**named), lambda params: torch.optim.SGD(params, **named))


CASES = {
    "adam": adam_case(decoupled=False),
    "adamw": adam_case(weight_decay=0.1),
    "adam, coupled decay": adam_case(decoupled=False, weight_decay=0.1),
    "adamw, amsgrad": adam_case(weight_decay=0.1, amsgrad=True),
    "adam, amsgrad, maximize": adam_case(decoupled=False, amsgrad=True, maximize=True, weight_decay=0.01),
    "adamw, maximize": adam_case(maximize=True, weight_decay=0.1, betas=(0.5, 0.9), eps=1e-3),
    "sgd": sgd_case(),
    "sgd, decay, maximize": sgd_case(weight_decay=0.1, maximize=True),
    "sgd, momentum": sgd_case(momentum=0.9),
    "sgd, dampening": sgd_case(momentum=0.9, dampening=0.3, weight_decay=0.01),
    "sgd, nesterov": sgd_case(momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
BOTH_EXTRAS = [CASES["adamw, amsgrad"], CASES["sgd, nesterov"]]
both_rules = pytest.mark.parametrize("case", BOTH_EXTRAS, ids=["adam", "sgd"])


def ready(
    case: Case,
    kind: tuple[torch.dtype, bool],
    sizes: Sequence[int] = SIZES,
    shift: int = 0,
    step: int = 3,
    skipped: float = 0.0,
    seed: int = 0,
) -> Buffers:
    """Buffers as just before the step that makes the count ``step``; every state in use is filled."""
    generator = torch.Generator().manual_seed(seed)
    dtype, has_master = kind
    slots = range(len(sizes))
    buffers = Buffers(sizes, masters=slots if has_master else (), extras=slots if case.has_extra else (), shift=shift)
    for s, n in enumerate(sizes):
        random = [torch.randn(n, generator=generator) for _ in range(5)]
        param = buffers.add_param(random[0], dtype, shift)
        if has_master:
            # The master holds bits that the parameter has rounded away.
            buffers.fill("master", s, param.float() * (1 + random[1].clamp(-1, 1) * 2.0**-12))
        buffers.fill("acc", s, random[2])
        if case.rule == RULE_ADAM:
            buffers.fill("exp_avg", s, random[3])
            buffers.fill("exp_avg_sq", s, random[4].square())
        if case.has_extra:
            buffers.fill("extra", s, random[3].square() if case.rule == RULE_ADAM else random[3])
    buffers.steps.fill_(step - 1.0)
    buffers.partials.fill_(1.0)
    reference_finalize(buffers, case)
    # Whether to skip is one entry's to say: a window without weight has nothing that is not finite.
    buffers.control[layout.SKIPPED], buffers.control[layout.FOUND_INF] = skipped, 1.0 - skipped
    return buffers


def reference_finalize(buffers: Buffers, case: Case) -> None:
    """``finalize_`` has its own tests."""
    finalize(reference_ops, buffers, [case.hyper], case.rule, numerator=0.3)


def run_step(backend: Backend, buffers: Buffers, rule: int, slots: Sequence[int] | None = None) -> None:
    slots = list(range(len(buffers.sizes))) if slots is None else list(slots)
    params = [buffers.params[s] for s in slots]
    shared = (buffers.acc, buffers.table, buffers.scalars, buffers.control, slots)
    if rule == RULE_ADAM:
        backend.adam_step_(params, buffers.exp_avg, buffers.exp_avg_sq, buffers.extra, buffers.master, *shared)
    else:
        backend.sgd_step_(params, buffers.extra, buffers.master, *shared)


def written(case: Case, has_master: bool, slots: Sequence[int]) -> dict[str, Sequence[int]]:
    """What a step of ``slots`` may write."""
    names = (["exp_avg", "exp_avg_sq"] if case.rule == RULE_ADAM else []) + ["master"] * has_master
    return dict.fromkeys(names + ["extra"] * case.has_extra, slots) | {f"params[{s}]": [s] for s in slots}


def updated(case: Case, state: dict[str, Rounded], acc: Rounded, multiplier: float, step: int) -> dict[str, Rounded]:
    """The update by its definition (Kingma and Ba 2015; torch.optim.SGD), with the error bound of an fp32 one."""
    if case.rule == RULE_SGD:
        lr, momentum, dampening, nesterov, weight_decay, _, sign, _ = case.hyper
        direction = acc * Rounded.of_fp64(multiplier * sign) + Rounded.of_fp64(weight_decay) * state["param"]
        new = dict(state)
        if momentum:
            rho = Rounded.of_fp64(momentum)
            later = rho * state["extra"] + Rounded.of_fp64(1 - dampening) * direction
            new["extra"] = direction if step == 1 else later
            direction = direction + rho * new["extra"] if nesterov else new["extra"]
        new["param"] = state["param"] - Rounded.of_fp64(lr) * direction
        return new
    lr, beta1, beta2, eps, weight_decay, decoupled, sign, amsgrad = case.hyper
    param = state["param"] * Rounded.of_fp64(1 - lr * weight_decay if decoupled else 1.0)
    grad = acc * Rounded.of_fp64(multiplier * sign) + Rounded.of_fp64(0.0 if decoupled else weight_decay) * param
    new = dict(state)
    new["exp_avg"] = Rounded.of_fp64(beta1) * state["exp_avg"] + Rounded.of_fp64(1 - beta1) * grad
    new["exp_avg_sq"] = Rounded.of_fp64(beta2) * state["exp_avg_sq"] + Rounded.of_fp64(1 - beta2) * (grad * grad)
    second = new["exp_avg_sq"]
    if amsgrad:
        second = new["extra"] = state["extra"].maximum(second)
    root = second.sqrt() * Rounded.of_fp64(1 / math.sqrt(1 - beta2**step))
    size = Rounded.of_fp64(lr / (1 - beta1**step))
    new["param"] = param - size * (new["exp_avg"] / (root + Rounded.of_fp64(eps)))
    return new


def state_of(buffers: Buffers, case: Case, slot: int, has_master: bool) -> dict[str, np.ndarray]:
    """The slot's fp32 values by the names of ``updated``."""
    state = {"param": fp64(buffers.of("master", slot)) if has_master else fp64(buffers.params[slot])}
    if case.rule == RULE_ADAM:
        state |= {name: fp64(buffers.of(name, slot)) for name in ("exp_avg", "exp_avg_sq")}
    if case.has_extra:
        state["extra"] = fp64(buffers.of("extra", slot))
    return state


@every_case
@every_kind
class TestUpdate:
    def test_is_the_definition_and_writes_nothing_else(
        self, backend: Backend, case: Case, kind: tuple[torch.dtype, bool]
    ) -> None:
        dtype, has_master = kind
        buffers = ready(case, kind)
        multiplier = buffers.control[layout.GRAD_MULTIPLIER].item()
        exact = {}
        for s in ALL:
            state = {name: Rounded(value) for name, value in state_of(buffers, case, s, has_master).items()}
            exact[s] = updated(case, state, Rounded(fp64(buffers.of("acc", s))), multiplier, 3)
        before = buffers.snapshot()
        run_step(backend, buffers, case.rule)
        buffers.assert_only_changed(before, written(case, has_master, ALL))
        for s in ALL:
            after = state_of(buffers, case, s, has_master)
            if has_master:
                assert_same_bits(buffers.params[s], buffers.of("master", s).to(dtype), f"params[{s}]")
            elif dtype != torch.float32:
                # One rounding to 16 bits, of relative size half an eps (fp16: of at least half its smallest subnormal).
                half_ulp = torch.finfo(dtype).eps / 2 * np.abs(exact[s]["param"].value) + 2.0**-25
                exact[s]["param"].error = exact[s]["param"].error * (1 + 2.0**-7) + half_ulp * (1 + 2.0**-20)
            for name, bound in exact[s].items():
                bound.assert_holds(after[name], f"{name} of slot {s}")

    def test_agrees_with_the_reference_to_the_bit(
        self, backend: Backend, reference: Backend, case: Case, kind: tuple[torch.dtype, bool]
    ) -> None:
        for step in (1, 3):
            results = [ready(case, kind, step=step) for _ in range(2)]
            for each, buffers in zip((backend, reference), results, strict=True):
                run_step(each, buffers, case.rule)
            assert_same_buffers(*results)

    def test_a_skipped_window_leaves_every_bit(
        self, backend: Backend, case: Case, kind: tuple[torch.dtype, bool]
    ) -> None:
        buffers = ready(case, kind, skipped=1.0)
        buffers.params[-1].fill_(math.nan)  # a NaN must not even be quieted
        before = buffers.snapshot()
        run_step(backend, buffers, case.rule)
        buffers.assert_only_changed(before, {})


@both_rules
class TestPlaces:
    @every_kind
    def test_unaligned_views(self, backend: Backend, case: Case, kind: tuple[torch.dtype, bool]) -> None:
        aligned, shifted = ready(case, kind), ready(case, kind, shift=1)
        before = shifted.snapshot()
        for buffers in (aligned, shifted):
            run_step(backend, buffers, case.rule)
        shifted.assert_only_changed(before, written(case, kind[1], ALL))
        for s in ALL:
            assert_same_bits(shifted.params[s], aligned.params[s], f"params[{s}]")
            for name in written(case, kind[1], ()):
                assert_same_bits(shifted.of(name, s), aligned.of(name, s), f"{name} of slot {s}")

    @every_kind
    def test_a_result_does_not_depend_on_its_position(
        self, backend: Backend, case: Case, kind: tuple[torch.dtype, bool]
    ) -> None:
        n = CHUNK + LANES + 19
        buffers = ready(case, kind, (n,), shift=1)
        for name in [name for name in written(case, kind[1], ()) if not name.startswith("params")] + ["acc"]:
            buffers.of(name, 0).fill_(0.3391)
        buffers.params[0].fill_(0.7713)
        run_step(backend, buffers, case.rule)
        assert buffers.params[0].unique().numel() == 1
        for name in written(case, kind[1], ()):
            assert buffers.of(name, 0).unique().numel() == 1, name

    def test_slots_not_named_are_untouched(self, backend: Backend, case: Case) -> None:
        buffers = ready(case, KINDS[1])
        whole = ready(case, KINDS[1])
        slots = [len(SIZES) - 1, 0, 4]  # in any order
        before = buffers.snapshot()
        run_step(backend, buffers, case.rule, slots)
        buffers.assert_only_changed(before, written(case, True, slots))
        run_step(backend, whole, case.rule)
        for s in slots:
            assert_same_bits(buffers.params[s], whole.params[s])
        before = buffers.snapshot()
        run_step(backend, buffers, case.rule, [])
        buffers.assert_only_changed(before, {})

    def test_parameters_keep_their_memory_order(self, backend: Backend, case: Case) -> None:
        shapes = [torch.empty(37, 41).t(), torch.empty(2, 3, 5, 7).to(memory_format=torch.channels_last)]
        flat, ordered = (ready(case, KINDS[0], [t.numel() for t in shapes]) for _ in range(2))
        ordered.params = [
            param.as_strided(like.shape, like.stride()) for param, like in zip(ordered.params, shapes, strict=True)
        ]
        for buffers in (flat, ordered):
            run_step(backend, buffers, case.rule)
        assert_same_buffers(ordered, flat)

    def test_one_call_takes_every_kind_of_parameter(self, backend: Backend, reference: Backend, case: Case) -> None:
        results = []
        for each in (backend, reference):
            sizes = [3, 40, CHUNK + 9, 0, 77] * 2
            kinds = KINDS * 2
            masters = [s for s, (_, has_master) in enumerate(kinds) if has_master]
            buffers = Buffers(sizes, masters=masters, extras=range(5, 10))
            generator = torch.Generator().manual_seed(1)
            for s, (dtype, has_master) in enumerate(kinds):
                param = buffers.add_param(torch.randn(sizes[s], generator=generator), dtype)
                names = ["acc", "exp_avg", "exp_avg_sq"] + ["master"] * has_master + ["extra"] * (s >= 5)
                for name in names:
                    buffers.fill(name, s, param.float().abs() + 0.5)
            buffers.steps.fill_(1.0)
            buffers.partials.fill_(1.0)
            reference_finalize(buffers, case)
            before = buffers.snapshot()
            run_step(each, buffers, case.rule)
            buffers.assert_only_changed(
                before, written(case, False, range(10)) | {"master": masters, "extra": range(5, 10)}
            )
            results.append(buffers)
        assert_same_buffers(*results)


@every_case
def test_a_run_follows_torch_in_fp64(backend: Backend, case: Case) -> None:
    """Five windows through all three ops: the bound grows as fp32's own errors do, torch is well within."""
    sizes = (33, 1025)
    buffers = Buffers(sizes, extras=range(2) if case.has_extra else ())
    params = [buffers.add_param(torch.randn(n), torch.float32) for n in sizes]
    doubles = [torch.nn.Parameter(param.double()) for param in params]
    optimizer = case.torch_optimizer(doubles)
    for buffer in (buffers.exp_avg, buffers.exp_avg_sq, buffers.extra, buffers.steps):
        if buffer is not None:
            buffer.zero_()
    names = [*(("exp_avg", "exp_avg_sq") if case.rule == RULE_ADAM else ()), *(["extra"] if case.has_extra else [])]
    exact = [
        {"param": Rounded(fp64(param)), **{name: Rounded(np.zeros(param.numel())) for name in names}}
        for param in params
    ]
    for step in range(1, 6):
        grads = [torch.randn(n) for n in sizes]
        accumulate(backend, buffers, grads, [1, 1])
        finalize(backend, buffers, [case.hyper], case.rule, numerator=0.5)
        run_step(backend, buffers, case.rule)
        for double, grad in zip(doubles, grads, strict=True):
            double.grad = grad.double() * 0.5
        optimizer.step()
        for s in (0, 1):
            exact[s] = updated(case, exact[s], Rounded(fp64(grads[s])), 0.5, step)
            exact[s]["param"].assert_holds(fp64(params[s]), f"step {step}, params[{s}]")
            # That the definition is torch's: the same formulas in fp64, some twenty roundings a step.
            np.testing.assert_allclose(fp64(doubles[s]), exact[s]["param"].value, rtol=1e-12, atol=1e-14)


def test_amsgrad_keeps_a_nan(backend: Backend) -> None:
    # torch.maximum: a NaN in either operand wins. A `>` would silently drop one.
    case = CASES["adamw, amsgrad"]
    buffers = ready(case, KINDS[0], (40,))
    buffers.of("extra", 0)[7] = math.nan
    buffers.of("exp_avg_sq", 0)[9] = math.nan
    run_step(backend, buffers, case.rule)
    assert buffers.of("extra", 0).isnan().nonzero().flatten().tolist() == [7, 9]


def test_the_first_momentum_buffer_is_not_read(backend: Backend) -> None:
    case = CASES["sgd, dampening"]
    buffers = ready(case, KINDS[0], (40,), step=1)
    buffers.of("extra", 0).fill_(math.nan)
    run_step(backend, buffers, case.rule)
    assert buffers.of("extra", 0).isfinite().all()
    assert buffers.params[0].isfinite().all()


@both_rules
@pytest.mark.parametrize("kind", KINDS[:2], ids=["float32", "bfloat16+master"])
@pytest.mark.usefixtures("native")
def test_opcheck(case: Case, kind: tuple[torch.dtype, bool]) -> None:
    buffers = ready(case, kind, (3, 0, CHUNK + 1))
    shared = (buffers.acc, buffers.table, buffers.scalars, buffers.control, [0, 1, 2])
    if case.rule == RULE_ADAM:
        arguments = (buffers.params, buffers.exp_avg, buffers.exp_avg_sq, buffers.extra, buffers.master, *shared)
        torch.library.opcheck(torch.ops.fusedaccum.adam_step_.default, arguments)
    else:
        arguments = (buffers.params, buffers.extra, buffers.master, *shared)
        torch.library.opcheck(torch.ops.fusedaccum.sgd_step_.default, arguments)


@pytest.mark.parametrize("rule", [RULE_ADAM, RULE_SGD], ids=["adam", "sgd"])
def test_an_accumulator_beyond_the_caches(native: Backend, reference: Backend, rule: int) -> None:
    """From 32 MiB on the CPU kernels ask for memory ahead and stream 16-bit parameters, those that are aligned."""
    params = [*every_param(rule, (9, 1033, CHUNK + 40)), Param(2**23, torch.float32, False, 0)]
    slots = range(1, len(params))  # not the large one
    results = []
    for backend in (native, reference):
        buffers = ready_to_step(rule, params, 0, normal, 0.0)
        assert any(buffers.params[s].data_ptr() % 64 == 0 for s in slots), "nothing is streamed"
        run_step(backend, buffers, rule, slots)
        results.append(buffers)
    assert_same_buffers(*results)
