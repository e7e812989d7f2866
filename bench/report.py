"""``python -m bench report``: pictures and a table, made of the files of a measurement and of nothing else."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

from . import accuracy, plots, tables, timeline
from .rows import REPORT, ROWS, Row, read_csv

TABLE = "table.md"
# Written by `python -m bench.demo --out`.
DEMO = "demo.csv"


def demo_lines(path: Path) -> list[str]:
    """The demo's rows as a markdown table, whatever its columns are; none without the file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        records = list(csv.DictReader(file))
    if not records:
        return []
    columns = [name for name in records[0] if name not in ("device", "versions", "commit", "date")]
    lines = ["**whole training steps on real data (`python -m bench.demo`)**", ""]
    lines += ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += ["| " + " | ".join(record[name] for name in columns) + " |" for record in records]
    return [*lines, ""]


def report(folder: Path, say: Callable[[str], object]) -> list[Path]:
    """Draws into ``folder`` from its files. Returns what it wrote.

    Raises:
        FileNotFoundError: there are no rows.
    """
    rows: list[Row] = read_csv(folder / ROWS, Row)
    written = []
    for name, draw in plots.PICTURES.items():
        draw(rows, folder / name)
        written.append(folder / name)
    errors: list[accuracy.AccuracyRow] = []
    if (folder / accuracy.FILE).exists():
        errors = read_csv(folder / accuracy.FILE, accuracy.AccuracyRow)
        plots.accuracy(errors, folder / "accuracy.png")
        written.append(folder / "accuracy.png")
    if (folder / timeline.FILE).exists():
        plots.memory(read_csv(folder / timeline.FILE, timeline.Point), folder / "memory.png")
        written.append(folder / "memory.png")
    absent = {}
    if (folder / REPORT).exists():
        absent = json.loads((folder / REPORT).read_text())["absent"]
    text = tables.markdown(rows, errors, absent, demo_lines(folder / DEMO))
    (folder / TABLE).write_text(text)
    written.append(folder / TABLE)
    for path in written:
        say(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
    return written
