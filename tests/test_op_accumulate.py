"""accumulate_ and measure_: the accumulator to the bit, its partials to a derived bound."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from helpers import (
    DTYPES,
    SIZES,
    Buffers,
    any_bits,
    assert_same_bits,
    assert_same_buffers,
    assert_sums_of_squares,
    fp64,
    placed,
)
from helpers import accumulate as accumulate_scaled
from torch import Tensor

from fusedaccum.backends import Backend
from fusedaccum.layout import CHUNK, LANES

pytestmark = pytest.mark.usefixtures("one_thread")
SCALE = 0.3  # not a power of two: the product is rounded, and so is the scale itself
ALL = range(len(SIZES))


def grads_of(sizes: tuple[int, ...], dtype: torch.dtype, shift: int = 0) -> list[Tensor]:
    return [placed(torch.randn(n), dtype, shift) for n in sizes]


def with_old_values(sizes: tuple[int, ...], shift: int = 0) -> Buffers:
    buffers = Buffers(sizes, shift=shift)
    for s, n in enumerate(sizes):
        buffers.fill("acc", s, torch.randn(n))
    return buffers


def measure(backend: Backend, buffers: Buffers, slots: list[int]) -> None:
    n_elems = buffers.table[slots, 1].tolist()
    backend.measure_(buffers.partials, buffers.acc, buffers.table, slots, n_elems)


accumulate = partial(accumulate_scaled, scale=SCALE)


def expected_acc(old: np.ndarray | None, grad: Tensor, scale: float = SCALE) -> np.ndarray:
    """Two operations, each rounded once, from fp64.

    The fp64 product of two fp32 values is exact. The fp64 sum is not always, but fp64 has more than twice fp32's bits
    plus two, so that rounding it again to fp32 gives what one rounding would (Figueroa 1995).
    """
    product = (fp64(grad) * float(np.float32(scale))).astype(np.float32)
    if old is None:
        return product
    return (old.astype(np.float64) + product.astype(np.float64)).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("grad_shift", "acc_shift"), [(0, 0), (1, 0), (0, 1), (3, 2)])
class TestEverySize:
    def test_first_add_stores_without_reading(
        self, backend: Backend, dtype: torch.dtype, grad_shift: int, acc_shift: int
    ) -> None:
        buffers = Buffers(SIZES, shift=acc_shift)  # acc is NaN: reading it would show
        grads = grads_of(SIZES, dtype, grad_shift)
        before = buffers.snapshot()
        accumulate(backend, buffers, grads, [1] * len(SIZES))
        buffers.assert_only_changed(before, {"acc": ALL, "partials": ALL})
        for s in ALL:
            assert_same_bits(buffers.of("acc", s), torch.from_numpy(expected_acc(None, grads[s])), f"acc of slot {s}")
            assert_sums_of_squares(buffers.of("partials", s), buffers.of("acc", s))

    def test_later_add(self, backend: Backend, dtype: torch.dtype, grad_shift: int, acc_shift: int) -> None:
        buffers = with_old_values(SIZES, acc_shift)
        grads = grads_of(SIZES, dtype, grad_shift)
        old = [buffers.of("acc", s).numpy().copy() for s in ALL]
        before = buffers.snapshot()
        accumulate(backend, buffers, grads, [0] * len(SIZES))
        buffers.assert_only_changed(before, {"acc": ALL, "partials": ALL})
        for s in ALL:
            assert_same_bits(buffers.of("acc", s), torch.from_numpy(expected_acc(old[s], grads[s])), f"acc of slot {s}")
            assert_sums_of_squares(buffers.of("partials", s), buffers.of("acc", s))


@pytest.mark.parametrize("values", ["normal", "awkward"])
def test_agrees_with_the_reference_to_the_bit(backend: Backend, reference: Backend, values: str) -> None:
    sizes = SIZES * 3
    make = any_bits if values == "awkward" else lambda n, dtype: torch.randn(n).to(dtype)
    grads = [make(n, DTYPES[i % 3]) for i, n in enumerate(sizes)]
    old = [make(n, torch.float32) for n in sizes]
    first = [i % 2 for i in range(len(sizes))]
    results = []
    for each in (backend, reference):
        buffers = Buffers(sizes)
        for s, value in enumerate(old):
            buffers.fill("acc", s, value)
        accumulate(each, buffers, grads, first)
        results.append(buffers)
    assert_same_buffers(*results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_does_not_depend_on_its_position(backend: Backend, dtype: torch.dtype) -> None:
    # A vector body and a scalar tail that round differently would give the same element two values.
    n = CHUNK + LANES + 19
    buffers = Buffers([n, n], shift=1)
    grads = [placed(torch.full((n,), 0.7371), dtype, shift) for shift in (0, 1)]
    for s in (0, 1):
        buffers.fill("acc", s, torch.full((n,), 1.9127))
    accumulate(backend, buffers, grads, [0, 0])
    assert buffers.of("acc", 0).unique().numel() == 1
    assert_same_bits(buffers.of("acc", 1), buffers.of("acc", 0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(37, 41).t(),
        lambda: torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last),
        lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
        lambda: torch.randn(6, 1, 5)[:, 0:1].transpose(0, 1),
        lambda: torch.randn(()),
    ],
    ids=["transposed", "channels-last", "permuted", "size-1 dimension", "0-dim"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_order_is_kept(backend: Backend, dtype: torch.dtype, make: object) -> None:
    grad = make().to(dtype)
    buffers = Buffers([grad.numel()])
    accumulate(backend, buffers, [grad], [1])
    view = buffers.acc.as_strided(grad.shape, grad.stride())
    assert torch.equal(view, grad.float() * SCALE)


@pytest.mark.parametrize("op", ["accumulate_", "measure_"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_non_finite_element_is_seen_wherever_it_is(backend: Backend, op: str, bad: float) -> None:
    # The first lane, either side of a vector and of a round of lanes, either side of a chunk, and the tail.
    n = 2 * CHUNK + LANES + 5
    positions = [0, 15, 16, LANES - 1, LANES, CHUNK - 1, CHUNK, 2 * CHUNK, 2 * CHUNK + LANES, n - 1]
    buffers = Buffers([n])
    for position in positions:
        grad = torch.ones(n)
        grad[position] = bad
        if op == "accumulate_":
            accumulate(backend, buffers, [grad], [1])
        else:
            buffers.fill("acc", 0, grad)
            measure(backend, buffers, [0])
        finite = buffers.of("partials", 0).isfinite().tolist()
        assert finite == [chunk != position // CHUNK for chunk in range(3)], position


@pytest.mark.parametrize("n", [1, 17, LANES, LANES + 1, CHUNK, 2 * CHUNK + 3])
def test_finite_elements_never_make_an_infinite_partial(backend: Backend, reference: Backend, n: int) -> None:
    # 1e20 squared is beyond fp32: such gradients are to be clipped, not skipped.
    results = []
    for each in (backend, reference):
        buffers = Buffers([n])
        accumulate(each, buffers, [torch.full((n,), 1e20)], [1], scale=1.0)
        results.append(buffers)
    partials, acc = results[0].of("partials", 0), fp64(results[0].of("acc", 0))
    exact = np.array([np.sum(acc[at : at + CHUNK] ** 2) for at in range(0, n, CHUNK)])
    # All in fp64: a lane's squares, its sums and the tree's ten levels, each rounded.
    np.testing.assert_allclose(partials.numpy(), exact, rtol=(CHUNK / LANES + 11) * 2.0**-53)
    assert_same_buffers(*results)


def test_the_largest_values_fit_a_partial(backend: Backend) -> None:
    largest = torch.finfo(torch.float32).max
    buffers = Buffers([CHUNK])
    accumulate(backend, buffers, [torch.full((CHUNK,), largest)], [1], scale=1.0)
    assert buffers.partials.item() == CHUNK * largest**2  # a power of two times one exact product


def test_partials_follow_the_accumulator_not_the_gradient(backend: Backend) -> None:
    buffers = Buffers([100])
    accumulate(backend, buffers, [torch.ones(100)], [1])
    accumulate(backend, buffers, [-torch.ones(100)], [0])
    assert buffers.partials.item() == 0.0


def test_slots_not_named_are_untouched(backend: Backend) -> None:
    buffers = with_old_values(SIZES)
    measure(backend, buffers, list(ALL))
    before = buffers.snapshot()
    slots = [len(SIZES) - 1, 2, 0]  # in any order
    accumulate(backend, buffers, [torch.randn(SIZES[s]) for s in slots], [0, 1, 1], slots)
    buffers.assert_only_changed(before, {"acc": slots, "partials": slots})
    assert_sums_of_squares(buffers.of("partials", slots[0]), buffers.of("acc", slots[0]))


def test_nothing_to_accumulate(backend: Backend) -> None:
    for sizes in ((), (0,), SIZES):
        buffers = Buffers(sizes)
        before = buffers.snapshot()
        accumulate(backend, buffers, [], [])
        measure(backend, buffers, [])
        buffers.assert_only_changed(before, {})


@pytest.mark.parametrize("shift", [0, 1])
def test_measure_gives_the_partials_of_accumulate(backend: Backend, shift: int) -> None:
    buffers = with_old_values(SIZES, shift)
    accumulate(backend, buffers, [torch.randn(n) for n in SIZES], [0] * len(SIZES))
    partials = buffers.partials.clone()
    buffers.partials.fill_(math.nan)
    before = buffers.snapshot()
    measure(backend, buffers, list(reversed(ALL)))
    buffers.assert_only_changed(before, {"partials": ALL})
    assert_same_bits(buffers.partials, partials)


def test_many_small_gradients_are_not_lost(backend: Backend) -> None:
    # 1024 bf16 gradients of 1.0 added in bf16 stop at 256.
    buffers = Buffers([3])
    grad = torch.ones(3, dtype=torch.bfloat16)
    for i in range(1024):
        accumulate(backend, buffers, [grad], [int(i == 0)], scale=1.0)
    assert buffers.of("acc", 0).tolist() == [1024.0] * 3
    assert buffers.partials.item() == 3 * 1024.0**2


class TestFactor:
    @pytest.mark.parametrize("first", [0, 1])
    @pytest.mark.parametrize("factor", [1.0, 0.7, -2.5, 2.0**-130, 1e30])
    def test_is_multiplied_in_fp64_and_rounded_once(self, backend: Backend, factor: float, first: int) -> None:
        if factor == 0.7:
            assert np.float32(SCALE * factor) != np.float32(SCALE) * np.float32(factor)
        buffers = with_old_values(SIZES)
        old = [None if first else buffers.of("acc", s).numpy().copy() for s in ALL]
        grads = [torch.randn(n) for n in SIZES]
        before = buffers.snapshot()
        accumulate(backend, buffers, grads, [first] * len(SIZES), factor=factor)
        buffers.assert_only_changed(before, {"acc": ALL, "partials": ALL})
        for s in ALL:
            expected = torch.from_numpy(expected_acc(old[s], grads[s], SCALE * factor))
            assert_same_bits(buffers.of("acc", s), expected, f"acc of slot {s}")

    def test_only_its_first_element_counts(self, backend: Backend) -> None:
        buffers = Buffers([3])
        factor = torch.tensor([2.0, math.nan], dtype=torch.float64)
        arguments = (buffers.acc, buffers.partials, None, buffers.table, [torch.ones(3)], [0], [1], 0.5, factor)
        backend.accumulate_(*arguments)
        assert buffers.of("acc", 0).tolist() == [1.0] * 3

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_one_that_is_no_number_is_seen(self, backend: Backend, bad: float) -> None:
        # Only zero adds nothing: a wrong weight must not pass for an empty micro-batch.
        buffers = with_old_values((5, 5))
        accumulate(backend, buffers, [torch.ones(5)] * 2, [0, 1], factor=bad)
        assert not buffers.partials.isfinite().any()


@pytest.mark.parametrize(
    ("scale", "factor"), [(0.0, None), (-0.0, None), (0.3, 0.0), (0.3, -0.0), (0.0, 5.0), (1e-30, 1e-30)]
)
@pytest.mark.parametrize("micro", [False, True])
class TestNothingAdded:
    """A micro-batch without a valid token: its mean loss is NaN, so are its gradients, and its weight is 0."""

    def test_first(self, backend: Backend, reference: Backend, scale: float, factor: float | None, micro: bool) -> None:
        results = []
        for each in (backend, reference):
            torch.manual_seed(0)
            buffers = Buffers(SIZES, shift=1)
            before = buffers.snapshot()
            grads = [any_bits(n, DTYPES[s % 3]) for s, n in enumerate(SIZES)]
            accumulate(each, buffers, grads, [1] * len(SIZES), scale=scale, factor=factor, micro=micro)
            written = ["acc", "partials"] + ["micro_partials"] * micro
            buffers.assert_only_changed(before, dict.fromkeys(written, ALL))
            for s in ALL:
                for name in written:
                    assert_same_bits(buffers.of(name, s), torch.zeros_like(buffers.of(name, s)), name)
            results.append(buffers)
        assert_same_buffers(*results)

    def test_later(self, backend: Backend, scale: float, factor: float | None, micro: bool) -> None:
        buffers = with_old_values(SIZES, 1)
        buffers.of("acc", 3)[2] = math.nan  # a NaN must not even be quieted
        before = buffers.snapshot()
        grads = [torch.full((n,), [math.nan, math.inf, 1.0][s % 3]) for s, n in enumerate(SIZES)]
        accumulate(backend, buffers, grads, [0] * len(SIZES), scale=scale, factor=factor, micro=micro)
        buffers.assert_only_changed(before, {})

    def test_the_window_goes_on(self, backend: Backend, scale: float, factor: float | None, micro: bool) -> None:
        results = []
        for empty in (True, False):
            buffers = Buffers((CHUNK + 3,))
            torch.manual_seed(0)
            grads = [torch.randn(CHUNK + 3) for _ in range(2)]
            nothing = [torch.full((CHUNK + 3,), math.nan)]
            accumulate(backend, buffers, grads[:1], [1], micro=micro)
            if empty:
                accumulate(backend, buffers, nothing, [0], scale=scale, factor=factor, micro=micro)
            accumulate(backend, buffers, grads[1:], [0], micro=micro)
            results.append(buffers)
        assert_same_buffers(*results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optional", [False, True], ids=["", "with statistics and factor"])
@pytest.mark.usefixtures("native")
def test_opcheck(dtype: torch.dtype, optional: bool) -> None:
    buffers = with_old_values((3, 0, CHUNK + 1))
    grads = [torch.randn(n, dtype=dtype) for n in buffers.sizes]
    sums = (buffers.partials.zero_(), buffers.micro_partials.zero_() if optional else None)
    factor = torch.full((1,), 0.5, dtype=torch.float64) if optional else None
    arguments = (buffers.acc, *sums, buffers.table, grads, [0, 1, 2], [1, 0, 0], SCALE, factor)
    torch.library.opcheck(torch.ops.fusedaccum.accumulate_.default, arguments)
    torch.library.opcheck(
        torch.ops.fusedaccum.measure_.default, (sums[0], buffers.acc, buffers.table, [0, 2], [3, CHUNK + 1])
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0, 1])
def test_a_first_add_beyond_the_caches(native, reference, dtype, shift):
    """From 32 MiB on, rows are written past the caches (csrc/cpu/loops.h); the bits are the same, the rest of the last
    row and what lies behind it included."""
    n = 2**23 + 3 * LANES + 77
    results = []
    for backend in (native, reference):
        generator = torch.Generator().manual_seed(4)
        buffers = Buffers([n, 5], shift=shift)
        buffers.fill("acc", 1, torch.zeros(5))
        grad = placed(torch.randn(n, generator=generator), dtype)
        args = (buffers.acc, buffers.partials, buffers.micro_partials, buffers.table)
        backend.accumulate_(*args, [grad], [0], [1], 0.3, None)
        results.append(buffers.snapshot())
    for name, bits_native in results[0].items():
        assert torch.equal(bits_native, results[1][name]), name


@pytest.mark.parametrize("micro", [False, True], ids=["plain", "micro"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_accumulator_beyond_the_caches(native: Backend, reference: Backend, dtype: torch.dtype, micro: bool) -> None:
    """From 32 MiB on the CPU kernels walk through whole chunks in another order, and stream the first add."""
    sizes = (CHUNK, 2 * CHUNK + 33, 7, 2**23)
    buffers = [Buffers(sizes) for _ in range(2)]
    assert buffers[0].acc.data_ptr() % 64 == 0, "what is not aligned is not streamed"
    for first in (True, False, False):
        grads = [placed(any_bits(sizes[0], dtype), dtype), *grads_of(sizes[1:3], dtype)]
        for backend, its in zip((native, reference), buffers, strict=True):
            accumulate(backend, its, grads, [int(first)] * 3, micro=micro)
    for slot in range(3):
        for name in ("acc", "partials", *(["micro_partials"] if micro else [])):
            assert_same_bits(buffers[0].of(name, slot), buffers[1].of(name, slot), f"{name} of slot {slot}")
    assert bool(torch.isnan(buffers[0].of("acc", 3)).all()), "written beyond the slots"


def test_an_unaligned_slot_beyond_the_caches(native: Backend, reference: Backend) -> None:
    """A table may place a slot anywhere; a streaming store to an address between two lines would end the process."""
    sizes = (7, 2 * CHUNK + 33, 2**23)
    buffers = [Buffers(sizes) for _ in range(2)]
    grads = grads_of(sizes[1:2], torch.bfloat16)
    for backend, its in zip((native, reference), buffers, strict=True):
        its.table[1, 0] += 1  # into the padding behind it
        accumulate(backend, its, grads, [1], [1])
    assert_same_bits(buffers[0].acc, buffers[1].acc, "acc")
    assert_same_bits(buffers[0].partials, buffers[1].partials, "partials")
