"""bench/gpu_check.py with no GPU: that it would run, that it reports what is wrong, and that it claims no more."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import Buffers, accumulate, assert_same_buffers

from bench import gpu_check, gpu_parity, gpu_timing
from bench.on_device import on_device
from fusedaccum.backends import Backend

pytestmark = pytest.mark.usefixtures("one_thread", "native")
CPU = torch.device("cpu")


class TestDryRun:
    def test_goes_through_every_stage_and_times_nothing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert gpu_check.main(["--dry-run", "--out", str(tmp_path)]) == 0
        (path,) = tmp_path.iterdir()
        assert re.fullmatch(r"gpu-none-dry-run-on-the-cpu-\d{4}-\d\d-\d\d\.json", path.name)
        report = json.loads(path.read_text())
        assert report["dry_run"] is True
        outcomes = {stage["name"]: stage["outcome"] for stage in report["stages"]}
        ran = ["doctor", *(f"parity: {name}" for name in gpu_parity.CHECKS)]
        assert outcomes == dict.fromkeys(ran, "ok") | {
            "parity, triton": "not run",
            "op tests, compute-sanitizer": "not run",
            "timing": "not run",
        }
        providers = {(row["op"], row["case"]): set() for row in report["rows"]}
        for row in report["rows"]:
            providers[row["op"], row["case"]].add(row["provider"])
            assert row["rounds"] == 0
            assert [row[name] for name in ("median_ms", "p20_ms", "p80_ms", "gb_per_s", "share_of_copy")] == [None] * 5
        assert providers["accumulate", "2^10"] == {"fusedaccum", "fusedaccum, statistics", "naive", "foreach", "copy"}
        assert providers["boundary", "2^10"] == {"fusedaccum", "naive", "foreach", "fused", "copy"}
        assert report["left_out"] == []
        said = capsys.readouterr().out
        assert "dry run, nothing ran on a GPU" in said
        assert not re.search(r"\d GB/s|\d%", said)

    def test_names_what_failed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def broken(device: torch.device, scale: int) -> str | None:
            raise RuntimeError("no kernel image")

        checks = {"one": lambda device, scale: "[3] is 1.0, not 2.0", "two": broken, "three": lambda *_: None}
        monkeypatch.setattr(gpu_parity, "CHECKS", checks)
        monkeypatch.setattr(gpu_check, "measure", lambda run, dry: None)
        assert gpu_check.main(["--dry-run", "--out", str(tmp_path)]) == 1
        (path,) = tmp_path.iterdir()
        stages = {stage["name"]: stage for stage in json.loads(path.read_text())["stages"]}
        assert stages["parity: one"]["detail"] == "[3] is 1.0, not 2.0"
        assert stages["parity: two"]["detail"] == "RuntimeError: no kernel image"
        assert stages["parity: three"]["outcome"] == "ok"
        assert "FAILED: parity: one, parity: two\n" in capsys.readouterr().out

    def test_a_real_run_is_refused_without_a_gpu(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert gpu_check.main(["--out", str(tmp_path)]) == 2
        assert list(tmp_path.iterdir()) == []


class TestCommands:
    def test_the_build_is_for_the_device_and_must_not_fail(self) -> None:
        commands = gpu_check.build_commands(CPU)
        assert [name for name, _, _ in commands] == ["build (pip)", "build (setup.py)"]
        for _, words, environment in commands:
            assert words[0] == sys.executable
            assert environment == {"FUSEDACCUM_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0+PTX"}

    def test_the_op_tests_are_there(self) -> None:
        for name in gpu_check.OP_TESTS:
            assert (gpu_check.ROOT / "tests" / f"{name}.py").exists()

    def test_the_memory_checker(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tool = tmp_path / "bin" / "compute-sanitizer"
        tool.parent.mkdir()
        tool.touch(mode=0o755)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        monkeypatch.setenv("PATH", "")
        (_, memory), (_, races) = gpu_check.sanitizer_commands(torch.device("cuda", 0))
        assert memory[:5] == [str(tool), "--tool", "memcheck", "--error-exitcode", "9"]
        assert races[2] == "racecheck"
        assert memory[-3:] == ["-m", "bench.gpu_parity", "cuda:0"]

    def test_its_workload_runs(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert gpu_parity.main(["cpu"]) == 0
        assert capsys.readouterr().out == "ok\n"

    @pytest.mark.parametrize(
        ("program", "wanted", "blame", "outcome", "detail"),
        [
            ("print('fine')", "fine", "", "ok", "fine"),
            ("print('fine')", "finer", "", "failed", "fine"),
            ("raise SystemExit('why')", "", "", "failed", "why"),
            ("import time; print('begun', flush=True); time.sleep(60)", "", "", "failed", "begun"),
            ("raise SystemExit('not supported')", "", "SUMMARY: [1-9]", "not run", "not supported"),
            ("raise SystemExit('ERROR SUMMARY: 2 errors')", "", "SUMMARY: [1-9]", "failed", "2 errors"),
            ("import time; print('slow', flush=True); time.sleep(60)", "", "SUMMARY: [1-9]", "not run", "slow"),
        ],
    )
    def test_a_command(self, program: str, wanted: str, blame: str, outcome: str, detail: str) -> None:
        run = gpu_check.Run(CPU)
        assert run.command("it", [sys.executable, "-c", program], 2.0, wanted, blame) == (outcome == "ok")
        assert run.stages[0].outcome == outcome
        assert detail in run.stages[0].detail

    def test_a_command_that_does_not_exist(self) -> None:
        run = gpu_check.Run(CPU)
        assert not run.command("it", ["/nonexistent"], 2.0)
        assert run.failed


class TestParity:
    def test_a_wrong_bit_is_found(self, native: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        def nearly(acc: torch.Tensor, *arguments: object) -> None:
            native.accumulate_(acc, *arguments)
            acc.view(torch.int32)[0] ^= 1

        monkeypatch.setattr(gpu_parity, "backend_of", lambda device: replace(native, accumulate_=nearly))
        for check in (gpu_parity.self_test, gpu_parity.every_op, gpu_parity.many_tensors):
            assert "differ" in (check(CPU, 2) or "")

    def test_differences_are_told(self) -> None:
        nan = float("nan")
        one, other = torch.tensor([1.0, nan, -0.0, 3.0]), torch.tensor([1.0, nan, -0.0, 2.0])
        assert gpu_parity.first_difference("x", [one, one], [one, one]) is None
        assert gpu_parity.first_difference("x", [one, one], [one, other]) == "x[1]: 1 of 4 differ, [3] is 3.0, not 2.0"

    def test_a_row_that_is_timed(self) -> None:
        timer = gpu_timing.Timer(CPU)
        timer.times_ms = lambda *_: {"fusedaccum": [2.0, 1.0, 3.0], "copy": [1.0, 1.0, 1.0]}
        ways = [gpu_timing.Way(name, lambda i: None, 10) for name in ("fusedaccum", "copy")]
        copy, ours = timer.rows("accumulate", gpu_timing.Case("2^20", [(2**20,)]), ways, 3, 1.0)
        assert (copy.provider, copy.share_of_copy) == ("copy", 1.0)
        assert (ours.median_ms, ours.rounds, ours.share_of_copy) == (2.0, 3, 0.5)
        assert ours.gb_per_s == pytest.approx(10 * 2**20 / 2e-3 / 1e9)
        line = gpu_check.table_of([ours]).splitlines()[1].split()
        assert line == ["accumulate", "2^20", "fusedaccum", "10", "2.0000", "5", "50%"]


class TestOnDevice:
    def test_margins_alignment_and_results_come_back(self, native: Backend) -> None:
        seen: list[int] = []

        def op(acc: torch.Tensor, *rest: object) -> None:
            seen.extend([acc.data_ptr() % 64, rest[3][0].data_ptr() % 64])
            native.accumulate_(acc, *rest)
            torch.empty(0).set_(acc.untyped_storage(), 0, (1,), (1,)).fill_(7.0)  # a write before the beginning

        carried = on_device(replace(native, accumulate_=op), CPU)
        results = []
        for backend in (native, carried):
            buffers = Buffers([40, 3], shift=1)
            buffers.acc.fill_(1.0)
            accumulate(backend, buffers, [torch.ones(41)[1:], torch.ones(3)], [0, 1], scale=0.5)
            results.append(buffers)
        assert seen == [results[1].acc.data_ptr() % 64, 4]
        assert results[1].whole["acc"][0] == 7.0
        results[0].whole["acc"][0] = 7.0
        assert_same_buffers(results[1], results[0])

    def test_what_an_op_wrote_before_it_failed_is_seen(self, native: Backend) -> None:
        def op(acc: torch.Tensor, *_: object) -> None:
            acc.fill_(5.0)
            raise RuntimeError("late")

        acc = torch.zeros(3)
        with pytest.raises(RuntimeError, match="late"):
            on_device(replace(native, accumulate_=op), CPU).accumulate_(acc, 1.0)
        assert acc.tolist() == [5.0] * 3
