"""``python -m fusedaccum doctor``, and the choice of a backend that it reports."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from fusedaccum import FusedAccumOptimizer, __main__, backends, capture, layout, selftest

CPU = torch.device("cpu")


def doctor(**environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: libraries load, and warnings are given, once."""
    return subprocess.run(
        [sys.executable, "-m", "fusedaccum", "doctor"],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )


def test_a_sound_install_passes(native):
    run = doctor()
    assert run.returncode == 0, run.stdout + run.stderr
    for said in ("fusedaccum 0.", f"torch {torch.__version__}", "native self-test ok", "capture self-test ok"):
        assert said in run.stdout
    assert f"native     {native.detail}" in run.stdout
    assert "in use     native on the CPU" in run.stdout


def test_a_bad_setting_fails_and_says_what_is_accepted(native):
    run = doctor(FUSEDACCUM_ISA="none such")
    assert run.returncode == 1
    assert "FUSEDACCUM_ISA is 'none such'; accepted by this processor and build: " in run.stdout
    run = doctor(FUSEDACCUM_BACKEND="none such")
    assert run.returncode == 1
    assert "FUSEDACCUM_BACKEND is 'none such'; accepted: 'auto', 'native', 'cuda', 'triton', 'reference'" in run.stdout


@pytest.mark.parametrize("op", ["accumulate_", "measure_", "finalize_", "adam_step_", "sgd_step_"])
def test_the_self_test_notices_an_op_that_does_nothing(native, op):
    assert selftest.check(native, CPU) is None
    broken = dataclasses.replace(native, **{op: lambda *arguments: None})
    if op == "measure_":  # it writes what is there already, unless it writes something else
        broken = dataclasses.replace(native, measure_=lambda partials, *rest: partials.add_(1.0))
    assert "differs from the reference" in selftest.check(broken, CPU)


def test_the_self_test_notices_one_wrong_bit(native):
    def step(params, *rest):
        native.adam_step_(params, *rest)
        params[-2][layout.CHUNK] *= 1 + 2.0**-7

    assert "differs from the reference" in selftest.check(dataclasses.replace(native, adam_step_=step), CPU)


def test_a_failed_check_is_an_exit_code(native, monkeypatch, capsys):
    monkeypatch.setattr(selftest, "check_capture", lambda: "gradients went missing")
    assert __main__.main(["doctor"]) == 1
    assert "capture self-test FAILED: gradients went missing" in capsys.readouterr().out

    def explode() -> str:
        raise ZeroDivisionError("in the middle")

    monkeypatch.setattr(selftest, "check_capture", explode)
    assert __main__.main(["doctor"]) == 1
    assert "FAILED: ZeroDivisionError: in the middle" in capsys.readouterr().out


def test_the_capture_check_notices_bf16_sums(monkeypatch):
    """A capture that lets torch add in the parameter's dtype."""
    assert selftest.check_capture() is None
    monkeypatch.setattr(capture.Capture, "attach", lambda self, slot: None)
    assert "not to 300.0" in selftest.check_capture()


def test_without_the_library_the_reference_serves_and_says_so_once(tmp_path: Path):
    """A copy of the package with no compiled library, as an install without a compiler leaves it."""
    package = tmp_path / "fusedaccum"
    package.mkdir()
    for module in Path(backends.__file__).parent.glob("*.py"):
        (package / module.name).write_text(module.read_text())
    script = """
import warnings
import torch
from fusedaccum import FusedAccumOptimizer, backends
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        param = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        optimizer = FusedAccumOptimizer(torch.optim.AdamW([param], lr=0.5))
        param.sum().backward()
        optimizer.step()
print(len(caught), caught[0].message, param.tolist())
try:
    FusedAccumOptimizer(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]), backend="native")
except backends.BackendUnavailableError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.splitlines()
    assert first.startswith(
        "1 fusedaccum: the slower reference backend serves cpu devices, because there is no compiled"
    )
    assert "never built" in first
    assert first.endswith("[-0.5, -0.5, -0.5]")
    assert second.startswith("backend is 'native', but there is no compiled library: ")


def test_the_environment_chooses_but_the_argument_wins(native, monkeypatch):
    monkeypatch.setenv("FUSEDACCUM_BACKEND", "reference")
    assert backends.choose(CPU).name == "reference"
    assert backends.choose(CPU, "native").name == "native"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # asked for, so nothing to say
        optimizer = FusedAccumOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    optimizer.remove()
    monkeypatch.setenv("FUSEDACCUM_BACKEND", "cuda")
    with pytest.raises(
        backends.BackendUnavailableError, match="FUSEDACCUM_BACKEND is 'cuda', but the cuda backend serves"
    ):
        backends.choose(CPU)
