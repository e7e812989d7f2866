"""A test of the tests: each fault that the kernels' tests should find is planted in a copy of triton_kernels, and is
found when its PTX is executed."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from cuda_cases import (
    check_accumulate,
    check_finalize,
    check_measure,
    check_overflow,
    every_grad,
    tiny_grads,
    wide,
)
from planted_faults import DIFFERS, FAR, HUGE, NARROW, UNINITIALISED, Fault, adam, boundary, sgd
from ptxrun import PtxError
from torch import Tensor
from triton_cases import check_roundings

from fusedaccum.backends import Backend
from fusedaccum.layout import CHUNK, RULE_NONE

pytestmark = pytest.mark.usefixtures("one_thread", "triton_installed")
SOURCES = Path(__file__).parent.parent / "triton_kernels"


def minus_zeros(n: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.full((n,), -0.0, dtype=dtype)


grads = partial(check_accumulate, grads=every_grad((7, 1025, CHUNK + 9)))
micro = partial(grads, micro=True)
ends = partial(check_finalize, boundary=boundary)

FAULTS = {
    # Tails and lanes.
    "accumulate: no tail guard": Fault("accumulate.py", "inside = i < n", "inside = i >= 0", grads, UNINITIALISED),
    "step: no tail guard": Fault("step.py", "inside = i < n", "inside = i >= 0", sgd, UNINITIALISED),
    "rescan: no tail guard": Fault(
        "chunks.py",
        "mask=i < n",
        "mask=i >= 0",
        partial(check_overflow, op="accumulate_", sizes=(2049,)),
        UNINITIALISED,
    ),
    "measure: no tail guard": Fault(
        "accumulate.py",
        "mask=i * LANES + lane < n",
        "mask=lane >= 0",
        partial(check_measure, sizes=(9,)),
        UNINITIALISED,
    ),
    "accumulate: a row too few": Fault(
        "accumulate.py", "for i in range(0, full):", "for i in range(1, full):", grads, "never written"
    ),
    "step: a row too few": Fault(
        "step.py", "for i in range(0, full):", "for i in range(1, full):", sgd, "never written"
    ),
    "accumulate: no tail": Fault(
        "accumulate.py", "(n + LANES - 1) // LANES", "n // LANES", grads, "never written|uninitialised"
    ),
    "accumulate: the tail's squares are lost": Fault(
        "accumulate.py", "lane_tree((lanes + tail_lanes)", "lane_tree((lanes)", grads, f"partials: {DIFFERS}"
    ),
    # The tree.
    "tree: neighbours": Fault(
        "chunks.py",
        "tl.reduce(tl.reshape(lanes, [2, LANES >> (halvings + 1)]), 0,",
        "tl.reduce(tl.reshape(lanes, [LANES >> (halvings + 1), 2]), 1,",
        partial(grads, make=wide),
        f"partials: {DIFFERS}",
    ),
    "tree: one sum": Fault(
        "chunks.py",
        "    for halvings in tl.static_range(HALVINGS - 1):",
        "    for halvings in tl.static_range(0):",
        partial(grads, make=wide),
        f"partials: {DIFFERS}",
    ),
    "tree: in fp32": Fault(
        "accumulate.py",
        "lane_tree((lanes + tail_lanes).to(tl.float64))",
        "lane_tree(lanes + tail_lanes).to(tl.float64)",
        partial(grads, make=wide),
        f"partials: {DIFFERS}",
    ),
    # Indices of 32 bits.
    "accumulate: place in its tensor": Fault(
        "accumulate.py", "begin = index.to(tl.int64) * CHUNK", "begin = index.to(tl.int32) * CHUNK", grads, "", HUGE
    ),
    "accumulate: offset": Fault(
        "accumulate.py", "acc + tl.load(row) + begin", "acc + tl.load(row).to(tl.int32) + begin", grads, "out of", FAR
    ),
    "accumulate: chunk": Fault(
        "accumulate.py", "tl.load(row + 2) + index", "(tl.load(row + 2) + index).to(tl.int32)", grads, "out of", FAR
    ),
    "step: offset": Fault(
        "step.py", "here = tl.load(row) + begin", "here = (tl.load(row) + begin).to(tl.int32)", adam, "out of", FAR
    ),
    "step: master offset": Fault(
        "step.py",
        "(master_offset + begin) * 4, 0",
        "(master_offset + begin).to(tl.int32) * 4, 0",
        sgd,
        "out of|misaligned",
        FAR,
    ),
    # Wrong data.
    "first add reads the accumulator": Fault(
        "accumulate.py", "inside & (first == 0)", "inside", grads, "read of uninitialised global memory"
    ),
    "first add is added": Fault(
        "accumulate.py",
        "tl.where(first, added, old + added)",
        "old + added",
        partial(check_accumulate, grads=every_grad((2049,)), make=minus_zeros),
        f"acc: {DIFFERS}",
    ),
    "wrong entry": Fault("chunks.py", "<= program", "< program", grads, f"{UNINITIALISED}|race"),
    "wrong entry of many": Fault(
        "chunks.py",
        "            high = middle",
        "            high = tl.where(middle == 749, 748, middle)",
        partial(check_accumulate, grads=tiny_grads(1000)),
        f"{UNINITIALISED}|race",
    ),
    "every step takes the first slot's scalars": Fault(
        "step.py", "scalars + slot * SCALAR_COLUMNS", "scalars + 0 * SCALAR_COLUMNS", sgd, UNINITIALISED
    ),
    "a fused product": Fault(
        "accumulate.py",
        "tl.where(first, added, old + added)",
        "tl.where(first, added, tl.fma(tl.where(is_float32, grad32, widened(grad16, is_bfloat16)),"
        " tl.full([LANES], scale, tl.float32), old))",
        grads,
        f"acc: {DIFFERS}",
    ),
    "an approximate quotient": Fault(
        "elements.py", "tl.div_rn(exp_avg, denominator)", "(exp_avg / denominator)", adam, "approximate instructions"
    ),
    "an approximate root": Fault("elements.py", "tl.sqrt_rn(", "tl.sqrt(", adam, "approximate instructions"),
    "ties away from even": Fault(
        "elements.py",
        "(bits + 0x7FFF + ((bits >> 16) & 1))",
        "(bits + 0x8000)",
        check_roundings,
        DIFFERS,
    ),
    "NaN rounded as a number": Fault(
        "elements.py", "quiet_nan, rounded).to(tl.uint16)", "rounded, rounded).to(tl.uint16)", check_roundings, DIFFERS
    ),
    "bfloat16 for float16": Fault(
        "elements.py", "tl.where(is_bfloat16, from_bfloat16, from_float16)", "from_bfloat16", grads, DIFFERS
    ),
    # What is not finite.
    "no second look": Fault(
        "accumulate.py",
        "if total - total != 0.0:",
        "if total < 0.0:",
        partial(check_overflow, op="accumulate_", sizes=(2049,)),
        f"partials: {DIFFERS}|, not ",
    ),
    "a second look at NaN only": Fault(
        "accumulate.py",
        "if total - total != 0.0:",
        "if total != total:",
        partial(check_overflow, op="measure_", sizes=(2049,)),
        f"partials: {DIFFERS}|, not ",
    ),
    "step never skips": Fault(
        "step.py",
        "if tl.load(control + SKIPPED) == 0.0:",
        "if tl.load(control + SKIPPED) >= 0.0:",
        partial(sgd, skipped=1.0),
        UNINITIALISED,
    ),
    "step looks at found_inf": Fault(
        "step.py", "control + SKIPPED", "control + 1", partial(adam, skipped=1.0), UNINITIALISED
    ),
    "finalize ages slots on found_inf": Fault(
        "finalize.py",
        "        if stepped:\n            if RULE",
        "        if norm != 1.0:\n            if RULE",
        partial(ends, boundary=partial(boundary, partial_=math.inf)),
        f"{UNINITIALISED}|read-only",
    ),
    "finalize counts inactive slots": Fault(
        "finalize.py",
        "counts = tl.load(active + low, mask=exists, other=0) != 0",
        "counts = exists",
        partial(ends, boundary=partial(boundary, inactive=True)),
        UNINITIALISED,
    ),
    "finalize: one turn too few": Fault(
        "finalize.py",
        "for _ in range(0, n_turns):",
        "for _ in range(0, n_turns - 1):",
        partial(ends, boundary=partial(boundary, inactive=True)),
        UNINITIALISED,
    ),
    "finalize: 2^-24 in a number": Fault(
        "finalize.py",
        "tl.full((), numerator, tl.float64)",
        "tl.full((), numerator, tl.float64).to(tl.float32).to(tl.float64)",
        ends,
        f"control: {DIFFERS}",
    ),
    # A scale that the device knows.
    "the factor is not looked at": Fault(
        "accumulate.py", "product * tl.load(factor)", "product", partial(grads, factor=0.7), f"not |{DIFFERS}"
    ),
    "a scale of zero is one as any other": Fault(
        "accumulate.py", "adds = effective != 0.0", "adds = effective <= 2.0", partial(grads, factor=0.0), UNINITIALISED
    ),
    "a scale of zero stores nothing": Fault(
        "accumulate.py", "if adds | first:", "if adds:", partial(grads, factor=0.0), "uninitialised|never written"
    ),
    "a scale of minus zero stores minus zeros": Fault(
        "accumulate.py",
        "tl.where(adds, effective, 1.0)",
        "effective",
        partial(grads, factor=-0.0),
        f"acc: {DIFFERS}",
    ),
    # Statistics.
    "micro: squares of the accumulator": Fault(
        "accumulate.py", "added * added", "result * result", micro, f"micro_partials: {DIFFERS}"
    ),
    "micro: stored, not added": Fault(
        "accumulate.py", "grown = kept + ", "grown = kept * 0.0 + ", micro, f"micro_partials: {DIFFERS}"
    ),
    "micro: a first add is added": Fault(
        "accumulate.py",
        "micro_partials + chunk, mask=first == 0,",
        "micro_partials + chunk, mask=chunk >= 0,",
        micro,
        UNINITIALISED,
    ),
    "finalize: the wrong sum from elsewhere": Fault(
        "finalize.py", "tl.load(extra + 1,", "tl.load(extra,", partial(ends, extra=[1.5, 2.5]), f"control: {DIFFERS}"
    ),
    # The window.
    "the window's weight is not begun afresh": Fault(
        "finalize.py", "    tl.store(window + WEIGHT, 0.0)\n", "", ends, f"window: {DIFFERS}"
    ),
    "the window is written before all have read it": Fault(
        "finalize.py",
        "    tl.debug_barrier()  # every thread has read the window before one writes it\n",
        "",
        ends,
        "race",
    ),
    "the device's weight is not looked at": Fault(
        "finalize.py",
        "tl.full((), weight, tl.float64) + tl.load(window + WEIGHT)",
        "tl.full((), weight, tl.float64)",
        ends,
        f"control: {DIFFERS}",
    ),
    "a window without weight is a step": Fault(
        "finalize.py",
        "stepped = (found_inf == 0) & has_weight",
        "stepped = found_inf == 0",
        partial(ends, weight=-9.0),
        f"{UNINITIALISED}|read-only|{DIFFERS}",
    ),
    "scalars without a rule": Fault(
        "finalize.py",
        "if RULE != NO_RULE:",
        "if RULE >= 0:",
        partial(ends, rule=RULE_NONE),
        f"{UNINITIALISED}|read-only",
    ),
    "advances though it should not": Fault(
        "finalize.py", "if advance != 0:", "if advance >= 0:", partial(ends, advance=False), "read-only|uninitialised"
    ),
    # Accesses.
    "the master's alignment is not looked at": Fault(
        "step.py", " & is_aligned(wide)", "", partial(sgd, unaligned="master"), "misaligned global"
    ),
    "the gradient's alignment is not looked at": Fault(
        "accumulate.py",
        "is_aligned(here) & ((address & 15) == 0)",
        "is_aligned(here)",
        partial(check_accumulate, grads=every_grad((1025,), shifts=(1,))),
        "misaligned global",
    ),
    "narrow accesses": Fault(
        "accumulate.py",
        "at_acc, at_wide, at_low = tl.multiple_of(at_acc, 16), tl.multiple_of(at_wide, 16), tl.multiple_of(at_low, 16)",
        "pass",
        grads,
        NARROW,
    ),
    "narrow stores": Fault("step.py", "tl.store(tl.multiple_of(at, 16)", "tl.store((at)", adam, NARROW),
    "an array is read for nothing": Fault(
        "step.py", "inside, has_momentum & (scalars[6] == 0.0), FULL", "inside, always, FULL", sgd, UNINITIALISED
    ),
}


def planted(fault: Fault, folder: Path) -> Path:
    shutil.copytree(SOURCES, folder / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    fault.plant(folder / "kernels")
    return folder / "kernels"


@pytest.mark.parametrize("name", FAULTS)
def test_is_found(native: Backend, tmp_path: Path, name: str) -> None:
    from triton_harness import TritonPtxBackend

    fault = FAULTS[name]
    folder = planted(fault, tmp_path)
    with pytest.raises((PtxError, AssertionError), match=fault.message):
        fault.check(native, TritonPtxBackend(90, folder=folder, **(fault.options or {})))


@pytest.mark.parametrize("options", [{}, FAR, HUGE], ids=["as it is", "far", "huge"])
def test_without_a_fault_nothing_is_found(native: Backend, options: dict[str, int]) -> None:
    from triton_harness import TritonPtxBackend

    for check in {fault.check for fault in FAULTS.values() if (fault.options or {}) == options}:
        check(native, TritonPtxBackend(90, **options))
