"""Starts the ranks of a group as processes of their own, and reports what became of each check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from worker import checks_for

HERE = Path(__file__).parent
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}


def sizes(*n_ranks: int) -> Callable[[Any], Any]:
    """How many ranks a check runs on; 2 without it."""

    def mark(check: Any) -> Any:
        check.sizes = n_ranks
        return check

    return mark


def cases(modules: str, n_ranks: Sequence[int]) -> list[Any]:
    """Parameters of a test for each check of the modules (names, with commas) and each size of the group."""
    return [pytest.param(modules, n, name, id=f"{name}-{n}") for n in n_ranks for name in checks_for(modules, n)]


def environment() -> dict[str, str]:
    """For processes that are ranks."""
    return {**os.environ, **ENVIRONMENT}


def run_checks(modules: str, n_ranks: int, folder: Path, timeout_s: float = 150) -> dict[str, str]:
    """Runs all checks of the modules in one group.

    Returns:
        For each check "", or what went wrong on which rank.
    """
    command = [sys.executable, str(HERE / "worker.py"), modules, str(n_ranks)]
    logs = [open(folder / f"{rank}.log", "w") for rank in range(n_ranks)]  # noqa: SIM115
    ranks = [
        subprocess.Popen([*command, str(rank), str(folder)], env=environment(), stdout=log, stderr=log, cwd=HERE)
        for rank, log in enumerate(logs)
    ]
    try:
        for process in ranks:
            process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    outcome = dict.fromkeys(checks_for(modules, n_ranks), "")
    for rank in range(n_ranks):
        report = folder / f"{rank}.json"
        errors = json.loads(report.read_text()) if report.exists() else {}
        for name in outcome:
            error = errors.get(name, "did not run: " + (folder / f"{rank}.log").read_text()[-2000:])
            if error:
                outcome[name] += f"rank {rank} of {n_ranks}: {error}\n"
    return outcome
