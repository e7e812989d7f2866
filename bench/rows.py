"""The rows that a measurement comes to, and the files that hold them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from .measure import FP32, OURS, PEER, PROBE, Provider, Samples
from .memory import Memory

ROWS, REPORT = "rows.csv", "bench.json"


@dataclass(frozen=True)
class Row:
    """One provider's time for one op in one case, in the order of the columns of ``rows.csv``.

    Attributes:
        micro_batches: of a window; 1 elsewhere.
        bytes_moved: by the definition of the provider's passes, each load and store counted once; 0 where what is
            measured is host overhead.
        disturbed: see ``measure.Samples``.
        ceiling_gb_per_s: of the fastest probe of the op's least possible traffic in the same rounds.
        share_of_ceiling: ``gb_per_s`` over that.
        op_calls: calls through torch's dispatcher; None of what ``torch.compile`` made.
        held_bytes: what it keeps between runs besides parameters and gradients.
        peak_bytes: that and its temporaries at their highest.
        over_ours: its median over that of ours.
        over_best_peer: its median over that of the fastest peer (backends of ours are none) of fp32 precision, None
            without one.
    """

    op: str
    case: str
    provider: str
    role: str
    precision: str
    dtypes: str
    n: int
    micro_batches: int
    bytes_moved: int
    rounds: int
    disturbed: bool
    median_ms: float
    p20_ms: float
    p80_ms: float
    gb_per_s: float | None
    ceiling_gb_per_s: float | None
    share_of_ceiling: float | None
    op_calls: int | None
    held_bytes: int
    peak_bytes: int
    over_ours: float
    over_best_peer: float | None
    device: str
    versions: str
    commit: str
    date: str

    @property
    def bytes_an_element(self) -> float:
        """Bytes moved for each element."""
        return self.bytes_moved / self.n


def is_rival(provider: Provider | Row) -> bool:
    """Whether ours is held against it: somebody else's, and as exact."""
    name = provider.name if isinstance(provider, Provider) else provider.provider
    return provider.role == PEER and provider.precision == FP32 and not name.startswith("fusedaccum")


def make_rows(
    op: str,
    case: str,
    n: int,
    micro_batches: int,
    providers: Sequence[Provider],
    samples: Samples,
    memory: Mapping[str, Memory],
    where: Mapping[str, str],
) -> list[Row]:
    """The rows of one case."""
    medians = {provider.name: samples.median_ms(provider.name) for provider in providers}
    ours = next(medians[provider.name] for provider in providers if provider.role == OURS)
    best = min((medians[provider.name] for provider in providers if is_rival(provider)), default=None)
    speed = {p.name: p.bytes_an_element * n / medians[p.name] / 1e6 if p.bytes_an_element else None for p in providers}
    ceiling = max((speed[p.name] or 0 for p in providers if p.role == PROBE), default=0) or None
    result = []
    for provider in providers:
        times = samples.times_ms[provider.name]
        p20, median, p80 = (float(q) for q in np.percentile(times, [20, 50, 80]))
        own = speed[provider.name]
        used = memory[provider.name]
        result.append(
            Row(
                op=op,
                case=case,
                provider=provider.name,
                role=provider.role,
                precision=provider.precision,
                dtypes=provider.dtypes,
                n=n,
                micro_batches=micro_batches,
                bytes_moved=provider.bytes_an_element * n,
                rounds=len(times),
                disturbed=samples.disturbed,
                median_ms=median,
                p20_ms=p20,
                p80_ms=p80,
                gb_per_s=own,
                ceiling_gb_per_s=ceiling,
                share_of_ceiling=own / ceiling if own and ceiling else None,
                op_calls=used.op_calls,
                held_bytes=used.held_bytes,
                peak_bytes=used.held_bytes + used.temporary_bytes,
                over_ours=median / ours,
                over_best_peer=None if best is None else median / best,
                **where,
            )
        )
    return result


# Files ---------------------------------------------------------------------------------------------------------------


def as_columns(row: Any) -> dict[str, object]:
    """The row for a file: six digits are more than the clock is worth."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in asdict(row).items()}


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    """Rows of one dataclass, one line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(rows[0])], lineterminator="\n")
        writer.writeheader()
        writer.writerows(as_columns(row) for row in rows)


def read_csv(path: Path, kind: type) -> list[Any]:
    """What ``write_csv`` wrote, as objects of the dataclass ``kind``."""
    if not path.exists():
        raise FileNotFoundError(f"{path.name} is not in {path.parent.name}/: run `python -m bench` first")
    with path.open(newline="") as file:
        return [kind(**dict(_values(record, kind))) for record in csv.DictReader(file)]


def _values(record: Mapping[str, str], kind: type) -> Iterator[tuple[str, object]]:
    for field in fields(kind):
        text, wanted = record[field.name], str(field.type)
        if not text and "None" in wanted:
            yield field.name, None
        elif wanted.startswith("bool"):
            yield field.name, text == "True"
        elif wanted.startswith("int"):
            yield field.name, int(text)
        elif wanted.startswith("float"):
            yield field.name, float(text)
        else:
            yield field.name, text


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """As JSON that reads well in a diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
