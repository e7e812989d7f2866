"""What users reported of models beyond 32 bits (shared case 28)."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same_bits
from models import OPTIMIZERS, Oracle
from torch import nn

from fusedaccum import FusedAccumOptimizer

N_BEFORE = 2**31 + 77  # elements of a parameter that nobody uses: what follows lies beyond 32 bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_case_28_the_far_end_of_a_large_buffer(backend_name, monkeypatch, far_memory, name, dtype):
    """Offsets wrapped at 2^31 (apex 1654, DeepSpeed 7640). Only the pages that are touched cost memory."""
    zeros = torch.zeros

    def fresh(size, *more, **options):
        is_large = isinstance(size, int) and size >= N_BEFORE
        return (torch.empty if is_large else zeros)(size, *more, **options)  # fresh pages are zero already

    monkeypatch.setattr(torch, "zeros", fresh)
    unused = nn.Parameter(far_memory(N_BEFORE, torch.bfloat16))
    used = nn.ParameterList([nn.Parameter(torch.randn(shape).to(dtype)) for shape in [(3,), (300, 211), (5,)]])
    oracle = Oracle(used, name)
    optimizer = FusedAccumOptimizer(
        OPTIMIZERS[name]([used[0], unused, *used[1:]]), max_grad_norm=0.5, backend=backend_name, bucket_bytes=1
    )
    for _ in range(3):
        coefs = [[torch.randn(param.shape).to(dtype) for param in used] for _ in range(2)]
        for some in coefs:
            sum((param * coef).sum() for param, coef in zip(used, some, strict=True)).backward()
        sums = [a.float() + b.float() for a, b in zip(*coefs, strict=True)]
        for param, want in zip(used, sums, strict=True):
            assert_same_bits(param.grad, want)
        assert [param.grad.storage_offset() > 2**31 for param in used] == [False, True, True]
        norm = oracle.step(sums, max_norm=0.5)
        optimizer.step()
        assert optimizer.grad_norm.item() == pytest.approx(norm, rel=2**-20)
        optimizer.zero_grad()
    assert unused not in optimizer.state
    del optimizer.param_groups[0]["params"][1]  # the oracle does not know it
    oracle.assert_matches(optimizer)
