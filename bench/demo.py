"""``python -m bench.demo``: two models, each trained in three ways from the same weights on the same data.

The ways: one large batch (bf16 model, fp32 masters and states, torch's AdamW and clip), naive accumulation of four
micro-batches (bf16 gradients added by autograd, AdamW on bf16 parameters), and FusedAccumOptimizer.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .demo_tasks import MICRO_BATCHES, Task, tasks
from .demo_worker import WAYS, End, Exact, Step, Trainer, work
from .measure import environment
from .rows import write_csv

LARGE, NAIVE, OURS = WAYS


@dataclass
class Result:
    """What one way came to.

    Attributes:
        error: distance of the weights after the first window from fp64's, over the norm of the weights.
        update_error: the same over the length of fp64's update.
        useful_steps: the gradient noise scale in micro-batches, where it is known.
    """

    steps: list[Step] = field(default_factory=list)
    held_out_loss: float = 0.0
    peak_mb: float = 0.0
    error: float = 0.0
    update_error: float = 0.0
    useful_steps: float | None = None

    @property
    def train_loss(self) -> float:
        """Mean of the last four windows, which are the same for all ways."""
        return statistics.fmean(step.train_loss for step in self.steps[-4:])

    @property
    def step_ms(self) -> float:
        """Median, without the first, which allocates."""
        return statistics.median(step.time_ms for step in self.steps[1:])


class Worker:
    """A process that trains in one way."""

    def __init__(self, task: Task, quick: bool, way: str, weights_file: Path) -> None:
        # Threads that spin at a barrier take the processor from the one they wait for, where other programs run too.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # Spawned: a forked process would count the parent's memory as its own.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=work, args=(theirs, task.name, quick, way, str(weights_file)), daemon=True
        )
        self._process.start()
        theirs.close()  # so that the death of the process is seen as the end of the pipe
        self._weights_file = weights_file

    def ask(self, question: str) -> Any:
        """Sends a word and waits for the answer."""
        self._connection.send(question)
        try:
            return self._connection.recv()
        except EOFError:
            raise RuntimeError("a training process died; its error is above") from None

    def end(self) -> End:
        """Ends the process."""
        answer: End = self.ask("end")
        self._process.join()
        return answer

    def weights_after_first_window(self) -> torch.Tensor:
        """Flat, in fp64."""
        return _flat(torch.load(self._weights_file, weights_only=True))


def _flat(weights: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([weight.double().reshape(-1) for weight in weights])


def train(task: Task, quick: bool, progress: Progress) -> dict[str, Result]:
    """Trains in all ways, one step of each in turn, so that a machine that slows down does so for all."""
    bars = {way: progress.add_task(f"{task.name}: {way}", total=task.n_steps) for way in WAYS}
    results = {way: Result() for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        workers = {way: Worker(task, quick, way, Path(folder) / f"{i}.pt") for i, way in enumerate(WAYS)}
        exact = Trainer(task, Exact, task.load()[0])
        exact.step()
        start, target = _flat(exact.before), _flat(exact.way.weights())
        del exact
        for _ in range(task.n_steps):
            for way, worker in workers.items():
                results[way].steps.append(worker.ask("step"))
                progress.advance(bars[way])
        for way, worker in workers.items():
            result, end = results[way], worker.end()
            result.held_out_loss, result.peak_mb = end.held_out_loss, end.peak_bytes / 1e6
            result.useful_steps = end.useful_steps
            distance = float((worker.weights_after_first_window() - target).norm())
            result.error = distance / float(target.norm())
            result.update_error = distance / float((target - start).norm())
    return results


def result_table(task: Task, results: dict[str, Result]) -> Table:
    """One row for each way."""
    title = f"{task.name}: {task.n_steps} windows of {task.batch} {task.unit}, bf16"
    table = Table(title=title)
    columns = ("way", "micro-batches", "train loss", "held-out", "off fp64", "of update", "ms/step", "peak MB")
    for name in columns:
        table.add_column(name, justify="left" if name == "way" else "right")
    for way, result in results.items():
        table.add_row(
            way,
            str(WAYS[way].n_micro_batches),
            f"{result.train_loss:.4f}",
            f"{result.held_out_loss:.4f}",
            f"{result.error:.2e}",
            f"{result.update_error:.1%}",
            f"{result.step_ms:.0f}",
            f"{result.peak_mb:.0f}",
        )
    return table


def _against(value: float, other: float) -> str:
    difference = round(value - other, 4)
    if difference == 0:
        return "the same as"
    return f"{abs(difference):.4f} {'worse' if difference > 0 else 'better'} than"


def meaning(task: Task, results: dict[str, Result]) -> str:
    """One line, made of the numbers."""
    large, naive, ours = results[LARGE], results[NAIVE], results[OURS]
    return (
        f"{task.name}: held-out, {OURS} is {_against(ours.held_out_loss, large.held_out_loss)} the large batch, in "
        f"{ours.peak_mb / large.peak_mb:.0%} of its memory and {ours.step_ms / large.step_ms:.0%} of its time; naive "
        f"accumulation is {_against(naive.held_out_loss, ours.held_out_loss)} {OURS}, in "
        f"{naive.peak_mb / large.peak_mb:.0%} and {naive.step_ms / large.step_ms:.0%}, and its first update is "
        f"{naive.error / ours.error:.1f} times as far from fp64."
    )


def noise(task: Task, results: dict[str, Result]) -> str:
    """What the gradient noise scale says of the batch."""
    steps = results[OURS].useful_steps
    assert steps is not None
    steps = max(steps, 0.0)  # an estimate: over few windows it may come out below 0
    size = task.batch // MICRO_BATCHES
    advice = "more would still pay" if steps > MICRO_BATCHES else "this much buys little"
    return (
        f"{task.name}: the gradient noise scale is {steps:.1f} micro-batches ({steps * size:.0f} {task.unit}); the "
        f"window has {MICRO_BATCHES}. Accumulating {advice}."
    )


NOTES = (
    f"{LARGE}: bf16 model, fp32 masters and states, torch's clip and AdamW. {NAIVE}: bf16 gradients of {MICRO_BATCHES} "
    "micro-batches summed by autograd, clip, AdamW on bf16 parameters. Train loss: last 4 windows. Off fp64: distance "
    "of the weights (masters where there are) after the first window from an fp64 run of it, over their norm; of "
    "update: over the length of that update. ms/step: median, the ways took turns. Peak MB: peak resident memory of a "
    "process of its own, above what it used before it made the model."
)


@dataclass(frozen=True)
class DemoRow:
    """One way's result, for the file: losses are means in nats, ``off_fp64`` as in the table."""

    task: str
    way: str
    micro_batches: int
    train_loss: float
    held_out_loss: float
    off_fp64: float
    ms_a_step: float
    peak_mb: float
    device: str
    versions: str
    commit: str
    date: str


def rows(all_results: dict[Task, dict[str, Result]]) -> list[DemoRow]:
    """What ``python -m bench report`` makes a table of."""
    where = environment()
    return [
        DemoRow(
            f"{task.name}, {task.n_steps} windows of {task.batch} {task.unit}",
            way,
            WAYS[way].n_micro_batches,
            result.train_loss,
            result.held_out_loss,
            result.error,
            result.step_ms,
            result.peak_mb,
            **where,
        )
        for task, results in all_results.items()
        for way, result in results.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="four windows of each: shows only that everything runs")
    parser.add_argument("--out", type=Path, help="folder to write demo.csv to; none by default")
    arguments = parser.parse_args()
    quick = arguments.quick
    # A log has no width of its own; 80 columns would break the tables.
    console = Console() if Console().is_terminal else Console(width=110)
    start = time.perf_counter()
    all_results: dict[Task, dict[str, Result]] = {}
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for task in tasks(quick):
            all_results[task] = train(task, quick, progress)
    for task, results in all_results.items():
        console.print(result_table(task, results))
    console.print(NOTES)
    for task, results in all_results.items():
        console.print(meaning(task, results), style="bold")
        console.print(noise(task, results))
    if arguments.out is not None:
        write_csv(arguments.out / "demo.csv", rows(all_results))
    console.print(f"Done in {time.perf_counter() - start:.0f} s.")


if __name__ == "__main__":
    main()
