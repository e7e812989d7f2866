"""Timing of providers in turn.

A machine's memory bandwidth drifts between minutes, so two providers are only compared within one run, in which they
take turns: every round runs each of them once.
"""

from __future__ import annotations

import datetime
import gc
import os
import platform
import resource
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import fusedaccum.backends
from fusedaccum import __version__

MIN_ROUNDS = 5
OURS, PEER, PROBE = "ours", "peer", "probe"
"""Roles. Ours is the backend that ``auto`` chooses; another backend of ours is a peer of it."""
FP32, LESS = "fp32", "less"
"""What a result is exact to: fp32 arithmetic, or less (a 16-bit sum, an approximation)."""


def _nothing(*_: object) -> None:
    pass


def _no_tensors() -> Iterable[Tensor]:
    return ()


@dataclass
class Provider:
    """One way to do an op. Whoever makes one has checked its result.

    Attributes:
        run: what is timed.
        prepare: runs before each ``run``, untimed.
        bytes_an_element: that ``run`` has to move, as the loads and stores of its passes; 0 where it is all overhead.
        collect_garbage: leaves Python's garbage collector on during ``run``, as in a user's program.
        role: ``OURS``, ``PEER`` or ``PROBE``.
        precision: ``FP32`` or ``LESS``.
        held: the tensors it keeps between runs, besides parameters and gradients, which all providers have.
        repeats: times that one ``run`` does the op.
        compiled: ``torch.compile`` made it; what it calls cannot be counted.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = _nothing
    dtypes: str = "bf16 -> fp32"
    bytes_an_element: int = 0
    collect_garbage: bool = False
    role: str = PEER
    precision: str = FP32
    held: Callable[[], Iterable[Tensor]] = _no_tensors
    repeats: int = 1
    compiled: bool = False


@dataclass(frozen=True)
class Run:
    """One timed run. ``preempted``: other programs took the processor from it."""

    time_ms: float
    preempted: bool


def run_once(provider: Provider) -> Run:
    """One prepared run. ``time_ms`` is that of one of its repeats."""
    # What runs on a GPU is over when the GPU is done.
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else _nothing
    provider.prepare()
    if not provider.collect_garbage:
        gc.disable()
    try:
        wait()
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        start = time.perf_counter()
        provider.run()
        wait()
        time_ms = (time.perf_counter() - start) * 1e3
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches
    finally:
        gc.enable()
    # The kernel's own housekeeping takes a turn now and then; a busy neighbour takes one every few milliseconds.
    return Run(time_ms / provider.repeats, switches > 1 + time_ms / 20)


@dataclass(frozen=True)
class Samples:
    """Times of providers that took turns.

    Attributes:
        times_ms: provider name -> milliseconds of each round.
        n_disturbed: rounds in which some provider was preempted. Where enough others were left, they are not among
            ``times_ms``: a preempted thread makes the others wait at every barrier, which costs a provider of 148
            parallel regions ten times what it costs one of eight, and says nothing about either.
        disturbed: whether ``times_ms`` holds such rounds, for want of others.
    """

    times_ms: dict[str, list[float]]
    n_disturbed: int
    disturbed: bool

    def median_ms(self, name: str) -> float:
        """The median over the rounds."""
        return float(np.median(self.times_ms[name]))

    def ratio(self, slower: str, faster: str) -> tuple[float, float, float]:
        """Median of ``slower`` over median of ``faster``; p20 and p80 of the same within rounds."""
        within = np.array(self.times_ms[slower]) / np.array(self.times_ms[faster])
        low, high = np.percentile(within, [20, 80])
        return self.median_ms(slower) / self.median_ms(faster), float(low), float(high)


def one_round(providers: Sequence[Provider], shift: int = 0) -> dict[str, Run]:
    """Runs every provider once, beginning with the one at ``shift``. A preempted run is tried once more."""
    gc.collect()
    shift %= len(providers)
    runs = {}
    for provider in [*providers[shift:], *providers[:shift]]:
        run = run_once(provider)
        runs[provider.name] = run_once(provider) if run.preempted else run
    return runs


def gathered(rounds: Sequence[dict[str, Run]]) -> Samples:
    """The samples of all rounds, without the disturbed ones if at least ``MIN_ROUNDS`` others are left."""
    quiet = [runs for runs in rounds if not any(run.preempted for run in runs.values())]
    disturbed = len(quiet) < min(MIN_ROUNDS, len(rounds))
    kept = rounds if disturbed else quiet
    times_ms = {name: [runs[name].time_ms for runs in kept] for name in rounds[0]}
    return Samples(times_ms, len(rounds) - len(quiet), disturbed)


def take_turns(
    providers: Sequence[Provider],
    budget_s: float,
    progress: Callable[[float], object] = _nothing,
    min_rounds: int = MIN_ROUNDS,
) -> Samples:
    """Rounds until ``budget_s`` is spent, after one to warm up.

    Args:
        progress: called with the fraction of the budget that is spent.
        min_rounds: rounds that are made however long they take.
    """
    one_round(providers)
    rounds: list[dict[str, Run]] = []
    start = time.perf_counter()
    spent_s = 0.0
    while len(rounds) < min_rounds or spent_s < budget_s:
        rounds.append(one_round(providers, len(rounds)))
        spent_s = time.perf_counter() - start
        progress(min(1.0, spent_s / budget_s))
    return gathered(rounds)


def environment() -> dict[str, str]:
    """Hardware, versions, commit and date; nothing that names the machine."""
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_initialized() else ""
    return {
        "device": f"{gpu}{_cpu_model()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "versions": (
            f"fusedaccum {__version__} ({fusedaccum.backends.cpu_library().detail}), torch {torch.__version__}, "
            f"Python {platform.python_version()}"
        ),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    def git(*arguments: str) -> str:
        root = Path(__file__).parent
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "../csrc", "../fusedaccum", "*.py", "*.cpp")
        return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
