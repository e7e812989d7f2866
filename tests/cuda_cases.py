"""What the CUDA kernels are checked with. Each function runs an op natively and by PTX, and compares every bit.

The tests of the kernels and the tests of these checks (test_cuda_planted_faults.py) call the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from cuda_harness import PtxBackend
from helpers import (
    DTYPES,
    Buffers,
    accumulate,
    adam_hyper,
    assert_same_bits,
    assert_same_buffers,
    finalize,
    guarded,
    placed,
    sgd_hyper,
)
from torch import Tensor

from fusedaccum import layout
from fusedaccum import reference as reference_ops
from fusedaccum.backends import Backend
from fusedaccum.layout import CHUNK, RULE_ADAM, RULE_SGD

# Either side of a thread's 8 elements, of a row of 1024, and of a chunk; and several chunks.
SIZES = (0, 1, 7, 8, 9, 1023, 1024, 1025, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1033)
FEW_SIZES = (7, 0, 9, 1023, 1025, CHUNK + 9)
SCALE = 0.3
# Beyond 2^32 bytes, 2^32 elements and 2^31 chunks; a multiple of 64 elements, as every offset is.
FAR_ELEMS = 2**33 + 64
# Chunks until beyond 2^31 elements of one tensor.
BEFORE_CHUNKS = 2**31 // CHUNK + 1

Make = Callable[[int, torch.dtype, torch.Generator], Tensor]


def normal(n: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(n, generator=generator).to(dtype)


def any_bits(n: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Subnormals, infinities and NaNs too."""
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    info = torch.iinfo(integer)
    return torch.randint(info.min, info.max + 1, (n,), generator=generator, dtype=torch.int64).to(integer).view(dtype)


def wide(n: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Magnitudes from 2^-12 to 2^12. Squares of a narrower range add up exactly in fp64, in whatever order."""
    exponents = torch.rand(n, generator=generator) * 24 - 12
    return (torch.randn(n, generator=generator).sign() * exponents.exp2()).to(dtype)


@dataclass(frozen=True)
class Grad:
    """A gradient ``shift`` elements off its alignment; ``first``: the first of its window."""

    n: int
    dtype: torch.dtype
    first: bool = False
    shift: int = 0


def every_grad(sizes: Sequence[int], shifts: Sequence[int] = (0,), parity: int = 0) -> list[Grad]:
    """Each size, dtype and shift; first adds alternate with later ones, the other way round for the other parity."""
    cases = [(n, dtype, shift) for shift in shifts for dtype in DTYPES for n in sizes]
    return [Grad(n, dtype, (i + i // len(sizes)) % 2 == parity, shift) for i, (n, dtype, shift) in enumerate(cases)]


def tiny_grads(n: int) -> list[Grad]:
    return [Grad(1 + i % 11, DTYPES[i % 3], i % 5 == 0) for i in range(n)]


def check_accumulate(
    native: Backend,
    ptx: PtxBackend,
    grads: Sequence[Grad],
    *,
    acc_shift: int = 0,
    make: Make = normal,
    micro: bool = False,
    factor: float | None = None,
) -> Buffers:
    """The accumulator and both kinds of partials. Slots that take no part lie before and behind those that do."""
    results = []
    for backend in (native, ptx):
        generator = torch.Generator().manual_seed(len(grads))
        buffers = Buffers([17, *(grad.n for grad in grads), 40], shift=acc_shift)
        slots = list(range(len(grads), 0, -1))  # not in the order of the tensors
        tensors = []
        for slot in slots:
            grad = grads[slot - 1]
            tensors.append(placed(make(grad.n, grad.dtype, generator), grad.dtype, grad.shift))
            old = make(grad.n, torch.float32, generator)
            if not grad.first:
                buffers.fill("acc", slot, old)
                buffers.of("partials", slot).fill_(0.5)
                buffers.of("micro_partials", slot).fill_(0.3)
        first = [int(grads[slot - 1].first) for slot in slots]
        accumulate(backend, buffers, tensors, first, slots, scale=SCALE, factor=factor, micro=micro)
        results.append(buffers)
    assert_same_buffers(*results[::-1])
    return results[1]


# fp32 squares overflow from 1.8e19 on. A lane overflows by itself, or only the sum of two rows; the tree cannot.
SPOILT = {
    "overflows": (1e20, math.isfinite),
    "overflows in a sum": (1.4e19, math.isfinite),
    "inf": (math.inf, math.isinf),
    "-inf": (-math.inf, math.isinf),
    "nan": (math.nan, math.isnan),
    "largest": (3.4e38, math.isfinite),
}


def spoilt(n: int, value: float) -> Tensor:
    """Ones, but for ``value`` in the last element and in the same lane of each row before."""
    values = torch.ones(n)
    values[(n - 1) % layout.LANES :: layout.LANES] = value
    return values


def check_overflow(native: Backend, ptx: PtxBackend, *, op: str, sizes: Sequence[int], micro: bool = False) -> Buffers:
    """Chunks whose fp32 sum of squares is not finite: finite after a second look exactly if every element is."""
    cases = [(n, *SPOILT[name]) for n in sizes for name in SPOILT]
    results = []
    for backend in (native, ptx):
        buffers = Buffers([n for n, *_ in cases])
        slots = list(range(len(cases)))
        values = [spoilt(n, value) for n, value, _ in cases]
        if op == "measure_":
            for slot in slots:
                buffers.fill("acc", slot, values[slot])
            backend.measure_(buffers.partials, buffers.acc, buffers.table, slots, [n for n, *_ in cases])
        else:
            first = [slot % 2 for slot in slots]
            for slot in slots:
                if not first[slot]:
                    buffers.fill("acc", slot, torch.zeros(cases[slot][0]))
                    buffers.of("micro_partials", slot).fill_(1.0)
            accumulate(backend, buffers, values, first, micro=micro)
        results.append(buffers)
    assert_same_buffers(*results[::-1])
    for slot, (n, _, is_right) in enumerate(cases):
        last = results[1].of("partials", slot)[-1].item()
        assert is_right(last), f"the last partial of slot {slot}, {n} elements, is {last}"
    return results[1]


def check_measure(native: Backend, ptx: PtxBackend, sizes: Sequence[int], *, make: Make = normal) -> None:
    results = []
    for backend in (native, ptx):
        generator = torch.Generator().manual_seed(1)
        buffers = Buffers([17, *sizes, 40])
        slots = list(range(len(sizes), 0, -1))
        for slot in slots:
            buffers.fill("acc", slot, make(sizes[slot - 1], torch.float32, generator))
        backend.measure_(buffers.partials, buffers.acc, buffers.table, slots, [sizes[slot - 1] for slot in slots])
        results.append(buffers)
    assert_same_buffers(*results[::-1])


# (dtype, has a master)
KINDS = (
    (torch.float32, False),
    (torch.bfloat16, True),
    (torch.float16, True),
    (torch.bfloat16, False),
    (torch.float16, False),
)
GROUPS = {
    RULE_ADAM: [
        adam_hyper(lr=0.01, weight_decay=0.1),
        adam_hyper(lr=0.01, decoupled=False, weight_decay=0.1, maximize=True),
        adam_hyper(lr=0.01, weight_decay=0.1, amsgrad=True),
        adam_hyper(lr=0.02, decoupled=False, amsgrad=True, maximize=True, betas=(0.5, 0.9), eps=1e-3),
    ],
    RULE_SGD: [
        sgd_hyper(lr=0.01),
        sgd_hyper(lr=0.01, weight_decay=0.1, maximize=True),
        sgd_hyper(lr=0.01, momentum=0.9),
        sgd_hyper(lr=0.01, momentum=0.9, dampening=0.3, weight_decay=0.01),
        sgd_hyper(lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
    ],
}


def has_extra(rule: int, hyper: Sequence[float]) -> bool:
    """Whether the group keeps the state that only some have."""
    return bool(hyper[7] if rule == RULE_ADAM else hyper[1])


@dataclass(frozen=True)
class Param:
    """A parameter ``shift`` elements off its alignment, about to make its update number ``step``."""

    n: int
    dtype: torch.dtype
    has_master: bool
    group: int
    step: int = 3
    shift: int = 0


def every_param(rule: int, sizes: Sequence[int], shifts: Sequence[int] = (0,)) -> list[Param]:
    """Each size for each kind and group, the first step for some."""
    cases = [
        (n, kind, group, shift)
        for group in range(len(GROUPS[rule]))
        for kind in KINDS
        for shift in shifts
        for n in sizes
    ]
    return [Param(n, *kind, group, 1 if i % 3 == 0 else 3, shift) for i, (n, kind, group, shift) in enumerate(cases)]


def tiny_params(rule: int, n: int) -> list[Param]:
    groups = len(GROUPS[rule])
    return [Param(1 + i % 11, *KINDS[i % len(KINDS)], i // 5 % groups, 1 + i % 2) for i in range(n)]


def ready_to_step(rule: int, params: Sequence[Param], shift: int, make: Make, skipped: float) -> Buffers:
    """Buffers as before a step. Slots that take no part lie before and behind those that do."""
    generator = torch.Generator().manual_seed(len(params))
    outside = Param(17, torch.bfloat16, True, len(GROUPS[rule]) - 1)
    every = [outside, *params, outside]
    # Some slots have the extra state though their group has no use for it (any more).
    extras = [s for s, p in enumerate(every) if has_extra(rule, GROUPS[rule][p.group]) or s % 4 == 0]
    masters = [s for s, p in enumerate(every) if p.has_master]
    buffers = Buffers([p.n for p in every], [p.group for p in every], masters, extras, shift)
    for s, param in enumerate(every):
        values = buffers.add_param(make(param.n, torch.float32, generator), param.dtype, param.shift)
        if param.has_master:  # it holds bits that the parameter has rounded away
            buffers.fill("master", s, values.float() * (1 + torch.rand(param.n, generator=generator) * 2.0**-10))
        buffers.fill("acc", s, make(param.n, torch.float32, generator))
        if rule == RULE_ADAM:
            buffers.fill("exp_avg", s, make(param.n, torch.float32, generator))
            buffers.fill("exp_avg_sq", s, make(param.n, torch.float32, generator).square())
        if s in extras:
            extra = make(param.n, torch.float32, generator)
            buffers.fill("extra", s, extra.square() if rule == RULE_ADAM else extra)
        buffers.steps[s] = param.step - 1.0
    buffers.partials.fill_(1.0)
    finalize(reference_ops, buffers, GROUPS[rule], rule, numerator=0.3)
    # Only one entry says whether to skip.
    buffers.control[layout.SKIPPED], buffers.control[layout.FOUND_INF] = skipped, 1.0 - skipped
    return buffers


def realign(buffers: Buffers, name: str) -> None:
    """Moves the buffer ``name`` off its alignment, by one element."""
    old = getattr(buffers, name)
    buffers.whole[name], moved = guarded(old.numel(), old.dtype, 1)
    setattr(buffers, name, moved.copy_(old))


def step(backend: Backend | PtxBackend, buffers: Buffers, rule: int, slots: Sequence[int]) -> None:
    params = [buffers.params[s] for s in slots]
    shared = (buffers.acc, buffers.table, buffers.scalars, buffers.control, list(slots))
    if rule == RULE_ADAM:
        backend.adam_step_(params, buffers.exp_avg, buffers.exp_avg_sq, buffers.extra, buffers.master, *shared)
    else:
        backend.sgd_step_(params, buffers.extra, buffers.master, *shared)


def check_step(
    native: Backend,
    ptx: PtxBackend,
    rule: int,
    params: Sequence[Param],
    *,
    shift: int = 0,
    unaligned: str | None = None,
    make: Make = normal,
    skipped: float = 0.0,
) -> None:
    """Parameters, states and masters.

    Args:
        shift: elements by which all flat buffers are off their alignment.
        unaligned: the one buffer that is.
    """
    results = []
    for backend in (native, ptx):
        buffers = ready_to_step(rule, params, shift, make, skipped)
        if unaligned is not None:
            realign(buffers, unaligned)
        before = buffers.snapshot()
        step(backend, buffers, rule, range(len(params), 0, -1))
        if skipped:
            buffers.assert_only_changed(before, {})
        results.append(buffers)
    assert_same_buffers(*results[::-1])


@dataclass
class Boundary:
    """The arguments of ``finalize_`` for slots of ``sizes``, with partials of very different magnitudes."""

    sizes: Sequence[int]
    rule: int
    active: Sequence[int] | None = None
    step: float = 0.0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(len(self.sizes))
        places, n_groups = layout.Layout(), len(GROUPS[self.rule])
        rows = [places.add(n).row(s % n_groups) for s, n in enumerate(self.sizes)]
        self.table = torch.tensor(rows, dtype=torch.int64).view(-1, len(layout.SLOT_COLUMNS))
        self.partials, self.micro_partials = (
            torch.randn(places.n_chunks, generator=generator, dtype=torch.float64).mul(4).exp() for _ in range(2)
        )
        # As after some windows, in the midst of one, with a scale that grows now.
        self.window = torch.rand(layout.WINDOW_SIZE, generator=generator, dtype=torch.float64) + 0.5
        self.window[layout.GROWTH_TRACKER], self.window[layout.GROWTH_INTERVAL] = 4.0, 5.0
        self.hyper = torch.tensor(GROUPS[self.rule], dtype=torch.float64)
        self.control = torch.full((layout.CONTROL_SIZE,), math.nan, dtype=torch.float64)
        self.scalars = torch.full((len(rows), layout.SCALAR_COLUMNS), math.nan)
        self.steps = torch.arange(len(rows)).remainder(3).float() + self.step
        self.mask = torch.full((len(rows),), int(self.active is None), dtype=torch.uint8)
        self.mask[list(self.active or [])] = 1


def check_finalize(
    native: Backend,
    ptx: PtxBackend,
    boundary: Callable[[], Boundary],
    *,
    numerator: float = 0.7,
    weight: float = 2.5,
    max_norm: float = math.inf,
    extra: Sequence[float] | None = None,
    micro: bool = True,
    rule: int | None = None,
    advance: bool = True,
) -> Boundary:
    """``control``, ``window``, ``scalars`` and ``steps``. ``rule``: instead of the boundary's."""
    results = []
    for backend in (native, ptx):
        b = boundary()
        elsewhere = None if extra is None else torch.tensor(extra, dtype=torch.float64)
        sums = (b.partials, b.micro_partials if micro else None)
        tensors = (b.control, b.scalars, b.steps, b.window, *sums, b.table, b.hyper, b.mask)
        used_rule = b.rule if rule is None else rule
        backend.finalize_(*tensors, used_rule, numerator, weight, weight * 0.3, max_norm, elsewhere, advance)
        results.append(b)
    for name in ("control", "window", "scalars", "steps"):
        assert_same_bits(getattr(results[1], name), getattr(results[0], name), name)
    return results[1]


def check_windows(native: Backend, ptx: Backend, rule: int) -> None:
    """Three windows of two micro-batches; the second window has an inf in it, and each leaves out a parameter more."""
    params = every_param(rule, (5, 1033)) + [Param(CHUNK + 3, torch.bfloat16, True, 0)]
    results = []
    for backend in (native, ptx):
        generator = torch.Generator().manual_seed(3)
        buffers = ready_to_step(rule, params, 0, lambda n, dtype, g: torch.randn(n, generator=g).to(dtype), 0.0)
        slots = list(range(1, len(params) + 1))
        for window in range(3):
            active = slots[window:]
            for micro_batch in range(2):
                grads = [torch.randn(params[s - 1].n, generator=generator).to(params[s - 1].dtype) for s in active]
                if window == 1 and micro_batch == 0:
                    grads[-1][CHUNK] = float("inf")
                first = [int(micro_batch == 0)] * len(active)
                accumulate(backend, buffers, grads, first, active, scale=SCALE, factor=0.7, micro=True)
            finalize(backend, buffers, GROUPS[rule], rule, active=active, numerator=0.5, max_norm=1.0, micro=True)
            assert buffers.control[layout.FOUND_INF] == float(window == 1)
            assert buffers.control[layout.SKIPPED] == float(window == 1)
            step(backend, buffers, rule, active)
        results.append(buffers)
    assert_same_buffers(*results[::-1])
