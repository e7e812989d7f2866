"""The quick run's cases as pytest-benchmark entries: ``pytest bench --benchmark-only``.

Each entry times our provider; between its rounds all providers of the case take turns, and what came of the comparison
is in the entry's ``extra_info``. Results are checked and counts asserted; times are reported and never fail.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from .cases import Case, all_cases, line_up
from .measure import Run, environment, gathered, one_round
from .memory import memory_of
from .rows import make_rows
from .session import SPARE_BYTES, free_bytes
from .targets import counted

ROUNDS = 10
CPU = torch.device("cpu")
CASES = all_cases(CPU, quick=True)


@pytest.fixture(autouse=True)
def _memory_is_free_again() -> Iterator[None]:
    """Optimizers and their hooks refer to each other, and torch keeps what it compiled."""
    yield
    gc.collect()
    torch._dynamo.reset()


@pytest.mark.parametrize("case", CASES, ids=[case.label.replace(", ", "-").replace(" ", "-") for case in CASES])
def test_speed(benchmark: Any, case: Case) -> None:
    given = case.given()
    needed = case.bytes_an_element_alive * given.n
    if needed + SPARE_BYTES > free_bytes(CPU):
        pytest.skip(f"needs {needed / 2**30:.1f} GiB, which are not free")
    benchmark.group = case.op
    lineup = line_up(case.makers(given))
    providers = lineup.providers
    ours = providers[0]
    rounds: list[dict[str, Run]] = []
    one_round(providers)

    def prepare() -> None:
        rounds.append(one_round(providers, len(rounds)))
        ours.prepare()

    benchmark.pedantic(ours.run, setup=prepare, rounds=ROUNDS)
    memory = {provider.name: memory_of(provider) for provider in providers}
    about = (case.op, case.name, given.n, given.micro_batches)
    rows = make_rows(*about, providers, gathered(rounds), memory, environment())
    benchmark.extra_info.update({row.provider: {"ms": row.median_ms, "over ours": row.over_ours} for row in rows})
    benchmark.extra_info.update(environment())
    assert lineup.wrong == {}


def test_counts(benchmark: Any) -> None:
    benchmark.group = "counts"
    targets = benchmark.pedantic(counted, rounds=1)
    benchmark.extra_info.update({target.name: target.value for target in targets})
    assert [target.name for target in targets if not target.met] == []
