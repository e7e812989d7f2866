"""Sharded states over gloo; what is checked on the ranks stands in ``checks_zero*.py``."""

from __future__ import annotations

import pytest
import torch
from checks_zero_resume import FOLDER, STAGE, STAGES
from launch import cases, run_checks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("modules", "n_ranks", "name"), cases("checks_zero,checks_zero_use", (1, 2, 4)))
def test_ranks(outcome, modules, n_ranks, name):
    error = outcome(modules, n_ranks, name)
    if error:
        pytest.fail(error, pytrace=False)


def test_other_numbers_of_ranks(tmp_path, monkeypatch):
    """Each number of ranks is a launch of its own, which finds what the one before has left on the disk."""
    if not torch.distributed.is_available():
        pytest.skip("this torch is built without torch.distributed")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    for stage, n_ranks in enumerate(STAGES):
        monkeypatch.setenv(STAGE, str(stage))
        folder = tmp_path / f"launch_{stage}"
        folder.mkdir()
        for error in run_checks("checks_zero_resume", n_ranks, folder).values():
            if error:
                pytest.fail(f"launch {stage}: {error}", pytrace=False)
