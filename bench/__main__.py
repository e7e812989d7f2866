"""``python -m bench``: every figure in one run, as a table and as files.

``timings.csv`` holds one row for each op and provider, ``figures.json`` each figure with its bound.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from .figures import OPS, Figure, counted
from .measure import Row, as_columns, environment, take_turns
from .shapes import THREADS

RESULTS = Path(__file__).parent / "results"


def timing_table(rows: Sequence[Row]) -> Table:
    """Each provider's times."""
    table = Table(title="Times (providers of an op took turns)")
    for name in ("op", "provider", "bytes/elem", "median ms", "p20 - p80 ms", "GB/s", "time / ours", "rounds"):
        table.add_column(name, justify="left" if name in ("op", "provider") else "right")
    last_op = ""
    for row in rows:
        if row.op != last_op and last_op:
            table.add_section()
        n_bytes = row.bytes_moved // row.n
        table.add_row(
            row.op if row.op != last_op else "",
            row.provider,
            str(n_bytes) if n_bytes else "-",
            f"{row.median_ms:.2f}",
            f"{row.p20_ms:.2f} - {row.p80_ms:.2f}",
            f"{row.gb_per_s:.1f}" if n_bytes else "-",
            f"{row.ratio:.2f}",
            f"{row.rounds}{' (disturbed)' if row.disturbed else ''}",
        )
        last_op = row.op
    return table


def figure_table(figures: Sequence[Figure]) -> Table:
    """Each figure against its bound."""
    table = Table(title="Figures")
    for name in ("figure", "value", "p20 - p80", "target", "met"):
        table.add_column(name, justify="left" if name in ("figure", "met") else "right")
    for figure in figures:
        spread = "-" if figure.low is None or figure.high is None else f"{figure.low:.2f} - {figure.high:.2f}"
        sign = ">=" if figure.at_least else "<="
        table.add_row(
            figure.name,
            f"{figure.value:.2f} {figure.unit}",
            spread,
            f"{sign} {figure.target:.2f}",
            "[green]yes[/]" if figure.met else "[red]no[/]",
        )
    return table


def write(folder: Path, rows: Sequence[Row], figures: Sequence[Figure]) -> None:
    """The rows and figures as files."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [as_columns(row) for row in rows]
    with (folder / "timings.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, records[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    report = {**environment(), "figures": [{**asdict(figure), "met": figure.met} for figure in figures]}
    (folder / "figures.json").write_text(json.dumps(report, indent=2) + "\n")


def _show(progress: Progress, task: TaskID, fraction: float) -> None:
    progress.update(task, completed=fraction)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for timings.csv and figures.json")
    parser.add_argument("--only", default="", help="only ops whose name contains this; writes no files")
    parser.add_argument("--budget", type=float, default=1.0, help="factor on the time given to each op")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    # A log has no width of its own; 80 columns would break the tables.
    console = Console() if Console().is_terminal else Console(width=120)
    ops = [op for op in OPS if arguments.only in op.name]
    rows: list[Row] = []
    figures: list[Figure] = []
    n_disturbed = 0
    start = time.perf_counter()
    columns = (TextColumn("{task.description:32}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for op in ops:
            task = progress.add_task(op.name, total=1.0)
            providers = op.make()
            show = partial(_show, progress, task)
            samples = take_turns(providers, op.budget_s * arguments.budget, show)
            op_rows, op_figures = op.results(providers, samples)
            rows += op_rows
            figures += op_figures
            n_disturbed += samples.n_disturbed
            del providers
        if not arguments.only:
            task = progress.add_task("counts", total=1.0)
            figures += counted()
            progress.update(task, completed=1.0)
    where = environment()
    console.print(f"{where['device']}; {where['versions']}; commit {where['commit']}; {where['date']}")
    console.print(timing_table(rows))
    console.print(figure_table(figures))
    n_met = sum(figure.met for figure in figures)
    console.print(f"{n_met} of {len(figures)} targets met, in {time.perf_counter() - start:.0f} s.")
    if n_disturbed:
        console.print(
            f"Other programs took the processor in {n_disturbed} rounds. Ops marked (disturbed) had too few quiet "
            "rounds: repeat them on an idle machine."
        )
    if not arguments.only:
        write(arguments.out, rows, figures)


if __name__ == "__main__":
    main()
