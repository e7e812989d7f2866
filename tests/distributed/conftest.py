"""Groups of processes on gloo: a set of modules of checks is launched once for each number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed
from launch import run_checks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/distributed" in item.path.as_posix():
            item.add_marker(pytest.mark.distributed)


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, str], str]:
    """What became of a check: "" if all is well."""
    if not torch.distributed.is_available():
        pytest.skip("this torch is built without torch.distributed")
    found: dict[tuple[str, int], dict[str, str]] = {}

    def of(modules: str, n_ranks: int, name: str) -> str:
        key = (modules, n_ranks)
        if key not in found:
            found[key] = run_checks(modules, n_ranks, tmp_path_factory.mktemp(f"ranks_{n_ranks}"))
        return found[key][name]

    return of
