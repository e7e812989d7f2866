"""finalize_kernel, compiled by nvcc and executed on the CPU, against the native backend to the bit."""

from __future__ import annotations

import math
from functools import partial
from types import ModuleType

import pytest
from cuda_cases import Boundary, check_finalize
from cuda_harness import ARCHS, PtxBackend, rotated
from helpers import assert_same_bits
from torch import Tensor

from fusedaccum import layout
from fusedaccum.backends import Backend
from fusedaccum.layout import CHUNK, LANES, RULE_ADAM, RULE_SGD

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.parametrize("rule", [RULE_ADAM, RULE_SGD], ids=["adam", "sgd"]),
]
SIZES = (5, 0, 3 * CHUNK + 1, CHUNK, 1, 700, 0, 9 * CHUNK)
SHAPES = {
    "no slots": (),
    "an empty slot": (0,),
    "one element": (1,),
    "several slots": SIZES,
    "1023 chunks": (1023 * CHUNK,),
    "1024 chunks": (1024 * CHUNK,),
    "1025 chunks": (1024 * CHUNK + 1, 0),
    "more chunks than lanes": (700 * CHUNK, 0, 5, 2400 * CHUNK + 9, 1000),
    "more slots than threads": (3, 0, 2 * CHUNK) * 400,
    "slots beside chunks": (1,) * 1000 + (CHUNK * 1100,) + (7,) * 1100,
}


@pytest.mark.parametrize(("shape", "arch"), rotated(SHAPES))
def test_every_shape(native: Backend, ptx_plan: ModuleType, arch: int, rule: int, shape: str) -> None:
    check_finalize(native, PtxBackend(ptx_plan, arch), partial(Boundary, SHAPES[shape], rule))


@pytest.mark.parametrize(("max_norm", "arch"), rotated([0.0, 1e-3, 1.0, 1e30, math.inf]))
@pytest.mark.parametrize("numerator", [1.0, 1 / 3])
def test_clip(native: Backend, ptx_plan: ModuleType, arch: int, rule: int, max_norm: float, numerator: float) -> None:
    options = {"max_norm": max_norm, "numerator": numerator}
    check_finalize(native, PtxBackend(ptx_plan, arch), partial(Boundary, SIZES, rule), **options)


@pytest.mark.parametrize(("active", "arch"), rotated([[], [2], [0, 1, 4, 7], [3, 6]]), ids=str)
def test_inactive_slots_are_not_even_read(
    native: Backend, ptx_plan: ModuleType, arch: int, rule: int, active: list[int]
) -> None:
    # Neither partials nor steps of others are in the device's memory.
    check_finalize(native, PtxBackend(ptx_plan, arch), partial(Boundary, SIZES, rule, active))


@pytest.mark.parametrize(("extra", "arch"), rotated([0.0, 2.5, math.inf, math.nan]))
def test_a_sum_from_elsewhere(native: Backend, ptx_plan: ModuleType, arch: int, rule: int, extra: float) -> None:
    for sizes in ((), SIZES):
        result = check_finalize(
            native, PtxBackend(ptx_plan, arch), partial(Boundary, sizes, rule), extra=[extra, 3.5], max_norm=1.0
        )
        assert result.control[layout.FOUND_INF] == float(not math.isfinite(extra))


# 1e308 is two partials, whose sum overflows fp64.
@pytest.mark.parametrize("value", [math.inf, math.nan, 1e308])
@pytest.mark.parametrize(("slot", "arch"), rotated([0, 2, 7]))
def test_found_inf_ages_no_slot(
    native: Backend, ptx_plan: ModuleType, arch: int, rule: int, slot: int, value: float
) -> None:
    # Neither steps nor scalars may be written, and the steps are not in the device's memory.
    def spoilt() -> Boundary:
        boundary = Boundary(SIZES, rule)
        boundary.partials[boundary.table[slot, 2]] = value
        if value == 1e308:
            boundary.partials[-1] = value
        return boundary

    result = check_finalize(native, PtxBackend(ptx_plan, arch), spoilt, max_norm=1.0)
    assert result.control[layout.FOUND_INF] == 1.0
    assert result.scalars.isnan().all()


# Without weight, with a negative one, with one that is not a number: the boundaries' windows add up to a weight of 1.
@pytest.mark.parametrize(("weight", "arch"), rotated([-1.5, 0.0, 1e-300, 1e200, math.nan, math.inf]))
@pytest.mark.parametrize("micro", [False, True])
def test_weights(native: Backend, ptx_plan: ModuleType, arch: int, rule: int, weight: float, micro: bool) -> None:
    result = check_finalize(
        native, PtxBackend(ptx_plan, arch), partial(Boundary, SIZES, rule), weight=weight, micro=micro, max_norm=1.0
    )
    assert result.control[layout.SKIPPED] == float(not weight >= 0)


@pytest.mark.parametrize(("rows", "arch"), rotated([(), SIZES]))
def test_without_a_rule(native: Backend, ptx_plan: ModuleType, arch: int, rule: int, rows: tuple[int, ...]) -> None:
    # Neither scalars nor steps are in the device's memory.
    result = check_finalize(
        native, PtxBackend(ptx_plan, arch), partial(Boundary, rows, rule), rule=layout.RULE_NONE, max_norm=1.0
    )
    assert result.scalars.isnan().all()
    assert result.window[layout.WEIGHT] == 0.0


@pytest.mark.parametrize("arch", ARCHS)
def test_windows_one_after_another(native: Backend, ptx_plan: ModuleType, arch: int, rule: int) -> None:
    """One window buffer through growth, backoff, skips and the averages."""
    ptx = PtxBackend(ptx_plan, arch)
    carried = Boundary(SIZES, rule).window
    for i, (weight, spoilt) in enumerate([(2.0, None), (3.0, math.inf), (0.0, None), (5.0, None), (4.0, math.nan)]):

        def boundary(spoilt: float | None = spoilt, i: int = i, before: Tensor = carried) -> Boundary:
            result = Boundary(SIZES, rule, step=float(i))
            result.window.copy_(before)
            result.window[layout.GROWTH_INTERVAL] = 1.0
            if spoilt is not None:
                result.partials[0] = spoilt
            return result

        carried = check_finalize(native, ptx, boundary, weight=weight, max_norm=1.0).window
    first = Boundary(SIZES, rule).window
    assert (carried - first)[layout.WINDOWS] == 5.0
    assert (carried - first)[layout.SKIPPED_WINDOWS] == 3.0


@pytest.mark.parametrize("arch", ARCHS)
def test_without_advancing(native: Backend, ptx_plan: ModuleType, arch: int, rule: int) -> None:
    result = check_finalize(native, PtxBackend(ptx_plan, arch), partial(Boundary, SIZES, rule), advance=False)
    assert result.control[layout.FOUND_INF] == 0.0
    assert result.scalars.isnan().all()
    assert_same_bits(result.window, Boundary(SIZES, rule).window)


@pytest.mark.parametrize(("step", "arch"), rotated([0.0, 1.0, 999.0, 2.0**20, 2.0**24 - 1]))
def test_bias_corrections(native: Backend, ptx_plan: ModuleType, arch: int, rule: int, step: float) -> None:
    check_finalize(native, PtxBackend(ptx_plan, arch), partial(Boundary, (1,) * (LANES + 12), rule, None, step))
