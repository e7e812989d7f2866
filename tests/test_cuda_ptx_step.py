"""adam_kernel and sgd_kernel, compiled by nvcc and executed on the CPU, against the native backend to the bit."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from cuda_cases import (
    BEFORE_CHUNKS,
    FAR_ELEMS,
    GROUPS,
    KINDS,
    SIZES,
    Param,
    any_bits,
    check_step,
    check_windows,
    every_param,
    tiny_params,
)
from cuda_harness import ARCHS, SCALAR_BYTES, PtxBackend, rotated

from fusedaccum.backends import Backend
from fusedaccum.layout import CHUNK, RULE_ADAM, RULE_SGD

pytestmark = pytest.mark.usefixtures("one_thread")
each_arch = pytest.mark.parametrize("arch", ARCHS)
each_rule = pytest.mark.parametrize("rule", [RULE_ADAM, RULE_SGD], ids=["adam", "sgd"])
NAMES = {RULE_ADAM: "adam_kernel", RULE_SGD: "sgd_kernel"}


def kernels(ptx: PtxBackend) -> list[tuple[str, int]]:
    return [(launched.kernel, launched.n_blocks) for launched in ptx.launches]


@each_arch
@each_rule
class TestBits:
    def test_every_kind_and_group(self, native: Backend, ptx_plan: ModuleType, arch: int, rule: int) -> None:
        ptx = PtxBackend(ptx_plan, arch, backwards=True)
        params = every_param(rule, (0, 7, 9, 1023, 1025, 3081))
        check_step(native, ptx, rule, params)
        assert [kernel for kernel, _ in kernels(ptx)] == [f"{NAMES[rule]}<{120 if rule == RULE_ADAM else 2040}>"]

    def test_in_the_other_parameter_block(self, native: Backend, ptx_plan: ModuleType, arch: int, rule: int) -> None:
        ptx = PtxBackend(ptx_plan, arch)
        params = every_param(rule, (9, 3081)) + [Param(CHUNK + 1033, *kind, 2) for kind in KINDS]
        params += tiny_params(rule, 120) if rule == RULE_ADAM else []
        check_step(native, ptx, rule, params)
        assert [kernel for kernel, _ in kernels(ptx)] == [f"{NAMES[rule]}<{2040 if rule == RULE_ADAM else 120}>"]

    def test_unaligned_parameters(self, native: Backend, ptx_plan: ModuleType, arch: int, rule: int) -> None:
        check_step(native, PtxBackend(ptx_plan, arch), rule, every_param(rule, (0, 9, 2057), (1, 2, 8)))

    @pytest.mark.parametrize("shift", [1, 2])
    def test_unaligned_buffers(self, native: Backend, ptx_plan: ModuleType, arch: int, rule: int, shift: int) -> None:
        check_step(native, PtxBackend(ptx_plan, arch), rule, every_param(rule, (0, 9, 2057), (0, 1)), shift=shift)

    def test_any_bits(self, native: Backend, ptx_plan: ModuleType, arch: int, rule: int) -> None:
        check_step(native, PtxBackend(ptx_plan, arch), rule, every_param(rule, (8, 2057)), make=any_bits)

    def test_a_skipped_window_leaves_every_bit(
        self, native: Backend, ptx_plan: ModuleType, arch: int, rule: int
    ) -> None:
        # But for the entry that says so, nothing is in the device's memory, and all of it is read-only.
        check_step(native, PtxBackend(ptx_plan, arch), rule, every_param(rule, (9, 1033)), skipped=1.0)
        check_step(native, PtxBackend(ptx_plan, arch), rule, tiny_params(rule, 130), skipped=1.0)


# One architecture each: what varies is the size or the address, and the code of a kind and group ran on each above.
@each_rule
class TestSizes:
    @pytest.mark.parametrize(("kind", "arch"), rotated(KINDS), ids=str)
    def test_every_size(
        self, native: Backend, ptx_plan: ModuleType, kind: tuple[torch.dtype, bool], arch: int, rule: int
    ) -> None:
        groups = range(len(GROUPS[rule]))
        params = [Param(n, *kind, group=i % len(groups)) for i, n in enumerate(SIZES)]
        check_step(native, PtxBackend(ptx_plan, arch), rule, params)

    @pytest.mark.parametrize(("n", "arch"), rotated([1, 2, 100, 121, 1000, 2101]))
    def test_many_tensors(self, native: Backend, ptx_plan: ModuleType, n: int, arch: int, rule: int) -> None:
        ptx = PtxBackend(ptx_plan, arch)
        check_step(native, ptx, rule, tiny_params(rule, n))
        in_launches = [min(n, 2040)] + [n - 2040] * (n > 2040)
        assert kernels(ptx) == [(f"{NAMES[rule]}<{120 if m <= 120 else 2040}>", m) for m in in_launches]

    @pytest.mark.parametrize(("name", "arch"), rotated(["acc", "master", "extra", "exp_avg", "exp_avg_sq"]))
    def test_one_unaligned_buffer(self, native: Backend, ptx_plan: ModuleType, name: str, arch: int, rule: int) -> None:
        check_step(native, PtxBackend(ptx_plan, arch), rule, every_param(rule, (2057,)), unaligned=name)


@each_arch
@each_rule
class TestSixtyFourBits:
    def test_offsets(self, native: Backend, ptx_plan: ModuleType, arch: int, rule: int) -> None:
        check_step(native, PtxBackend(ptx_plan, arch, far_elems=FAR_ELEMS), rule, every_param(rule, (9, 1033)))

    def test_tensors_of_more_than_2_to_the_31_elements(
        self, native: Backend, ptx_plan: ModuleType, arch: int, rule: int
    ) -> None:
        check_step(native, PtxBackend(ptx_plan, arch, before_chunks=BEFORE_CHUNKS), rule, every_param(rule, (9, 1033)))


@each_arch
@pytest.mark.parametrize(
    ("rule", "group", "kind", "bytes_an_elem"),
    [
        # Read: gradient, two moments, parameter or master. Written: two moments, parameter, master.
        (RULE_ADAM, 0, KINDS[0], 4 + 8 + 4 + 8 + 4),
        (RULE_ADAM, 0, KINDS[1], 4 + 8 + 4 + 8 + 2 + 4),
        (RULE_ADAM, 0, KINDS[2], 30),
        (RULE_ADAM, 0, KINDS[3], 4 + 8 + 2 + 8 + 2),
        (RULE_ADAM, 2, KINDS[1], 30 + 8),
        # Read: gradient, parameter or master, and a momentum buffer where there is momentum.
        (RULE_SGD, 0, KINDS[0], 4 + 4 + 4),
        (RULE_SGD, 0, KINDS[1], 4 + 4 + 2 + 4),
        (RULE_SGD, 0, KINDS[3], 4 + 2 + 2),
        (RULE_SGD, 2, KINDS[1], 14 + 8),
    ],
)
def test_bytes(
    native: Backend,
    ptx_plan: ModuleType,
    arch: int,
    rule: int,
    group: int,
    kind: tuple[torch.dtype, bool],
    bytes_an_elem: int,
) -> None:
    """In figures, for the largest part of a launch. ``PtxBackend`` asserts the like for every launch of this file."""
    ptx, n = PtxBackend(ptx_plan, arch), 2 * CHUNK
    check_step(native, ptx, rule, [Param(n, *kind, group)])
    stats = ptx.launches[0].stats
    # Of each of the two blocks: 128 threads read whether to skip (8 bytes); one reads 32 of the table and the scalars.
    assert (
        stats.global_read + stats.global_written - 2 * (128 * 8 + 32 + SCALAR_BYTES[NAMES[rule]]) == n * bytes_an_elem
    )


@each_arch
@each_rule
def test_windows_through_all_kernels(native: Backend, ptx_plan: ModuleType, arch: int, rule: int) -> None:
    check_windows(native, PtxBackend(ptx_plan, arch), rule)
