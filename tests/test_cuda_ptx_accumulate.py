"""accumulate_kernel, compiled by nvcc and executed on the CPU, against the native backend to the bit."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from cuda_cases import (
    BEFORE_CHUNKS,
    FAR_ELEMS,
    FEW_SIZES,
    SIZES,
    Grad,
    any_bits,
    check_accumulate,
    check_measure,
    check_overflow,
    every_grad,
    tiny_grads,
    wide,
)
from cuda_harness import ARCHS, FLAGS, PtxBackend

from fusedaccum.backends import Backend
from fusedaccum.layout import CHUNK

pytestmark = pytest.mark.usefixtures("one_thread")
each_arch = pytest.mark.parametrize("arch", ARCHS)


def kernels(ptx: PtxBackend) -> list[tuple[str, int]]:
    return [(launched.kernel, launched.n_blocks) for launched in ptx.launches]


def test_the_flags_are_those_of_the_build(build_script: ModuleType) -> None:
    # Neither macros for the host's headers, nor the host compiler's flags, nor the architectures concern the PTX.
    flags = build_script.kernel_flags("9.0")
    assert [flag for flag in flags if not flag.startswith(("-D", "-Xcompiler", "-gencode"))] == list(FLAGS)


@each_arch
@pytest.mark.parametrize("parity", [0, 1])
class TestBits:
    def test_every_size_and_dtype(self, native: Backend, ptx_plan: ModuleType, arch: int, parity: int) -> None:
        ptx = PtxBackend(ptx_plan, arch)
        check_accumulate(native, ptx, every_grad(SIZES, parity=parity))
        assert [kernel for kernel, _ in kernels(ptx)] == ["accumulate_kernel<120, false>"]

    def test_in_the_large_parameter_block(self, native: Backend, ptx_plan: ModuleType, arch: int, parity: int) -> None:
        ptx = PtxBackend(ptx_plan, arch, backwards=True)
        check_accumulate(native, ptx, every_grad(SIZES, parity=parity) + tiny_grads(120))
        assert [kernel for kernel, _ in kernels(ptx)] == ["accumulate_kernel<2040, false>"]

    # A shift of 1 is 2 bytes or 4, of 2 is 4 or 8; 8 is 16 bytes or 32, aligned though not as tensors are.
    def test_unaligned_gradients(self, native: Backend, ptx_plan: ModuleType, arch: int, parity: int) -> None:
        check_accumulate(native, PtxBackend(ptx_plan, arch), every_grad(FEW_SIZES, (1, 2, 3, 8), parity))

    def test_unaligned_accumulator(self, native: Backend, ptx_plan: ModuleType, arch: int, parity: int) -> None:
        for shift in (1, 2):
            check_accumulate(native, PtxBackend(ptx_plan, arch), every_grad(FEW_SIZES, (0, 1), parity), acc_shift=shift)

    def test_order_of_sums(self, native: Backend, ptx_plan: ModuleType, arch: int, parity: int) -> None:
        check_accumulate(native, PtxBackend(ptx_plan, arch), every_grad(FEW_SIZES, parity=parity), make=wide)

    def test_any_bits(self, native: Backend, ptx_plan: ModuleType, arch: int, parity: int) -> None:
        grads = every_grad((8, 1025, CHUNK + 9), parity=parity)
        check_accumulate(native, PtxBackend(ptx_plan, arch), grads, make=any_bits)


@each_arch
@pytest.mark.parametrize("parity", [0, 1])
class TestStatistics:
    """The kernel that sums the squares of what is added too."""

    def test_every_size_and_dtype(self, native: Backend, ptx_plan: ModuleType, arch: int, parity: int) -> None:
        ptx = PtxBackend(ptx_plan, arch)
        check_accumulate(native, ptx, every_grad(SIZES, parity=parity), micro=True)
        assert [kernel for kernel, _ in kernels(ptx)] == ["accumulate_kernel<120, true>"]

    def test_in_the_large_parameter_block(self, native: Backend, ptx_plan: ModuleType, arch: int, parity: int) -> None:
        ptx = PtxBackend(ptx_plan, arch, backwards=True)
        grads = every_grad(FEW_SIZES, (0, 1), parity) + tiny_grads(120)
        check_accumulate(native, ptx, grads, micro=True, factor=0.7)
        assert [kernel for kernel, _ in kernels(ptx)] == ["accumulate_kernel<2040, true>"]

    @pytest.mark.parametrize("shift", [1, 2])
    def test_unaligned(self, native: Backend, ptx_plan: ModuleType, arch: int, parity: int, shift: int) -> None:
        grads = every_grad(FEW_SIZES, (0, 1, 2, 8), parity)
        check_accumulate(native, PtxBackend(ptx_plan, arch), grads, acc_shift=shift - 1, micro=True)

    def test_order_of_sums(self, native: Backend, ptx_plan: ModuleType, arch: int, parity: int) -> None:
        grads = every_grad(FEW_SIZES, parity=parity)
        check_accumulate(native, PtxBackend(ptx_plan, arch), grads, make=wide, micro=True)

    def test_any_bits(self, native: Backend, ptx_plan: ModuleType, arch: int, parity: int) -> None:
        grads = every_grad((8, 1025, CHUNK + 9), parity=parity)
        check_accumulate(native, PtxBackend(ptx_plan, arch), grads, make=any_bits, micro=True)

    def test_far_away(self, native: Backend, ptx_plan: ModuleType, arch: int, parity: int) -> None:
        for options in ({"far_elems": FAR_ELEMS}, {"before_chunks": BEFORE_CHUNKS}):
            ptx = PtxBackend(ptx_plan, arch, **options)
            check_accumulate(native, ptx, every_grad((9, CHUNK + 9), parity=parity), micro=True)


@each_arch
@pytest.mark.parametrize("micro", [False, True])
class TestFactor:
    # 1e-60 is zero in fp32; a NaN is not.
    @pytest.mark.parametrize("factor", [0.37, 1.0, -0.0, 0.0, 1e-60, float("inf"), float("nan")])
    @pytest.mark.parametrize("parity", [0, 1])
    def test_every_factor(
        self, native: Backend, ptx_plan: ModuleType, arch: int, micro: bool, factor: float, parity: int
    ) -> None:
        # Without a factor's effect no gradient is in the device's memory, nor what a later add would change.
        grads = every_grad((7, 1025, CHUNK + 9), parity=parity)
        check_accumulate(native, PtxBackend(ptx_plan, arch), grads, micro=micro, factor=factor)

    def test_zero_keeps_what_is_not_finite_out(
        self, native: Backend, ptx_plan: ModuleType, arch: int, micro: bool
    ) -> None:
        grads = every_grad((8, 2057), (0, 1))
        result = check_accumulate(
            native, PtxBackend(ptx_plan, arch), grads, make=any_bits, micro=micro, factor=0.0, acc_shift=1
        )
        firsts = [slot + 1 for slot, grad in enumerate(grads) if grad.first]
        assert firsts
        for slot in firsts:
            assert (result.of("acc", slot) == 0.0).all()
            assert (result.of("partials", slot) == 0.0).all()
            assert (result.of("micro_partials", slot) == 0.0).all() or not micro


@each_arch
class TestManyTensors:
    @pytest.mark.parametrize("n", [1, 2, 100, 120, 121, 1000])
    def test_in_one_launch(self, native: Backend, ptx_plan: ModuleType, arch: int, n: int) -> None:
        ptx = PtxBackend(ptx_plan, arch)
        check_accumulate(native, ptx, tiny_grads(n))
        assert kernels(ptx) == [(f"accumulate_kernel<{120 if n <= 120 else 2040}, false>", n)]

    def test_over_the_limit_of_a_launch(self, native: Backend, ptx_plan: ModuleType, arch: int) -> None:
        ptx = PtxBackend(ptx_plan, arch)
        # The tensors come in the opposite order of the slots: the one of three chunks is the 2002nd.
        check_accumulate(native, ptx, [*tiny_grads(100), Grad(2 * CHUNK + 1, torch.bfloat16), *tiny_grads(2001)])
        assert kernels(ptx) == [("accumulate_kernel<2040, false>", 2040 + 2), ("accumulate_kernel<120, false>", 62)]

    def test_only_empty_ones(self, native: Backend, ptx_plan: ModuleType, arch: int) -> None:
        ptx = PtxBackend(ptx_plan, arch)
        check_accumulate(native, ptx, [Grad(0, torch.bfloat16)] * 3)
        assert kernels(ptx) == []


@each_arch
class TestSixtyFourBits:
    def test_offsets(self, native: Backend, ptx_plan: ModuleType, arch: int) -> None:
        check_accumulate(native, PtxBackend(ptx_plan, arch, far_elems=FAR_ELEMS), every_grad(FEW_SIZES))
        check_measure(native, PtxBackend(ptx_plan, arch, far_elems=FAR_ELEMS), FEW_SIZES)

    def test_tensors_of_more_than_2_to_the_31_elements(self, native: Backend, ptx_plan: ModuleType, arch: int) -> None:
        ptx = PtxBackend(ptx_plan, arch, before_chunks=BEFORE_CHUNKS)
        check_accumulate(native, ptx, every_grad(FEW_SIZES))
        assert ptx.launches[0].n_blocks > len(FEW_SIZES) * 2 * BEFORE_CHUNKS
        check_measure(native, PtxBackend(ptx_plan, arch, before_chunks=BEFORE_CHUNKS), FEW_SIZES)


@each_arch
class TestPartials:
    @pytest.mark.parametrize("op", ["accumulate_", "measure_"])
    def test_overflow_inf_and_nan(self, native: Backend, ptx_plan: ModuleType, arch: int, op: str) -> None:
        check_overflow(native, PtxBackend(ptx_plan, arch), op=op, sizes=(2049, CHUNK, CHUNK + 1025))

    def test_overflow_with_statistics(self, native: Backend, ptx_plan: ModuleType, arch: int) -> None:
        result = check_overflow(
            native, PtxBackend(ptx_plan, arch), op="accumulate_", sizes=(2049, CHUNK, CHUNK + 1025), micro=True
        )
        # A first add gives the partial itself, a later one is not looked at twice.
        first, later = result.of("micro_partials", 1)[-1], result.of("micro_partials", 0)[-1]
        assert (first.item(), later.item()) == (result.of("partials", 1)[-1].item(), math.inf)

    def test_measured(self, native: Backend, ptx_plan: ModuleType, arch: int) -> None:
        check_measure(native, PtxBackend(ptx_plan, arch), SIZES)
        check_measure(native, PtxBackend(ptx_plan, arch), FEW_SIZES * 25)
        check_measure(native, PtxBackend(ptx_plan, arch), FEW_SIZES, make=any_bits)


@each_arch
@pytest.mark.parametrize(
    ("dtype", "first", "bytes_an_elem"),
    [
        (torch.float32, False, 12),
        (torch.bfloat16, False, 10),
        (torch.float16, False, 10),
        (torch.float32, True, 8),
        (torch.bfloat16, True, 6),
        (torch.float16, True, 6),
    ],
)
@pytest.mark.parametrize("micro", [False, True])
def test_bytes(
    native: Backend, ptx_plan: ModuleType, arch: int, dtype: torch.dtype, first: bool, bytes_an_elem: int, micro: bool
) -> None:
    """In figures, for the largest part of a launch. ``PtxBackend`` asserts the like for every launch of this file."""
    ptx, n = PtxBackend(ptx_plan, arch), 3 * CHUNK
    check_accumulate(native, ptx, [Grad(n, dtype, first)], micro=micro)
    stats = ptx.launches[0].stats
    # Of each of the three blocks: 128 threads read 16 bytes of the table, one reads 8 more and writes a partial. With
    # statistics it writes another one, which a later add has read.
    statistics = (8 if first else 16) * micro
    assert stats.global_read + stats.global_written - 3 * (128 * 16 + 8 + 8 + statistics) == n * bytes_an_elem
