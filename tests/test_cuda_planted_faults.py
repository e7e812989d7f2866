"""A test of the tests: each fault that the kernels' tests should find is planted in a copy of csrc, and is found."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType

import pytest
from cuda_faults import FAULTS
from cuda_harness import SOURCES, PtxBackend
from planted_faults import FAR, HUGE
from ptxrun import PtxError

from fusedaccum.backends import Backend

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", FAULTS)
def test_is_found(native: Backend, ptx_plan: ModuleType, tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    shutil.copytree(SOURCES.parent, tmp_path / "csrc")
    sources = tmp_path / "csrc" / "cuda"
    fault.plant(sources)
    with pytest.raises((PtxError, AssertionError), match=fault.message):
        fault.check(native, PtxBackend(ptx_plan, 90, sources=sources, **(fault.options or {})))


@pytest.mark.parametrize("options", [{}, FAR, HUGE], ids=["as it is", "far", "huge"])
def test_without_a_fault_nothing_is_found(native: Backend, ptx_plan: ModuleType, options: dict[str, int]) -> None:
    for check in {fault.check for fault in FAULTS.values() if (fault.options or {}) == options}:
        check(native, PtxBackend(ptx_plan, 90, **options))
