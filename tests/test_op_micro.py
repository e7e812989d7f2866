"""accumulate_ with statistics: the micro-batches' own sums of squares, beside the same accumulator and partials."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from helpers import (
    DTYPES,
    SIZES,
    Buffers,
    accumulate,
    any_bits,
    assert_same_bits,
    assert_same_buffers,
    assert_sums_of_squares,
    placed,
)
from torch import Tensor

from fusedaccum.backends import Backend
from fusedaccum.layout import CHUNK, LANES

pytestmark = pytest.mark.usefixtures("one_thread")
SCALE = 0.3
ALL = range(len(SIZES))
add = partial(accumulate, scale=SCALE, micro=True)


def scaled(grad: Tensor, scale: float = SCALE) -> Tensor:
    """What is added, each product rounded once."""
    return grad.float() * torch.tensor(scale, dtype=torch.float32)


def begun(sizes: tuple[int, ...], shift: int = 0) -> Buffers:
    """Buffers in the midst of a window."""
    buffers = Buffers(sizes, shift=shift)
    for s, n in enumerate(sizes):
        buffers.fill("acc", s, torch.randn(n))
    buffers.micro_partials.copy_(torch.rand(buffers.micro_partials.numel(), dtype=torch.float64) * 100)
    return buffers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("grad_shift", "acc_shift"), [(0, 0), (1, 0), (0, 1), (3, 2)])
class TestEverySize:
    def test_a_first_add_gives_the_partial(
        self, backend: Backend, dtype: torch.dtype, grad_shift: int, acc_shift: int
    ) -> None:
        buffers, plain = Buffers(SIZES, shift=acc_shift), Buffers(SIZES, shift=acc_shift)
        grads = [placed(torch.randn(n), dtype, grad_shift) for n in SIZES]
        before = buffers.snapshot()
        add(backend, buffers, grads, [1] * len(SIZES))
        buffers.assert_only_changed(before, dict.fromkeys(("acc", "partials", "micro_partials"), ALL))
        assert_same_bits(buffers.micro_partials, buffers.partials)
        add(backend, plain, grads, [1] * len(SIZES), micro=False)
        for name in ("acc", "partials"):
            assert_same_bits(buffers.whole[name], plain.whole[name], name)

    def test_a_later_add_grows_it(self, backend: Backend, dtype: torch.dtype, grad_shift: int, acc_shift: int) -> None:
        buffers, plain = begun(SIZES, acc_shift), Buffers(SIZES, shift=acc_shift)
        plain.whole["acc"].copy_(buffers.whole["acc"])
        grads = [placed(torch.randn(n), dtype, grad_shift) for n in SIZES]
        old = [buffers.of("micro_partials", s).clone() for s in ALL]
        before = buffers.snapshot()
        add(backend, buffers, grads, [0] * len(SIZES))
        buffers.assert_only_changed(before, dict.fromkeys(("acc", "partials", "micro_partials"), ALL))
        for s in ALL:
            assert_sums_of_squares(buffers.of("micro_partials", s), scaled(grads[s]), old[s])
        add(backend, plain, grads, [0] * len(SIZES), micro=False)
        for name in ("acc", "partials"):
            assert_same_bits(buffers.whole[name], plain.whole[name], name)


@pytest.mark.parametrize("values", ["normal", "any bits"])
@pytest.mark.parametrize("factor", [None, 0.7])
def test_agrees_with_the_reference_to_the_bit(
    backend: Backend, reference: Backend, values: str, factor: float | None
) -> None:
    sizes = SIZES * 3
    make = any_bits if values == "any bits" else lambda n, dtype: torch.randn(n).to(dtype)
    results = []
    for each in (backend, reference):
        torch.manual_seed(1)
        buffers = Buffers(sizes)
        for micro_batch in range(3):
            grads = [make(n, DTYPES[(s + micro_batch) % 3]) for s, n in enumerate(sizes)]
            # Parameters come into a window with any micro-batch.
            first = [int(micro_batch == s % 2) for s in range(len(sizes))]
            slots = [s for s in range(len(sizes)) if micro_batch or first[s]]
            add(each, buffers, [grads[s] for s in slots], [first[s] for s in slots], slots, factor=factor)
        results.append(buffers)
    assert_same_buffers(*results)


def test_a_window_sums_its_micro_batches(backend: Backend) -> None:
    # Opposite gradients: the accumulator is zero, what the micro-batches brought is not.
    buffers = Buffers((CHUNK + 5,))
    grad = torch.randn(CHUNK + 5)
    for sign, first in ((1, 1), (-1, 0), (1, 0), (-1, 0)):
        add(backend, buffers, [sign * grad], [first])
    assert buffers.partials.tolist() == [0.0, 0.0]
    single = Buffers((CHUNK + 5,))
    add(backend, single, [grad], [1])
    assert_same_bits(buffers.micro_partials, 4.0 * single.partials)  # sums of a few fp32 squares: exact in fp64


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_does_not_depend_on_where_its_slot_lies(backend: Backend, dtype: torch.dtype) -> None:
    n = CHUNK + LANES + 19
    grad = torch.randn(n)
    buffers = Buffers([n, 5, n], shift=1)
    for s, each in enumerate((grad, torch.ones(5), grad)):
        buffers.fill("acc", s, torch.ones(each.numel()))
        buffers.of("micro_partials", s).fill_(0.25)
    add(backend, buffers, [placed(grad, dtype, 0), torch.ones(5), placed(grad, dtype, 1)], [0, 0, 0])
    assert_same_bits(buffers.of("micro_partials", 2), buffers.of("micro_partials", 0))


@pytest.mark.parametrize("n", [1, 17, LANES + 1, CHUNK, CHUNK + 3])
def test_squares_beyond_fp32(backend: Backend, reference: Backend, n: int) -> None:
    # A first add gives the partial, which is looked at again; a later one does not, and says so by infinity. Nothing
    # that decides on a step depends on it.
    results = []
    for each in (backend, reference):
        buffers = Buffers((n, n))
        buffers.fill("acc", 1, torch.zeros(n))
        buffers.of("micro_partials", 1).fill_(1.0)
        add(each, buffers, [torch.full((n,), 1e20)] * 2, [1, 0], scale=1.0)
        results.append(buffers)
    assert_same_buffers(*results)
    buffers = results[0]
    assert buffers.partials.isfinite().all()
    assert_same_bits(buffers.of("micro_partials", 0), buffers.of("partials", 0))
    assert (buffers.of("micro_partials", 1) == math.inf).all()


def test_slots_not_named_are_untouched(backend: Backend) -> None:
    buffers = begun(SIZES)
    before = buffers.snapshot()
    slots = [len(SIZES) - 1, 2, 0]
    add(backend, buffers, [torch.randn(SIZES[s]) for s in slots], [0, 1, 1], slots)
    buffers.assert_only_changed(before, dict.fromkeys(("acc", "partials", "micro_partials"), slots))


def test_nothing_to_accumulate(backend: Backend) -> None:
    for sizes in ((), (0,), SIZES):
        buffers = Buffers(sizes)
        before = buffers.snapshot()
        add(backend, buffers, [], [])
        add(backend, buffers, [torch.zeros(0)] * sizes.count(0), [1] * sizes.count(0), list(range(sizes.count(0))))
        buffers.assert_only_changed(before, {})
