"""Fixtures of the integration tests: the frameworks, skipped where they are not installed, and a quiet surrounding."""

from __future__ import annotations

import os

# Before any of them is imported: nothing here downloads, reports or starts threads of its own.
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    TRANSFORMERS_VERBOSITY="error",
    ACCELERATE_USE_CPU="true",
)

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from fusedaccum.arena import Arena

REASON = "install the extra: pip install fusedaccum[integration]"


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.integration)


@pytest.fixture(autouse=True)
def one_thread_for_each_test() -> Iterator[None]:
    """The models are so small that threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    """Hugging Face transformers, whose Trainer needs accelerate."""
    pytest.importorskip("accelerate", reason=REASON)
    return pytest.importorskip("transformers", reason=REASON)


@pytest.fixture(scope="session")
def accelerate() -> ModuleType:
    """Hugging Face accelerate."""
    return pytest.importorskip("accelerate", reason=REASON)


@pytest.fixture(scope="session")
def lightning() -> ModuleType:
    """Lightning, with ``lightning.pytorch`` imported."""
    pytest.importorskip("lightning.pytorch", reason=REASON)
    return pytest.importorskip("lightning", reason=REASON)


@pytest.fixture
def extra_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parameters each pass over the gradients had that the optimizer made because somebody else wrote to
    them."""
    passes: list[int] = []
    measure = Arena.measure

    def counted(arena: Arena, slots: list) -> None:
        passes.append(len(slots))
        measure(arena, slots)

    monkeypatch.setattr(Arena, "measure", counted)
    return passes
