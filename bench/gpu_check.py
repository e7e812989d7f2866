"""``python -m bench.gpu_check``: everything that needs a GPU, in one run of less than eight minutes.

Builds the package for the GPU at hand, runs ``doctor``, holds every op, the wrapper and a captured window against the
CPU bit by bit, lets a memory checker watch a small workload, and times accumulate and boundary against torch's ways.
Writes one JSON file and prints a short table. ``--dry-run`` does all but build, launch and time, on the CPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fusedaccum import backends

if TYPE_CHECKING:
    from .gpu_timing import Row

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
TOTAL_S = 470.0
# Nothing new is timed after this; what has begun may compile for a while yet.
TIMING_STARTS_S = 360.0
OP_TESTS = (
    "test_op_accumulate",
    "test_op_micro",
    "test_op_finalize",
    "test_op_window",
    "test_op_step",
    "test_op_refusals",
    "test_isa",
    "test_cuda_graph",
)


@dataclass(frozen=True)
class Stage:
    """One stage of the run.

    Attributes:
        outcome: "ok", "failed", or "not run" where something that it needs is not there; ``detail`` says what.
    """

    name: str
    outcome: str
    detail: str
    time_s: float


class Run:
    """Collects stages, and keeps the time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start = time.perf_counter()
        self.stages: list[Stage] = []
        self.rows: list[Row] = []
        self.left_out: list[str] = []

    @property
    def left_s(self) -> float:
        """Seconds until the run must be over."""
        return TOTAL_S - (time.perf_counter() - self.start)

    def add(self, name: str, outcome: str, detail: str, since: float) -> None:
        """Notes a stage that began at ``since``, and prints it."""
        self.stages.append(Stage(name, outcome, detail, time.perf_counter() - since))
        last = detail.strip().splitlines()[-1] if detail.strip() else ""
        print(f"{name:<40} {outcome:<8} {self.stages[-1].time_s:6.1f} s  {last[:110]}", flush=True)

    def command(
        self, name: str, words: Sequence[str], limit_s: float, wanted: str = "", blame: str = "", **environment: str
    ) -> bool:
        """A stage that is a command: good if it exits with 0 before ``limit_s`` and ``wanted`` is in its output.

        Args:
            blame: what must be in the output for anything else to be a failure of ours; by default all is.
        """
        since = time.perf_counter()
        limit_s = max(1.0, min(limit_s, self.left_s))
        try:
            done = subprocess.run(
                words, cwd=ROOT, env={**os.environ, **environment}, timeout=limit_s, text=True, check=False,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            said = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
            bad = "failed" if re.search(blame, said) else "not run"
            self.add(name, bad, f"{said[-2000:]}\nnot done after {limit_s:.0f} s", since)
            return False
        except OSError as error:
            self.add(name, "not run" if blame else "failed", str(error), since)
            return False
        good = done.returncode == 0 and re.search(wanted, done.stdout) is not None
        bad = "failed" if re.search(blame, done.stdout) else "not run"
        self.add(name, "ok" if good else bad, done.stdout[-4000:], since)
        return good

    @property
    def failed(self) -> bool:
        """Whether anything that ran came out wrong."""
        return any(stage.outcome == "failed" for stage in self.stages)


def build_commands(device: torch.device) -> list[tuple[str, list[str], dict[str, str]]]:
    """How to build for ``device``: an editable install, or the same build beside the sources where pip refuses."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    environment = {"FUSEDACCUM_CUDA": "1", "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}+PTX"}
    install = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--editable", "."]
    in_place = [sys.executable, "setup.py", "build_ext", "--inplace"]
    return [("build (pip)", install, environment), ("build (setup.py)", in_place, environment)]


def sanitizer_commands(device: torch.device) -> list[tuple[str, list[str]]]:
    """The memory checker's two tools over the small workload; empty where it is not installed."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    folders = [Path(home) / "bin"] if home else []
    folders += [Path(nvcc).resolve().parent] if nvcc else []
    found = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(map(str, [*folders, "/usr/local/cuda/bin"]))
    )
    if found is None:
        return []
    workload = [sys.executable, "-m", "bench.gpu_parity", str(device)]
    return [
        (f"compute-sanitizer {tool}", [found, "--tool", tool, "--error-exitcode", "9", *workload])
        for tool in ("memcheck", "racecheck")
    ]


def check(run: Run, dry: bool) -> None:
    """All stages but the timing."""
    if not dry:
        attempts = build_commands(run.device)
        name, words, environment = attempts[0]
        if not run.command(name, words, 180, **environment):
            name, words, environment = attempts[1]
            if not run.command(name, words, 180, **environment):
                return
            run.stages = [stage for stage in run.stages if stage.name != attempts[0][0]]  # the other way worked
    wanted = "" if dry else r"cuda self-test ok"
    run.command("doctor", [sys.executable, "-m", "fusedaccum", "doctor"], 60, wanted)
    from . import gpu_parity

    def report(one: gpu_parity.Check) -> None:
        since = time.perf_counter() - one.time_s
        run.add(f"parity: {one.name}", "ok" if one.problem is None else "failed", one.problem or "", since)

    gpu_parity.run(run.device, 3 if dry else 1000, report)
    missing = "dry run" if dry else backends.why_not("triton", run.device)
    if missing is not None:
        run.add("parity, triton", "not run", missing, time.perf_counter())
    else:

        def report_triton(one: gpu_parity.Check) -> None:
            since = time.perf_counter() - one.time_s
            run.add(f"parity, triton: {one.name}", "ok" if one.problem is None else "failed", one.problem or "", since)

        with gpu_parity.gpu_backend("triton"):  # the first launches compile
            gpu_parity.run(run.device, 300, report_triton)
    since = time.perf_counter()
    if dry:
        run.add("op tests, compute-sanitizer", "not run", "dry run", since)
        return
    if importlib.util.find_spec("pytest") is None:
        run.add("op tests", "not run", "pytest is not installed", since)
    else:
        tests = [f"tests/{name}.py" for name in OP_TESTS]
        # On the machine's GPU: at least one test must have run.
        options = ["-q", "-k", "(cuda or triton) and not interpreted", "-p", "no:cacheprovider"]
        run.command("op tests", [sys.executable, "-m", "pytest", *options, *tests], 150, r"\d+ passed")
        agree = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_backends_agree.py"]
        run.command("backends agree", agree, 75, r"\d+ passed")
    commands = sanitizer_commands(run.device)
    if not commands:
        run.add("compute-sanitizer", "not run", "compute-sanitizer is not installed", time.perf_counter())
    for name, words in commands:
        # The tool may not work here, or be too slow; only what it found counts.
        run.command(name, words, 75, r"(?m)^ok$", blame=r"SUMMARY: [1-9]")


def measure(run: Run, dry: bool) -> None:
    """The timing, with what is left of the time."""
    from . import gpu_timing

    since = time.perf_counter()
    chosen = gpu_timing.cases()
    if dry:
        chosen = [gpu_timing.Case("tiny model", [(33, 5), (64,)]), gpu_timing.Case("2^10", [(2**10,)])]
    deadline = run.start + TIMING_STARTS_S
    run.rows, run.left_out = gpu_timing.run(run.device, chosen, deadline, lambda rows: None)
    wrong = [text for text in run.left_out if "no time was left" not in text and "not enough memory" not in text]
    outcome = "failed" if wrong else "not run" if dry else "ok"
    detail = "; ".join(run.left_out) or ("dry run: everything but the clock" if dry else f"{len(run.rows)} rows")
    run.add("timing", outcome, detail, since)


def device_name(device: torch.device) -> str:
    """The product's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "none (dry run on the CPU)"


def report_of(run: Run, dry: bool) -> dict[str, Any]:
    """What goes into the file: hardware and versions, nothing that names the machine."""
    from .measure import environment

    where = environment()
    return {
        "dry_run": dry,
        "gpu": device_name(run.device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": where["versions"].rpartition("Python ")[2],
        "commit": where["commit"],
        "date": where["date"],
        "time_s": round(time.perf_counter() - run.start, 1),
        "stages": [asdict(stage) for stage in run.stages],
        "rows": [asdict(row) for row in run.rows],
        "left_out": run.left_out,
    }


def table_of(rows: Sequence[Row]) -> str:
    """The times, as text."""
    lines = [f"{'op':<11}{'case':<12}{'provider':<13}{'B/elem':>7}{'median ms':>11}{'GB/s':>9}{'of copy':>9}"]
    for row in rows:
        median = "-" if row.median_ms is None else f"{row.median_ms:.4f}"
        speed = "-" if row.gb_per_s is None else f"{row.gb_per_s:.0f}"
        share = "-" if row.share_of_copy is None else f"{row.share_of_copy:.0%}"
        n_bytes = str(row.bytes_moved // row.n) if row.bytes_moved else "-"
        lines.append(f"{row.op:<11}{row.case:<12}{row.provider:<13}{n_bytes:>7}{median:>11}{speed:>9}{share:>9}")
    return "\n".join(lines)


def write(folder: Path, report: dict[str, Any]) -> Path:
    """Writes the report, and returns where."""
    name = re.sub(r"[^a-z0-9]+", "-", report["gpu"].lower()).strip("-")
    date = report["date"] or datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu-{name}-{date}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    return path


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 1 if anything that ran came out wrong, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU: all but the build, the launches and clock")
    parser.add_argument("--out", type=Path, help="folder for the report; a temporary one for a dry run")
    options = parser.parse_args(arguments)
    dry: bool = options.dry_run
    if not dry and not torch.cuda.is_available():
        print("torch sees no GPU here; --dry-run checks this script without one", file=sys.stderr)
        return 2
    if dry:
        torch.set_num_threads(1)  # many small ops, whose threads would mostly wait for each other
    run = Run(torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device()))
    print(f"GPU: {device_name(run.device)}; torch {torch.__version__}, CUDA {torch.version.cuda}")
    check(run, dry)
    built = all(stage.outcome != "failed" for stage in run.stages if stage.name.startswith(("build", "doctor")))
    if built:
        measure(run, dry)
    report = report_of(run, dry)
    path = write(options.out or (Path(tempfile.mkdtemp()) if dry else RESULTS), report)
    print(table_of(run.rows))
    print(f"{'dry run, nothing ran on a GPU; ' if dry else ''}report: {path}")
    failures = [stage.name for stage in run.stages if stage.outcome == "failed"]
    print(f"FAILED: {', '.join(failures)}" if failures else "nothing failed")
    return int(run.failed)


if __name__ == "__main__":
    sys.exit(main())
