"""transformers' Trainer on two ranks, in DistributedDataParallel, against one process with twice the batch."""

from __future__ import annotations

import pytest
import torch
from launch import HERE, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.integration]


def test_two_ranks_train_as_one_process(trainer_installed, tmp_path):
    """Losses, the last norm, and weights."""
    from integration.helpers_lm import Run, assert_same_run

    script = str(HERE / "trainer_worker.py")
    run_ranks([[script, str(tmp_path), str(rank), str(n)] for n in (1, 2) for rank in range(n)], tmp_path, timeout_s=90)
    alone, *ranks = (
        Run(**torch.load(tmp_path / f"{name}.pt", weights_only=True)) for name in ("0-of-1", "0-of-2", "1-of-2")
    )
    assert alone.n_steps == 4
    # The tolerances are those of two runs that add the same gradients in another order.
    for run in ranks:
        assert_same_run(run, alone)
    for name, weight in ranks[0].weights.items():
        assert torch.equal(weight, ranks[1].weights[name]), name
