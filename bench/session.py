"""Measures cases: builds the providers, takes times and memory, makes rows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .cases import Case, line_up
from .measure import MIN_ROUNDS, take_turns
from .memory import memory_of
from .rows import Row, make_rows

# Left to other programs.
SPARE_BYTES = 2**30


@dataclass
class Session:
    """What a run has come to so far.

    Attributes:
        absent: provider or case -> why it did not take part.
        wrong: what the checks found; its providers have no rows.
        n_disturbed: rounds in which another program took the processor.
    """

    where: Mapping[str, str]
    budget: float = 1.0
    min_rounds: int = MIN_ROUNDS
    rows: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    n_disturbed: int = 0

    def measure(self, case: Case, progress: Callable[[float], object]) -> None:
        """Adds the rows of a case, or why there are none."""
        given = case.given()
        needed = case.bytes_an_element_alive * given.n
        if needed + SPARE_BYTES > free_bytes(given.device):
            self.absent[case.label] = f"needs {needed / 2**30:.1f} GiB, which are not free"
            return
        lineup = line_up(case.makers(given))
        # A provider that is absent from one case may take part in another.
        self.absent.update({name: why for name, why in lineup.absent.items() if name not in self._present()})
        self.wrong += [f"{case.label}: {what}" for what in lineup.wrong.values()]
        providers = lineup.providers
        memory = {provider.name: memory_of(provider) for provider in providers}
        samples = take_turns(providers, case.budget_s * self.budget, progress, self.min_rounds)
        self.n_disturbed += samples.n_disturbed
        about = (case.op, case.name, given.n, given.micro_batches)
        self.rows += make_rows(*about, providers, samples, memory, self.where)
        for name in self._present():
            self.absent.pop(name, None)
        del lineup, providers, given
        # Optimizers and their hooks refer to each other.
        gc.collect()
        torch._dynamo.reset()

    def _present(self) -> set[str]:
        return {row.provider for row in self.rows}


def free_bytes(device: torch.device) -> int:
    """Memory that a measurement may use."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 2**63
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def measure_all(session: Session, cases: Sequence[Case], start: Callable[[str], Callable[[float], object]]) -> None:
    """All cases in turn. ``start``: is told the case that begins, and returns what is told its progress."""
    for case in cases:
        session.measure(case, start(case.label))
