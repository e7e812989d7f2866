"""What nvcc makes of the CUDA kernels: registers, spills, access widths, and that each operation is rounded by itself.

Of the flags that setup.py builds with, for every architecture that it builds for; no GPU takes part.
"""

from __future__ import annotations

import re

import pytest

from bench.cuda_code import Kernel, short_name

# "accumulate<120>" and so on: the two sizes of the parameter block, csrc/cuda/plan.h.
IN_BLOCKS = ("accumulate", "accumulate_micro", "adam", "sgd")
NAMES = [*(f"{op}<{capacity}>" for op in IN_BLOCKS for capacity in (120, 2040)), "finalize"]
ARCHITECTURES = ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]
# Registers a thread, and the share of an sm_90 multiprocessor's warps that then fit: enough to hide the latency of
# memory where one row of 16-byte accesses a thread is in flight.
BUDGETS = {
    "accumulate": (40, 0.75),
    "accumulate_micro": (48, 0.625),
    "adam": (64, 0.5),
    "sgd": (64, 0.5),
    "finalize": (64, 0.5),
}

WIDE_LOAD = r"LDG\.E(\.\w+)*\.128(\.\w+)*"
WIDE_STORE = r"STG\.E(\.\w+)*\.128(\.\w+)*"
# Operations on floating point that change a value, rounded to nearest; nothing else may compute.
ROUNDED = r"(add|sub|mul|div|sqrt|rcp)\.rn\.f(32|64)"
CONVERTED = r"cvt\.(f64\.f32|rn\.f32\.f64|rzi\.s64\.f64)"
MOVED = r"(ld|st|mov|selp|setp)(\.\w+)*|(min|max|neg|abs)\.f(32|64)"


@pytest.fixture(params=[(name, architecture) for name in NAMES for architecture in ARCHITECTURES], ids="-".join)
def kernel(request: pytest.FixtureRequest, cuda_kernels: list[Kernel]) -> Kernel:
    """Each kernel for each architecture."""
    name, architecture = request.param
    (found,) = [k for k in cuda_kernels if (k.name, k.architecture) == (name, architecture)]
    return found


def test_these_are_all_kernels(cuda_kernels: list[Kernel]) -> None:
    assert {(k.name, k.architecture) for k in cuda_kernels} == {(n, a) for n in NAMES for a in ARCHITECTURES}


def test_nothing_lies_in_local_memory(kernel: Kernel) -> None:
    assert kernel.spill_bytes == 0
    assert kernel.stack_bytes == 0
    assert kernel.in_sass(r"(LDL|STL).*") == 0


def test_registers_leave_room_for_other_warps(kernel: Kernel) -> None:
    registers, warps = BUDGETS[kernel.op]
    assert kernel.registers <= registers
    assert kernel.occupancy >= warps


def test_memory_is_accessed_in_16_bytes(kernel: Kernel) -> None:
    """Every array of every kind of tensor, where it is aligned; finalize walks over rows and flags."""
    if kernel.op == "finalize":
        return
    # accumulate: fp32 gradients in two halves, 16-bit ones in one access, the accumulator in two, and first adds that
    # do not read it. The steps: five kinds of parameters, with and without the extra state.
    half_rows = {
        "accumulate": (2 * 2 + 2 * 1 + 3 * 2 + 2 * 1, 2 * 3 * 2),
        "adam": (2 * 5 * 2 * 3 + 5 * 2 + 2 * (3 * 2 + 2 * 1), 2 * 5 * 2 * 2 + 5 * 2 + 2 * (2 * 3 + 4)),
        "sgd": (2 * 5 * 2 + 5 * 2 + 2 * (3 * 2 + 2 * 1), 5 * 2 + 2 * (2 * 3 + 4)),
    }
    loads, stores = half_rows[kernel.op.removesuffix("_micro")]
    assert kernel.in_sass(WIDE_LOAD) == loads
    assert kernel.in_sass(WIDE_STORE) == stores


class TestArithmetic:
    def test_every_operation_is_rounded_by_itself(self, kernel: Kernel) -> None:
        # PTX ISA: with a rounding modifier an add or a mul is never fused; without one ptxas may. And ftz, approx and
        # full are the other ways to a result that is not the CPU's.
        floats = {
            instruction for instruction in kernel.ptx if re.search(r"\.(f16|f16x2|bf16|bf16x2|f32|f64)\b", instruction)
        }
        odd = {i for i in floats if not re.fullmatch(f"{ROUNDED}|{CONVERTED}|{MOVED}", i)}
        assert odd == set()
        assert kernel.in_ptx(r".*\.(ftz|approx|full|sat)\b.*") == 0

    def test_ptxas_has_fused_nothing(self, kernel: Kernel) -> None:
        # Fused multiply-adds are what IEEE division and square root are made of, whose other steps are FMUL.FTZ and
        # FADD.FTZ: so a plain FMUL or FADD stands for each mul and add in PTX. ptxas may copy code, but not merge it.
        assert kernel.in_sass("FMUL") >= kernel.in_ptx(r"mul\.rn\.f32")
        assert kernel.in_sass("FADD") >= kernel.in_ptx(r"(add|sub)\.rn\.f32")
        assert kernel.in_sass("DMUL") >= kernel.in_ptx(r"mul\.rn\.f64")
        assert kernel.in_sass("DADD") >= kernel.in_ptx(r"(add|sub)\.rn\.f64")
        if not kernel.in_ptx(r"(div|sqrt|rcp)\..*"):
            assert kernel.in_sass(r"[FD]FMA.*") == 0  # HFMA2 there is a way to load a constant

    def test_division_and_root_are_the_ieee_ones(self, kernel: Kernel) -> None:
        n_divisions, n_roots = kernel.in_ptx(r"(div|rcp)\..*"), kernel.in_ptx(r"sqrt\..*")
        assert n_divisions == kernel.in_ptx(r"(div|rcp)\.rn\.f(32|64)")
        assert n_roots == kernel.in_ptx(r"sqrt\.rn\.f(32|64)")
        assert (n_divisions > 0) == (n_roots > 0) == (kernel.op in ("adam", "finalize"))
        # Each begins with an approximation, which Newton steps and a check then make exact; no other one is asked for.
        assert kernel.in_sass(r"MUFU\..*") == kernel.in_sass(r"MUFU\.(RCP|RSQ)(64H)?")
        assert kernel.in_sass(r"MUFU\.RCP(64H)?") >= n_divisions
        assert kernel.in_sass(r"MUFU\.RSQ(64H)?") >= n_roots


@pytest.mark.parametrize(
    ("name", "op", "signature"),
    [
        ("accumulate<2040>", "accumulate", "ILi2040ELb0EEEvNS_5BlockI"),
        ("accumulate_micro<2040>", "accumulate", "ILi2040ELb1EEEvNS_5BlockI"),
        ("adam<120>", "adam", "ILi120EEEvNS_5BlockI"),
        ("finalize", "finalize", "ENS_12FinalizeArgsE"),
    ],
)
def test_names_lose_what_depends_on_where_a_file_lies(name: str, op: str, signature: str) -> None:
    file = f"_ZN10fusedaccum39_GLOBAL__N__9581946c_7_{op}_cu_a0552ab6{len(op) + 7}{op}_kernel"
    assert short_name(file + signature) == name
