"""What is wanted of the rows on a CPU, and what is counted rather than timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .accuracy import AccuracyRow
from .counts import Counts
from .measure import OURS
from .providers import NAME
from .rows import Row, is_rival

# From here on a share of the ceiling says something about the kernel and not about the call.
LARGE_N = 2**20


@dataclass(frozen=True)
class Target:
    """A number, and the bound it is held against. ``of``: the case of the worst row."""

    name: str
    value: float
    bound: float
    at_least: bool
    unit: str = ""
    of: str = ""

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def _worst(
    name: str, rows: Sequence[Row], value: Callable[[Row], float | None], bound: float, at_least: bool
) -> list[Target]:
    known = [(value(row), row) for row in rows if value(row) is not None]
    if not known:
        return []
    pick = min if at_least else max
    number, row = pick(known, key=lambda pair: pair[0])
    return [Target(name, number, bound, at_least, "", f"{row.op}, {row.case}")]


def timed(rows: Sequence[Row]) -> list[Target]:
    """The worst row of each bound."""
    ours = [row for row in rows if row.role == OURS and row.n >= LARGE_N]
    adds = [row for row in ours if row.op.endswith(("accumulate", "first"))]
    ends = [row for row in ours if "boundary" in row.op]

    def share(row: Row) -> float | None:
        return row.share_of_ceiling

    best = {
        (row.op, row.case): min(
            (r.over_ours for r in rows if (r.op, r.case) == (row.op, row.case) and is_rival(r)), default=None
        )
        for row in rows
        if row.role == OURS
    }
    return [
        *_worst("accumulate, share of the ceiling from n = 2^20 up", adds, share, 0.9, True),
        *_worst("boundary, share of the ceiling from n = 2^20 up", ends, share, 0.85, True),
        *_worst(
            f"time of the fastest fp32 peer over that of {NAME}, any row",
            [row for row in rows if row.role == OURS],
            lambda row: best[(row.op, row.case)],
            0.95,
            True,
        ),
    ]


def accurate(rows: Sequence[AccuracyRow]) -> list[Target]:
    """The accumulator's error at the largest K."""
    largest = max((row.micro_batches for row in rows), default=0)
    return [
        Target(f"relative error of the accumulator at K = {largest}", row.relative_error, 1e-6, False)
        for row in rows
        if row.provider == NAME and row.micro_batches == largest
    ]


def counted() -> list[Target]:
    """What no clock decides, of GPT-2 124M in bfloat16 under the default bucket."""
    counts = Counts()
    mb = 2**20
    return [
        Target("op calls a micro-batch", counts.micro_batch_calls, counts.micro_batch_bound, False, "calls"),
        Target("op calls a boundary", counts.boundary_calls, 2, False, "calls"),
        # A hundredth for the padding that puts every parameter on a boundary of 64 elements.
        Target("accumulator a parameter", counts.acc_bytes_a_param, 4.01, False, "bytes"),
        Target(
            "gradients alive in a backward",
            counts.backward_peak_bytes / mb,
            counts.backward_bound_bytes / mb,
            False,
            "MiB",
        ),
        Target(
            "temporaries of a boundary", counts.boundary_peak_bytes / 1024, counts.partials_bytes / 1024, False, "KiB"
        ),
    ]
