"""Checkpoints that one number of ranks saves and another loads: 4, 2, 1, 4, each in processes of its own."""

from __future__ import annotations

import pytest
from launch import run_ranks

pytestmark = pytest.mark.distributed


def test_saved_by_4_loaded_by_2_by_1_by_4(tmp_path):
    """Bit by bit what was saved, in three ways, replicated and sharded; and the last 4 train on as the first did."""
    for step, n_ranks in enumerate((4, 2, 1, 4)):
        commands = [["reshard_worker.py", str(tmp_path), str(rank), str(n_ranks), str(step)] for rank in range(n_ranks)]
        run_ranks(commands, tmp_path, timeout_s=60)
