"""Data parallel over gloo; what is checked on the ranks stands in ``checks_*.py``."""

from __future__ import annotations

import pytest
from launch import cases

pytestmark = pytest.mark.distributed

MODULES = "checks_window,checks_together,checks_ddp,checks_checkpoint"


@pytest.mark.parametrize(("modules", "n_ranks", "name"), cases(MODULES, (2, 4)))
def test_ranks(outcome, modules, n_ranks, name):
    error = outcome(modules, n_ranks, name)
    if error:
        pytest.fail(error, pytrace=False)
