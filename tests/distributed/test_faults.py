"""A rank that dies in mid-window, and a restart by torchrun: two "nodes" on the loopback device."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import torch
from launch import HERE, environment

N_MICRO_BATCHES = 14
DIES_AT = 6  # of windows of 4: in the middle of the second


def torchrun(folder: Path, dies_at: int, *options: str) -> subprocess.Popen[bytes]:
    """An agent and its ranks; what they say goes to a file in ``folder``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval=0.1", *options]
    command += [str(HERE / "train_worker.py"), str(folder), str(N_MICRO_BATCHES), str(dies_at)]
    with open(folder / "agents.log", "ab") as log:
        return subprocess.Popen(command, env=environment(), stdout=log, stderr=log, cwd=HERE)


def wait_for(agents: list[subprocess.Popen[bytes]], timeout_s: float = 120) -> list[int]:
    """Their exit codes; none is left behind."""
    try:
        return [agent.wait(timeout_s) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # takes its ranks with it
            try:
                agent.wait(30)
            except subprocess.TimeoutExpired:
                agent.kill()


def test_a_killed_rank_and_a_restart(tmp_path):
    """The survivor fails with our message, nothing half-stepped and no window to save; torchrun starts both again from
    the last checkpoint that both have, inside of a window; and the run ends with the bits of one that nobody disturbed.
    """
    quiet, disturbed = tmp_path / "quiet", tmp_path / "disturbed"
    quiet.mkdir()
    disturbed.mkdir()
    assert wait_for([torchrun(quiet, -1, "--standalone", "--nproc-per-node=2")]) == [0], _log(quiet)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=two-nodes"]
    meeting += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=join_timeout=60,last_call_timeout=1"]
    nodes = [torchrun(disturbed, DIES_AT, *meeting, f"--local-addr=127.0.0.{i + 1}") for i in range(2)]
    assert wait_for(nodes) == [0, 0], _log(disturbed)
    for rank in range(2):
        began = (disturbed / f"began-{rank}.txt").read_text().split()
        assert began == ["0", str(DIES_AT)]
        wanted = torch.load(quiet / f"final-{rank}.pt", weights_only=True)
        found = torch.load(disturbed / f"final-{rank}.pt", weights_only=True)
        assert all(torch.equal(p, q) for p, q in zip(wanted, found, strict=True))


def test_the_survivor_of_a_killed_rank(tmp_path):
    """Without torchrun's agent, which would kill it: fails within the timeout, by name, and can save its state."""
    store = f"file://{tmp_path}/store"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "train_worker.py"), str(tmp_path), str(N_MICRO_BATCHES), str(DIES_AT)],
            env={**environment(), "RANK": str(rank), "WORLD_SIZE": "2", "FUSEDACCUM_TEST_STORE": store},
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


def _log(folder: Path) -> str:
    return (folder / "agents.log").read_text()[-4000:]
