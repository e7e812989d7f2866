"""accumulate_ and measure_: the accumulator to the bit, its partials to a derived bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import DTYPES, SIZES, U32, Buffers, assert_same_bits, assert_same_buffers, fp64, placed
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


def accumulate(
    backend: Backend, buffers: Buffers, grads: list[Tensor], first: list[int], slots: list[int] | None = None
) -> None:
    slots = list(range(len(grads))) if slots is None else slots
    backend.accumulate_(buffers.acc, buffers.partials, buffers.table, grads, slots, first, SCALE)


def expected_acc(old: np.ndarray | None, grad: Tensor) -> np.ndarray:
    """Two operations, each rounded once, from fp64.

    The fp64 product of two fp32 values is exact. The fp64 sum is not always, but fp64 has more than twice fp32's bits
    plus two, so that rounding it again to fp32 gives what one rounding would (Figueroa 1995).
    """
    product = (fp64(grad) * float(np.float32(SCALE))).astype(np.float32)
    if old is None:
        return product
    return (old.astype(np.float64) + product.astype(np.float64)).astype(np.float32)


def assert_partials(partials: Tensor, acc: Tensor) -> None:
    """In fp32, a square is rounded once and then passes less than CHUNK / LANES sums of positive terms.

    One unit more covers the products of these errors and the fp64 tree.
    """
    values = fp64(acc)
    exact = np.array([np.sum(values[at : at + CHUNK] ** 2) for at in range(0, values.size, CHUNK)])
    bound = exact * (CHUNK / LANES + 1) * U32
    assert partials.numel() == exact.size
    assert (np.abs(partials.numpy() - exact) <= bound).all(), (partials, exact)


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
            assert_partials(buffers.of("partials", s), buffers.of("acc", s))

    def test_later_add(self, backend: Backend, dtype: torch.dtype, grad_shift: int, acc_shift: int) -> None:
        buffers = with_old_values(SIZES, acc_shift)
        grads = grads_of(SIZES, dtype, grad_shift)
        old = [buffers.of("acc", s).numpy().copy() for s in ALL]
        before = buffers.snapshot()
        accumulate(backend, buffers, grads, [0] * len(SIZES))
        buffers.assert_only_changed(before, {"acc": ALL, "partials": ALL})
        for s in ALL:
            assert_same_bits(buffers.of("acc", s), torch.from_numpy(expected_acc(old[s], grads[s])), f"acc of slot {s}")
            assert_partials(buffers.of("partials", s), buffers.of("acc", s))


def awkward(n: int, dtype: torch.dtype) -> Tensor:
    """Values over the whole range of ``dtype``: any bits, so subnormals, infinities and NaNs too."""
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    info = torch.iinfo(integer)
    return torch.randint(info.min, info.max + 1, (n,), dtype=torch.int64).to(integer).view(dtype)


@pytest.mark.parametrize("values", ["normal", "awkward"])
def test_agrees_with_the_reference_to_the_bit(backend: Backend, reference: Backend, values: str) -> None:
    sizes = SIZES * 3
    make = awkward if values == "awkward" else lambda n, dtype: torch.randn(n).to(dtype)
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
        each.accumulate_(buffers.acc, buffers.partials, buffers.table, [torch.full((n,), 1e20)], [0], [1], 1.0)
        results.append(buffers)
    partials, acc = results[0].of("partials", 0), fp64(results[0].of("acc", 0))
    exact = np.array([np.sum(acc[at : at + CHUNK] ** 2) for at in range(0, n, CHUNK)])
    # All in fp64: a lane's squares, its sums and the tree's ten levels, each rounded.
    np.testing.assert_allclose(partials.numpy(), exact, rtol=(CHUNK / LANES + 11) * 2.0**-53)
    assert_same_buffers(*results)


def test_the_largest_values_fit_a_partial(backend: Backend) -> None:
    largest = torch.finfo(torch.float32).max
    buffers = Buffers([CHUNK])
    backend.accumulate_(buffers.acc, buffers.partials, buffers.table, [torch.full((CHUNK,), largest)], [0], [1], 1.0)
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
    assert_partials(buffers.of("partials", slots[0]), buffers.of("acc", slots[0]))


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
        backend.accumulate_(buffers.acc, buffers.partials, buffers.table, [grad], [0], [int(i == 0)], 1.0)
    assert buffers.of("acc", 0).tolist() == [1024.0] * 3
    assert buffers.partials.item() == 3 * 1024.0**2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("native")
def test_opcheck(dtype: torch.dtype) -> None:
    buffers = with_old_values((3, 0, CHUNK + 1))
    grads = [torch.randn(n, dtype=dtype) for n in buffers.sizes]
    arguments = (buffers.acc, buffers.partials.zero_(), buffers.table, grads, [0, 1, 2], [1, 0, 0], SCALE)
    torch.library.opcheck(torch.ops.fusedaccum.accumulate_.default, arguments)
    torch.library.opcheck(
        torch.ops.fusedaccum.measure_.default, (*arguments[1::-1], buffers.table, [0, 2], [3, CHUNK + 1])
    )
