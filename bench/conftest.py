"""pytest-benchmark's JSON names the machine; ours does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .shapes import THREADS


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(THREADS)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Drops the host's name."""
    machine_info.pop("node", None)
