"""Under torchrun: two nodes on loopback addresses, and a run that is broken off and started again."""

from __future__ import annotations

import json
import re
import socket

import pytest
import torch
from launch import HERE, run_torchruns
from nodes_worker import N_WINDOWS, K, exact_batches, train
from restart_worker import DIES_AT
from restart_worker import K as RESTART_K

pytestmark = pytest.mark.distributed


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_two_nodes_of_two_ranks(tmp_path):
    """Two agents, each on a loopback address of its own. Bit for bit what one process makes of the whole batch."""
    port = _free_port()
    agents = [
        [
            "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}", "--master-addr=127.0.0.1",
            f"--master-port={port}", f"--local-addr=127.0.0.{node + 1}", "nodes_worker.py", str(tmp_path),
        ]
        for node in range(2)
    ]  # fmt: skip
    run_torchruns(agents, tmp_path, timeout_s=90)
    wanted = train(exact_batches(N_WINDOWS * K * 4), 4 * K)
    for rank in range(4):
        for overlap in (False, True):
            found = torch.load(tmp_path / f"rank-{rank}-{overlap}.pt", weights_only=True)
            assert all(torch.equal(p, q) for p, q in zip(found, wanted, strict=True)), (rank, overlap)


def test_the_script_of_the_readme(tmp_path):
    """As it stands there, on two ranks; what rank 0 saves has the short last window in it."""
    text = (HERE.parent.parent / "README.md").read_text()
    (script,) = re.findall(r"```python\n(# train\.py\n.*?)```", text, re.DOTALL)
    (tmp_path / "train.py").write_text((HERE / "exits.py").read_text() + script)
    agent = ["--standalone", "--nproc-per-node=2", str(tmp_path / "train.py")]
    run_torchruns([agent], tmp_path, timeout_s=90, cwd=tmp_path)
    held = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert held["optimizer"]["state"][0]["step"].item() == 3
    assert held["optimizer"]["fusedaccum"]["open"] is None


def test_a_restart_from_the_last_checkpoint(tmp_path):
    """Rank 1 is killed inside a window, torchrun starts both anew, and they end with the bits of an undisturbed run."""
    agent = [
        "--nnodes=1", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1", "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "restart_worker.py", str(tmp_path),
    ]  # fmt: skip
    run_torchruns([agent], tmp_path, timeout_s=90)
    for rank in range(2):
        found = json.loads((tmp_path / f"ended-{rank}.json").read_text())
        assert found["restarts"] == 1
        assert found["began"] == DIES_AT // RESTART_K * RESTART_K  # the last boundary before it
        assert found["same_bits"]
        assert found["n_bytes"] > 0
