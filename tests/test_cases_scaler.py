"""What users reported of ``torch.amp.GradScaler`` and clip together (shared case 8)."""

from __future__ import annotations

import pytest
import torch
from models import DTYPES, OPTIMIZERS, Oracle, fp32_sums, inputs, loss_of, mlp, norm_of, norm_rtol, wrap

SCALE = 2.0**8  # exact in every dtype here, and far from overflow


def _scaled_grads(model, batches, scale):
    """For each micro-batch the gradients of the scaled loss, as autograd gives them."""
    params = list(model.parameters())
    return [torch.autograd.grad(loss_of(model, batch) * scale, params) for batch in batches]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clip", ["torch", "method", "option"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_case_08_unscaled_once(backend_name, name, dtype, clip):
    """``unscale_``, clip, ``scaler.step``: divided by the scale once (pytorch 94060). fp16 parameters are legal,
    because ``.grad`` is fp32 (diffusers 6086)."""
    model = mlp(dtype)
    oracle = Oracle(model, name)
    optimizer = wrap(model, name, max_grad_norm=0.01 if clip == "option" else None, backend=backend_name)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    for _ in range(4):
        scale = scaler.get_scale()
        batches = inputs(2, dtype)
        sums = [total / scale for total in fp32_sums(_scaled_grads(model, batches, scale))]
        for batch in batches:
            scaler.scale(loss_of(model, batch)).backward()
        scaler.unscale_(optimizer)
        for param, want in zip(model.parameters(), sums, strict=True):
            assert torch.equal(param.grad, want)
        if clip == "torch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        elif clip == "method":
            assert optimizer.clip_grad_norm_(0.01).item() == pytest.approx(norm_of(sums), rel=norm_rtol(32))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert oracle.step(sums, max_norm=0.01) > 0.01
        oracle.assert_matches(optimizer)
    assert scaler.get_scale() == 4 * SCALE
