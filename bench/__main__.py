"""``python -m bench``: every op in every case, by every provider; a table, and files that ``report`` draws from.

``rows.csv`` holds a row for each op, case and provider, ``bench.json`` the same with who did not take part and the
bounds, ``accuracy.csv`` the errors as K grows, ``memory.csv`` the bytes held over one window.
``python -m bench report`` makes pictures and ``table.md`` of these.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import accuracy, tables, targets, timeline
from .cases import all_cases
from .measure import MIN_ROUNDS, environment
from .providers import Given
from .rows import REPORT, ROWS, as_columns, write_csv, write_json
from .session import Session, measure_all
from .shapes import THREADS, gpt2_124m, resnet50

RESULTS = Path(__file__).parent / "results"
# Of a quick run: what is measured takes less than the rest of it, building, checking and compiling.
QUICK_BUDGET = 0.15
QUICK_ROUNDS = 3


def console() -> Console:
    """A log has no width of its own; 80 columns would break the tables."""
    return Console() if Console().is_terminal else Console(width=140)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("what", nargs="?", default="measure", choices=("measure", "report"))
    parser.add_argument("--quick", action="store_true", help="fewer cases and less time; under 3 minutes")
    parser.add_argument("--out", type=Path, help="folder of the files; bench/results, or for a quick run none")
    parser.add_argument("--only", default="", help="only cases whose op or name contains this; writes files to --out")
    parser.add_argument("--budget", type=float, default=1.0, help="factor on the time given to each case")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    return parser


def main(words: list[str] | None = None) -> int:
    """The command line; returns the exit code: 1 if a result was wrong."""
    arguments = _parser().parse_args(words)
    screen = console()
    if arguments.what == "report":
        from .report import report  # matplotlib is needed for nothing else

        report(arguments.out or RESULTS, screen.print)
        return 0
    torch.set_num_threads(THREADS)
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.init()
    begin = time.perf_counter()
    cases = [case for case in all_cases(device, arguments.quick) if arguments.only in case.label]
    quick = arguments.quick
    budget, min_rounds = (QUICK_BUDGET, QUICK_ROUNDS) if quick else (1.0, MIN_ROUNDS)
    session = Session(environment(), arguments.budget * budget, min_rounds)
    errors: list[accuracy.AccuracyRow] = []
    points: list[timeline.Point] = []
    wanted: list[targets.Target] = []
    columns = (TextColumn("{task.description:48}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen) as progress:
        bar = progress.add_task("", total=len(cases) + 3 * (not arguments.only))
        done = 0

        def start(label: str) -> Callable[[float], object]:
            nonlocal done
            done += 1
            progress.update(bar, description=label, completed=done - 1)
            return lambda fraction: None

        measure_all(session, cases, start)
        if not arguments.only:
            errors, absent = accuracy.measure(session.where, start("accuracy"))
            session.absent.update({f"{name} (accuracy)": why for name, why in absent.items()})
            model = Given(resnet50() if quick else gpt2_124m())
            points = timeline.measure(session.where, start("memory over a window"), model)
            start("counts")
            wanted = targets.counted()
        progress.update(bar, completed=done)
    wanted = [*targets.timed(session.rows), *targets.accurate(errors), *wanted]
    _show(screen, session, wanted, errors, time.perf_counter() - begin)
    # A quick or partial run must not overwrite what the README shows.
    out = arguments.out or (None if arguments.quick or arguments.only else RESULTS)
    if out is not None:
        _write(out, session, wanted, errors, points)
    return int(bool(session.wrong))


def _show(
    screen: Console,
    session: Session,
    wanted: list[targets.Target],
    errors: list[accuracy.AccuracyRow],
    spent_s: float,
) -> None:
    where = session.where
    swept = [row for row in session.rows if row.op.startswith("sweep")]
    screen.print(tables.timing_table([row for row in session.rows if row not in swept]))
    screen.print("* not as exact as fp32. Over ours: below 1 we lose.")
    if swept:
        screen.print(tables.sweep_table(swept))
    if errors:
        screen.print(tables.accuracy_table(errors))
    screen.print(tables.target_table(wanted))
    for name, reason in session.absent.items():
        screen.print(f"absent: {name}: {reason}", markup=False)
    for what in session.wrong:
        screen.print(f"WRONG RESULT: {what}", markup=False)
    if session.n_disturbed:
        screen.print(
            f"Other programs took the processor in {session.n_disturbed} rounds. Cases marked (disturbed) had too few "
            "quiet rounds: repeat them on an idle machine."
        )
    screen.print(f"{where['device']}; {where['versions']}; commit {where['commit']}; {where['date']}; {spent_s:.0f} s")


def _write(
    out: Path,
    session: Session,
    wanted: list[targets.Target],
    errors: list[accuracy.AccuracyRow],
    points: list[timeline.Point],
) -> None:
    write_csv(out / ROWS, session.rows)
    if errors:
        write_csv(out / accuracy.FILE, errors)
    if points:
        write_csv(out / timeline.FILE, points)
    content = {
        **session.where,
        "disturbed_rounds": session.n_disturbed,
        "absent": session.absent,
        "wrong": session.wrong,
        "targets": [{**as_columns(target), "met": target.met} for target in wanted],
        "rows": [as_columns(row) for row in session.rows],
    }
    write_json(out / REPORT, content)


if __name__ == "__main__":
    sys.exit(main())
