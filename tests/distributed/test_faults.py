"""A rank that dies in mid-window."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from launch import HERE, environment

pytestmark = pytest.mark.distributed

N_MICRO_BATCHES = 14
DIES_AT = 6  # of windows of 4: in the middle of the second


def test_the_survivor_of_a_killed_rank(tmp_path):
    """It fails within the timeout, by name; nothing is half-stepped, and what it can save has no window of sums."""
    store = f"file://{tmp_path}/store"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "fault_worker.py"), str(tmp_path), str(N_MICRO_BATCHES), str(DIES_AT)],
            env={**environment(), "RANK": str(rank), "WORLD_SIZE": "2", "STORE": store},
            stderr=subprocess.PIPE,
            cwd=HERE,
        )
        for rank in range(2)
    ]
    try:
        codes = [rank.wait(90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [1, -9], ranks[0].stderr.read().decode()
    found = json.loads((tmp_path / "lost-0.json").read_text())
    assert found["type"] == "RankLostError"
    assert "rank 0 of 2:" in found["message"]
    assert "Another rank has died" in found["message"]
    assert "start again from a checkpoint" in found["message"]
    assert found["again"] == found["message"]
    assert found["waited_s"] < 30
    assert found["parameters_are_those_of_the_last_boundary"]
    assert not found["open_window"]
