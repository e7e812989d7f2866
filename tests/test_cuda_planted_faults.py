"""A test of the tests: each fault that the kernels' tests should find is planted in a copy of csrc, and is found."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from cuda_cases import (
    BEFORE_CHUNKS,
    FAR_ELEMS,
    Boundary,
    check_accumulate,
    check_finalize,
    check_overflow,
    check_step,
    every_grad,
    every_param,
    tiny_grads,
    wide,
)
from cuda_harness import SOURCES, PtxBackend
from ptxrun import PtxError

from fusedaccum.backends import Backend
from fusedaccum.layout import CHUNK, RULE_ADAM, RULE_SGD

pytestmark = pytest.mark.usefixtures("one_thread")
SLOTS = (5, 0, 3 * CHUNK + 1, 1100 * CHUNK, 7)


def boundary(inactive: bool = False, partial_: float | None = None) -> Boundary:
    result = Boundary(SLOTS, RULE_ADAM, [0, 3] if inactive else None)
    if partial_ is not None:
        result.partials[2] = partial_
    return result


grads = partial(check_accumulate, grads=every_grad((7, 1025, CHUNK + 9)))
# One kind of parameter would do for most, but all are in one launch anyhow.
adam = partial(check_step, rule=RULE_ADAM, params=every_param(RULE_ADAM, (9, 1033)))
sgd = partial(check_step, rule=RULE_SGD, params=every_param(RULE_SGD, (9, 1033)))
FAR, HUGE = {"far_elems": FAR_ELEMS}, {"before_chunks": BEFORE_CHUNKS}
UNINITIALISED = "read of uninitialised global memory|out of bounds"
DIFFERS = r"\d+ of \d+ differ"
NARROW = "fewer bytes than expected in accesses of that width"


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` in ``file`` wherever it stands; ``check`` has to fail with ``message``."""

    file: str
    old: str
    new: str
    check: Callable[[Backend, PtxBackend], object]
    message: str
    options: dict[str, int] | None = None


FAULTS = {
    # Tails and lanes.
    "accumulate: no tail guard": Fault(
        "accumulate.cu",
        "const int end = n < full + first_lane + kPerThread ? n : full + first_lane + kPerThread;",
        "const int end = full + first_lane + kPerThread;",
        grads,
        UNINITIALISED,
    ),
    "step: no tail guard": Fault(
        "step.cu", "if (full + first + j < rule.at.n) rule.one", "rule.one", sgd, UNINITIALISED
    ),
    "rescan: no tail guard": Fault(
        "accumulate.cu",
        "const int end = n < row + kPerThread ? n : row + kPerThread;",
        "const int end = row + kPerThread;",
        partial(check_overflow, op="accumulate_", sizes=(2049,)),
        UNINITIALISED,
    ),
    "accumulate: tail in a wrong lane": Fault(
        "accumulate.cu", "i % kPerThread == j ?", "0 == j ?", grads, f"partials: {DIFFERS}"
    ),
    "accumulate: a row too few": Fault(
        "accumulate.cu",
        "for (int row = 0; row < full; row += kLanes) {",
        "for (int row = kLanes; row < full; row += kLanes) {",
        grads,
        "never written",
    ),
    # The tree.
    "tree: wrong partner": Fault(
        "launch.cuh",
        "lanes[j] += shared[j][thread];",
        "lanes[j] += shared[j][thread ^ 1];",
        partial(grads, make=wide),
        DIFFERS,
    ),
    "tree: strides upwards": Fault(
        "launch.cuh",
        "for (int stride = kPerThread / 2; stride > 0; stride /= 2) {",
        "for (int stride = 1; stride < kPerThread; stride *= 2) {",
        partial(grads, make=wide),
        DIFFERS,
    ),
    "finalize: wrong lane": Fault(
        "finalize.cu",
        "lanes[thread] += lanes[thread + stride];",
        "lanes[thread] += lanes[2 * stride - 1 - thread];",
        partial(check_finalize, boundary=boundary),
        f"control: {DIFFERS}",
    ),
    # Barriers.
    "tree: no barrier after the stores": Fault(
        "launch.cuh",
        "    __syncthreads();\n    if (thread < stride) {",
        "    if (thread < stride) {",
        grads,
        "race|uninitialised shared",
    ),
    "tree: no barrier after the loads": Fault(
        "launch.cuh",
        "    __syncthreads();\n  }\n  if (thread < 32) {",
        "  }\n  if (thread < 32) {",
        grads,
        "race",
    ),
    "accumulate: no barrier before the total": Fault(
        "accumulate.cu",
        "total = sum;\n  __syncthreads();",
        "total = sum;",
        grads,
        "race|uninitialised shared",
    ),
    "step: no barrier after the start": Fault("step.cu", "  __syncthreads();\n", "", sgd, "race|uninitialised shared"),
    "finalize: no barrier in the tree": Fault(
        "finalize.cu",
        "thread + stride];\n    __syncthreads();",
        "thread + stride];",
        partial(check_finalize, boundary=boundary),
        "race",
    ),
    # Indices of 32 bits.
    "chunk's place in its tensor": Fault(
        "launch.cuh",
        "static_cast<int64_t>(chunk.index) * kChunk",
        "static_cast<int32_t>(chunk.index * static_cast<uint32_t>(kChunk))",
        grads,
        "out of bounds",
        HUGE,
    ),
    "accumulate: offset": Fault(
        "accumulate.cu",
        "+ slot->offset_elems",
        "+ static_cast<int32_t>(slot->offset_elems)",
        grads,
        "out of bounds",
        FAR,
    ),
    "accumulate: chunk": Fault(
        "accumulate.cu",
        "partial = slot->first_chunk + chunk.index;",
        "partial = static_cast<int32_t>(slot->first_chunk + chunk.index);",
        grads,
        "out of bounds",
        FAR,
    ),
    "step: offset": Fault("step.cu", "const int64_t at =", "const int at = (int)", adam, "out of bounds", FAR),
    "step: master offset": Fault(
        "step.cu",
        "args.master + slot.master_offset_elems",
        "args.master + static_cast<int32_t>(slot.master_offset_elems)",
        sgd,
        "out of bounds",
        FAR,
    ),
    # Wrong data.
    "first add reads the accumulator": Fault(
        "accumulate.cu",
        "const float result = kFirst ? scaled(value, scale) : accumulated(acc[i], value, scale);",
        "const float result = accumulated(acc[i], value, scale);",
        grads,
        "read of uninitialised global memory",
    ),
    "wrong entry": Fault(
        "launch.cuh",
        "block.entries[middle].end <= at",
        "block.entries[middle].end < at",
        grads,
        f"{UNINITIALISED}|race",
    ),
    "wrong entry of many": Fault(
        "launch.cuh",
        "high = middle;",
        "high = middle == 1500 ? 1499 : middle;",
        partial(check_accumulate, grads=tiny_grads(2040)),
        f"{UNINITIALISED}|race",
    ),
    "every step takes the first slot's scalars": Fault(
        "step.cu", "(block.args.scalars)[chunk.entry.slot]", "(block.args.scalars)[0]", sgd, UNINITIALISED
    ),
    "a fused product": Fault(
        "../math.h", "return acc + grad * scale;", "return fmaf(grad, scale, acc);", grads, f"acc: {DIFFERS}"
    ),
    "every other parameter loses a bit": Fault(
        "vec.cuh",
        "static_cast<uint32_t>(high.bits) << 16",
        "static_cast<uint32_t>(high.bits & 0xfffe) << 16",
        adam,
        DIFFERS,
    ),
    # What is not finite.
    "no second look": Fault(
        "accumulate.cu",
        "if (total - total != 0.0) {",
        "if (false) {",
        partial(check_overflow, op="accumulate_", sizes=(2049,)),
        f"partials: {DIFFERS}|, not ",
    ),
    "a second look at NaN only": Fault(
        "accumulate.cu",
        "if (total - total != 0.0) {",
        "if (total != total) {",
        partial(check_overflow, op="measure_", sizes=(2049,)),
        f"partials: {DIFFERS}|, not ",
    ),
    "step ignores found_inf": Fault(
        "step.cu",
        "if (block.args.control[kFoundInf] != 0.0) return;",
        "",
        partial(sgd, found_inf=1.0),
        UNINITIALISED,
    ),
    "finalize ages slots on found_inf": Fault(
        "finalize.cu",
        "if (!args.advance || !finite) return;",
        "if (!args.advance) return;",
        partial(check_finalize, boundary=partial(boundary, partial_=math.inf)),
        f"{UNINITIALISED}|read-only",
    ),
    "finalize counts inactive slots": Fault(
        "finalize.cu",
        "if (args.active[slot]) sum +=",
        "sum +=",
        partial(check_finalize, boundary=partial(boundary, inactive=True)),
        UNINITIALISED,
    ),
    # Accesses.
    "the master's alignment is not looked at": Fault(
        "step.cu", "is_aligned(here.master) && ", "", partial(sgd, unaligned="master"), "misaligned global"
    ),
    "the gradient's alignment is not looked at": Fault(
        "accumulate.cu",
        "is_aligned(acc) && is_aligned(grad)",
        "is_aligned(acc)",
        partial(check_accumulate, grads=every_grad((1025,), shifts=(1,))),
        "misaligned global",
    ),
    "narrow loads": Fault(
        "vec.cuh",
        "if (kAligned) {\n    const uint4 words = load16<kGlobal>(from);\n    out[0]",
        "if (false) {\n    const uint4 words = load16<kGlobal>(from);\n    out[0]",
        grads,
        NARROW,
    ),
    "narrow stores": Fault(
        "vec.cuh",
        "if (kAligned) {\n    store16<kGlobal>(to, make_uint4(bits_of",
        "if (false) {\n    store16<kGlobal>(to, make_uint4(bits_of",
        grads,
        NARROW,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_is_found(native: Backend, ptx_plan: ModuleType, tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    shutil.copytree(SOURCES.parent, tmp_path / "csrc")
    sources = tmp_path / "csrc" / "cuda"
    text = (sources / fault.file).read_text()
    assert fault.old in text, "the sources have changed: plant the fault anew"
    (sources / fault.file).write_text(text.replace(fault.old, fault.new))
    with pytest.raises((PtxError, AssertionError), match=fault.message):
        fault.check(native, PtxBackend(ptx_plan, 90, sources=sources, **(fault.options or {})))


@pytest.mark.parametrize("options", [{}, FAR, HUGE], ids=["as it is", "far", "huge"])
def test_without_a_fault_nothing_is_found(native: Backend, ptx_plan: ModuleType, options: dict[str, int]) -> None:
    for check in {fault.check for fault in FAULTS.values() if (fault.options or {}) == options}:
        check(native, PtxBackend(ptx_plan, 90, **options))
