"""Starts the ranks of a group as processes of their own, and reports what became of each check."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
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


def run_ranks(commands: Sequence[Sequence[str]], folder: Path, timeout_s: float) -> None:
    """Runs one script for each list of arguments, all at once, and asserts that all end well."""
    _run_all([[sys.executable, *command] for command in commands], folder, timeout_s)


def run_torchruns(agents: Sequence[Sequence[str]], folder: Path, timeout_s: float, cwd: Path = HERE) -> None:
    """Runs one torchrun for each list of arguments, all at once, and asserts that all end well."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    _run_all([[*torchrun, *arguments] for arguments in agents], folder, timeout_s, cwd)


def _run_all(commands: Sequence[Sequence[str]], folder: Path, timeout_s: float, cwd: Path = HERE) -> None:
    # Files, as a pipe is not closed before the last rank of an agent has ended.
    paths = [folder / f"process-{i}.log" for i in range(len(commands))]
    started: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + timeout_s
    try:
        for command, path in zip(commands, paths, strict=True):
            with open(path, "w") as log:
                started.append(subprocess.Popen(command, env=environment(), stdout=log, stderr=log, cwd=cwd))
        codes: list[Any] = [process.wait(max(0.0, deadline - time.monotonic())) for process in started]
    except subprocess.TimeoutExpired:
        codes = [f"not over after {timeout_s} s"]
    finally:
        for process in started:
            _kill_with_children(process)
    assert not any(codes), f"{codes}\n" + "\n".join(path.read_text()[-4000:] for path in paths)


def _kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """An agent, and its ranks, which torchrun gives sessions of their own: by their parent."""
    if process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        ranks = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        for pid in (process.pid, *ranks):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
