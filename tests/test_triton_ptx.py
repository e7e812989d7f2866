"""The Triton kernels, compiled ahead of time and executed on the CPU, against the native backend to the bit.

The cases are those of the CUDA kernels. ``TritonPtxBackend`` asserts of every launch what was written, and that the
bytes moved are the least possible, in the widest accesses possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from cuda_cases import (
    BEFORE_CHUNKS,
    FAR_ELEMS,
    FEW_SIZES,
    GROUPS,
    KINDS,
    SIZES,
    Boundary,
    Grad,
    Param,
    any_bits,
    check_accumulate,
    check_finalize,
    check_measure,
    check_overflow,
    check_step,
    check_windows,
    every_grad,
    every_param,
    tiny_grads,
    tiny_params,
    wide,
)
from torch import Tensor
from triton_cases import check_roundings, check_widenings

from fusedaccum import layout
from fusedaccum.backends import Backend
from fusedaccum.layout import CHUNK, LANES, RULE_ADAM, RULE_NONE, RULE_SGD

ARCHS = (80, 90, 100)
pytestmark = pytest.mark.usefixtures("one_thread")
each_arch = pytest.mark.parametrize("arch", ARCHS)
each_rule = pytest.mark.parametrize("rule", [RULE_ADAM, RULE_SGD], ids=["adam", "sgd"])
# Many chunks, empty slots, more chunks than lanes, more slots than are written at a time.
BOUNDARY_SIZES = (5, 0, 3 * CHUNK + 1, CHUNK, 1, 700, 0, 9 * CHUNK)
SHAPES = {
    "no slots": (),
    "an empty slot": (0,),
    "one element": (1,),
    "several slots": BOUNDARY_SIZES,
    "1024 chunks": (1024 * CHUNK,),
    "1025 chunks": (1024 * CHUNK + 1, 0),
    "more chunks than lanes": (700 * CHUNK, 0, 5, 2400 * CHUNK + 9, 1000),
    "more slots than lanes": (3, 0, 2 * CHUNK) * 400,
    "slots beside chunks": (1,) * 1000 + (CHUNK * 1100,) + (7,) * 1100,
}


def any_bits_but_one_nan(n: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A GPU's fp32 arithmetic knows but one NaN. The interpreter keeps an operand's, and then threads that compute the
    same sum, each for itself, from operands in another order would seem to disagree.
    """
    values = any_bits(n, dtype, generator)
    return torch.where(values.isnan(), math.nan, values)


@pytest.fixture
def ptx_of(triton_installed: str) -> Callable[..., object]:
    """``TritonPtxBackend``: harnesses import Triton, which not every installation has."""
    from triton_harness import TritonPtxBackend

    return TritonPtxBackend


@each_arch
class TestAccumulate:
    @pytest.mark.parametrize("micro", [False, True])
    def test_every_size_and_dtype(self, native: Backend, ptx_of, arch: int, micro: bool) -> None:
        ptx = ptx_of(arch, backwards=micro)
        check_accumulate(native, ptx, every_grad(SIZES, parity=int(micro)), micro=micro)
        assert len(ptx.launches) == 1

    # A shift of 1 is 2 bytes or 4, of 2 is 4 or 8; 8 is 16 bytes or 32, aligned though not as tensors are.
    @pytest.mark.parametrize("acc_shift", [0, 1, 2])
    def test_unaligned(self, native: Backend, ptx_of, arch: int, acc_shift: int) -> None:
        grads = every_grad((7, 0, 1025, 2057), (0, 1, 2, 8), acc_shift % 2)
        check_accumulate(native, ptx_of(arch), grads, acc_shift=acc_shift, micro=acc_shift == 1)

    def test_order_of_sums(self, native: Backend, ptx_of, arch: int) -> None:
        check_accumulate(native, ptx_of(arch), every_grad(FEW_SIZES), make=wide, micro=True)

    def test_any_bits(self, native: Backend, ptx_of, arch: int) -> None:
        for parity in (0, 1):
            check_accumulate(native, ptx_of(arch), every_grad((8, 2057), parity=parity), make=any_bits, micro=True)

    # 1e-60 is zero in fp32; a NaN is not.
    @pytest.mark.parametrize("factor", [0.37, -0.0, 0.0, 1e-60, math.inf, math.nan])
    @pytest.mark.parametrize("micro", [False, True])
    def test_every_factor(self, native: Backend, ptx_of, arch: int, factor: float, micro: bool) -> None:
        # Without a factor's effect no gradient is in the device's memory, nor what a later add would change.
        grads = every_grad((7, 2057), (0, 1), int(micro))
        check_accumulate(native, ptx_of(arch), grads, micro=micro, factor=factor, make=any_bits)

    def test_many_tensors_in_one_launch(self, native: Backend, ptx_of, arch: int) -> None:
        ptx, n = ptx_of(arch), {80: 1, 90: 1000, 100: 130}[arch]
        check_accumulate(native, ptx, tiny_grads(n))
        assert [launched.n_blocks for launched in ptx.launches] == [n]

    def test_only_empty_ones(self, native: Backend, ptx_of, arch: int) -> None:
        ptx = ptx_of(arch)
        check_accumulate(native, ptx, [Grad(0, torch.bfloat16)] * 3)
        assert ptx.launches == []

    def test_64_bits(self, native: Backend, ptx_of, arch: int) -> None:
        """Offsets beyond 2^33 elements, and tensors of more than 2^31."""
        for options in ({"far_elems": FAR_ELEMS}, {"before_chunks": BEFORE_CHUNKS}):
            check_accumulate(native, ptx_of(arch, **options), every_grad((9, CHUNK + 9)), micro=True)
            check_measure(native, ptx_of(arch, **options), FEW_SIZES)

    @pytest.mark.parametrize("op", ["accumulate_", "measure_"])
    def test_overflow_inf_and_nan(self, native: Backend, ptx_of, arch: int, op: str) -> None:
        check_overflow(native, ptx_of(arch), op=op, sizes=(2049, CHUNK + 1025), micro=op == "accumulate_")

    def test_measured(self, native: Backend, ptx_of, arch: int) -> None:
        check_measure(native, ptx_of(arch), SIZES)
        check_measure(native, ptx_of(arch), FEW_SIZES, make=any_bits_but_one_nan)

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
    def test_bytes(
        self, native: Backend, ptx_of, arch: int, dtype: torch.dtype, first: bool, bytes_an_elem: int
    ) -> None:
        """In figures, for the largest part of a launch."""
        ptx, n = ptx_of(arch), 3 * CHUNK
        check_accumulate(native, ptx, [Grad(n, dtype, first)])
        stats = ptx.launches[0].stats
        # Of each of the three programs: 128 threads read two numbers of the entry and three of the slot (and, of the
        # one entry, none to find it), one writes a partial.
        assert stats.global_read + stats.global_written - 3 * (128 * 5 * 8 + 8) == n * bytes_an_elem
        widths = stats.widths()
        assert widths["r", 16] + widths["w", 16] == n * bytes_an_elem


@each_rule
@each_arch
class TestStep:
    def test_every_kind_and_group(self, native: Backend, ptx_of, arch: int, rule: int) -> None:
        ptx = ptx_of(arch, backwards=True)
        params = every_param(rule, (0, 7, 9, 1023, 1025, 3081)) + [Param(CHUNK + 1033, *kind, 2) for kind in KINDS]
        check_step(native, ptx, rule, params)
        assert len(ptx.launches) == 1

    def test_every_size(self, native: Backend, ptx_of, arch: int, rule: int) -> None:
        kinds = [KINDS[1], KINDS[4]] if arch == 90 else [KINDS[0], KINDS[2]] if arch == 80 else [KINDS[3]]
        n_groups = len(GROUPS[rule])
        params = [Param(n, *kind, group=i % n_groups) for kind in kinds for i, n in enumerate(SIZES)]
        check_step(native, ptx_of(arch), rule, params)

    def test_unaligned_parameters(self, native: Backend, ptx_of, arch: int, rule: int) -> None:
        check_step(native, ptx_of(arch), rule, every_param(rule, (0, 9, 2057), (1, 2, 8)))

    @pytest.mark.parametrize("shift", [1, 2])
    def test_unaligned_buffers(self, native: Backend, ptx_of, arch: int, rule: int, shift: int) -> None:
        check_step(native, ptx_of(arch), rule, every_param(rule, (9, 2057), (0, 1)), shift=shift)

    @pytest.mark.parametrize("name", ["acc", "master", "extra", "exp_avg", "exp_avg_sq"])
    def test_one_unaligned_buffer(self, native: Backend, ptx_of, arch: int, rule: int, name: str) -> None:
        check_step(native, ptx_of(arch), rule, every_param(rule, (1033,)), unaligned=name)

    def test_any_bits(self, native: Backend, ptx_of, arch: int, rule: int) -> None:
        check_step(native, ptx_of(arch), rule, every_param(rule, (8, 2057)), make=any_bits)

    def test_a_skipped_window_leaves_every_bit(self, native: Backend, ptx_of, arch: int, rule: int) -> None:
        # But for the entry that says so, nothing is in the device's memory, and all of it is read-only.
        check_step(native, ptx_of(arch), rule, every_param(rule, (9, 1033)), skipped=1.0)

    def test_many_tensors(self, native: Backend, ptx_of, arch: int, rule: int) -> None:
        ptx = ptx_of(arch)
        check_step(native, ptx, rule, tiny_params(rule, 1000))
        assert [launched.n_blocks for launched in ptx.launches] == [1000]

    def test_64_bits(self, native: Backend, ptx_of, arch: int, rule: int) -> None:
        for options in ({"far_elems": FAR_ELEMS}, {"before_chunks": BEFORE_CHUNKS}):
            check_step(native, ptx_of(arch, **options), rule, every_param(rule, (9, 1033)))


@each_arch
@pytest.mark.parametrize(
    ("rule", "group", "kind", "bytes_an_elem"),
    [
        # Read: gradient, two moments, parameter or master. Written: two moments, parameter, master.
        (RULE_ADAM, 0, KINDS[0], 28),
        (RULE_ADAM, 0, KINDS[1], 30),
        (RULE_ADAM, 0, KINDS[2], 30),
        (RULE_ADAM, 0, KINDS[3], 24),
        (RULE_ADAM, 2, KINDS[1], 30 + 8),
        # Read: gradient, parameter or master, and a momentum buffer where there is momentum.
        (RULE_SGD, 0, KINDS[0], 12),
        (RULE_SGD, 0, KINDS[1], 14),
        (RULE_SGD, 0, KINDS[3], 8),
        (RULE_SGD, 2, KINDS[1], 14 + 8),
    ],
)
def test_bytes_of_a_step(
    native: Backend,
    ptx_of: Callable[..., object],
    arch: int,
    rule: int,
    group: int,
    kind: tuple[torch.dtype, bool],
    bytes_an_elem: int,
) -> None:
    """In figures, for the largest part of a launch."""
    ptx, n = ptx_of(arch), 2 * CHUNK
    check_step(native, ptx, rule, [Param(n, *kind, group)])
    stats = ptx.launches[0].stats
    # Of each of the two programs: 128 threads read whether to skip, the entry, four numbers of the slot, its scalars.
    lookup = 2 * 128 * (8 + 2 * 8 + 4 * 8 + 4 * (11 if rule == RULE_ADAM else 7))
    assert stats.global_read + stats.global_written - lookup == n * bytes_an_elem
    widths = stats.widths()
    assert widths["r", 16] + widths["w", 16] == n * bytes_an_elem


@each_rule
@each_arch
class TestFinalize:
    @pytest.mark.parametrize("micro", [False, True])
    def test_every_shape(self, native: Backend, ptx_of, arch: int, rule: int, micro: bool) -> None:
        for shape in SHAPES.values():
            check_finalize(native, ptx_of(arch), partial(Boundary, shape, rule), micro=micro)

    def test_clip(self, native: Backend, ptx_of, arch: int, rule: int) -> None:
        for max_norm in (0.0, 1e-3, 1.0, 1e30, math.inf):
            for numerator in (1.0, 1 / 3):
                boundary = partial(Boundary, BOUNDARY_SIZES, rule)
                check_finalize(native, ptx_of(arch), boundary, max_norm=max_norm, numerator=numerator)

    def test_inactive_slots_are_not_even_read(self, native: Backend, ptx_of, arch: int, rule: int) -> None:
        # Neither partials nor steps of others are in the device's memory.
        for active in ([], [2], [0, 1, 4, 7], [3, 6]):
            check_finalize(native, ptx_of(arch), partial(Boundary, BOUNDARY_SIZES, rule, active))

    def test_sums_from_elsewhere(self, native: Backend, ptx_of, arch: int, rule: int) -> None:
        for extra in (0.0, 2.5, math.inf, math.nan):
            for sizes in ((), BOUNDARY_SIZES):
                boundary = partial(Boundary, sizes, rule)
                result = check_finalize(native, ptx_of(arch), boundary, extra=[extra, 3.5], max_norm=1.0)
                assert result.control[layout.FOUND_INF] == float(not math.isfinite(extra))

    def test_weights(self, native: Backend, ptx_of, arch: int, rule: int) -> None:
        for weight in (-1.5, 0.0, 1e-300, 1e200, math.nan, math.inf):
            boundary = partial(Boundary, BOUNDARY_SIZES, rule)
            result = check_finalize(native, ptx_of(arch), boundary, weight=weight, max_norm=1.0)
            assert result.control[layout.SKIPPED] == float(not weight >= 0)

    @pytest.mark.parametrize("value", [math.inf, math.nan])
    def test_found_inf_ages_no_slot(self, native: Backend, ptx_of, arch: int, rule: int, value: float) -> None:
        # Neither steps nor scalars may be written, and the steps are not in the device's memory.
        def spoilt() -> Boundary:
            boundary = Boundary(BOUNDARY_SIZES, rule)
            boundary.partials[boundary.table[2, 2]] = value
            return boundary

        result = check_finalize(native, ptx_of(arch), spoilt, max_norm=1.0)
        assert result.control[layout.FOUND_INF] == 1.0
        assert result.scalars.isnan().all()

    def test_without_advancing_or_a_rule(self, native: Backend, ptx_of, arch: int, rule: int) -> None:
        for options in ({"advance": False}, {"rule": RULE_NONE}):
            result = check_finalize(native, ptx_of(arch), partial(Boundary, BOUNDARY_SIZES, rule), **options)
            assert result.scalars.isnan().all()

    def test_bias_corrections(self, native: Backend, ptx_of, arch: int, rule: int) -> None:
        for count in (0.0, 1.0, 999.0, 2.0**20, 2.0**24 - 1):
            check_finalize(native, ptx_of(arch), partial(Boundary, (1,) * (LANES + 12), rule, None, count))


@pytest.mark.parametrize(("rule", "arch"), [(RULE_ADAM, 90), (RULE_SGD, 100)], ids=["adam", "sgd"])
def test_windows_through_all_kernels(native: Backend, ptx_of: Callable[..., object], arch: int, rule: int) -> None:
    check_windows(native, ptx_of(arch), rule)


@each_arch
def test_every_value_of_16_bits(native: Backend, ptx_of: Callable[..., object], arch: int) -> None:
    check_widenings(native, ptx_of(arch))
    check_roundings(native, ptx_of(arch))
