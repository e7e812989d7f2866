"""The figures as pytest-benchmark entries: ``pytest bench --benchmark-only``.

Each entry times our provider; between its rounds all providers of the op take turns, and what came of the comparison
is in the entry's ``extra_info``. Results are checked and counts asserted; times are reported and never fail.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from .figures import OPS, Figure, Op, counted
from .measure import Run, environment, gathered, one_round

ROUNDS = 10


def _report(benchmark: Any, figures: list[Figure]) -> None:
    benchmark.extra_info.update({figure.name: {**asdict(figure), "met": figure.met} for figure in figures})
    benchmark.extra_info.update(environment())


@pytest.mark.parametrize("op", OPS, ids=[op.name.replace(" ", "-") for op in OPS])
def test_speed(benchmark: Any, op: Op) -> None:
    benchmark.group = op.name
    providers = op.make()
    ours = providers[0]
    rounds: list[dict[str, Run]] = []
    one_round(providers)

    def prepare() -> None:
        rounds.append(one_round(providers, len(rounds)))
        ours.prepare()

    benchmark.pedantic(ours.run, setup=prepare, rounds=ROUNDS)
    _, figures = op.results(providers, gathered(rounds))
    _report(benchmark, figures)


def test_counts(benchmark: Any) -> None:
    benchmark.group = "counts"
    figures = benchmark.pedantic(counted, rounds=1)
    _report(benchmark, figures)
    assert [figure.name for figure in figures if not figure.met] == []
