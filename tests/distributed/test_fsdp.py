"""FSDP2 and tensor parallelism over gloo; what is checked on the ranks stands in ``checks_fsdp*.py``."""

from __future__ import annotations

import subprocess
import sys

import pytest
from launch import cases, environment

pytestmark = pytest.mark.distributed

MODULES = "checks_fsdp,checks_fsdp_use,checks_fsdp_state"


@pytest.mark.parametrize(("modules", "n_ranks", "name"), cases(MODULES, (2, 4)))
def test_ranks(outcome, modules, n_ranks, name):
    error = outcome(modules, n_ranks, name)
    if error:
        pytest.fail(error, pytrace=False)


def test_a_torch_without_dtensors():
    """Importing asks for none, and plain parameters train where there is none (builds without torch.distributed)."""
    script = """
import sys
import torch
import fusedaccum
assert not [name for name in sys.modules if name.startswith("torch.distributed.tensor")], "imported for nothing"
# What torch.compile imports is not under test.
fusedaccum.capture.keep_compiler_out = lambda: None
sys.modules["torch.distributed.tensor"] = None  # importing it raises ImportError
param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
optimizer = fusedaccum.FusedAccumOptimizer(torch.optim.AdamW([param]), accumulation_steps=2)
for _ in range(2):
    param.sum().backward()
    optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
assert param.grad.dtype is torch.float32 and optimizer.stepped
"""
    run = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
