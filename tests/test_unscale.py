"""``GradScaler.unscale_`` writes to the accumulator: the optimizer must notice, though torch counts no write."""

from __future__ import annotations

import pytest
import torch
from models import inputs, loss_of, mlp, norm_of, norm_rtol, wrap

from fusedaccum import unscale

SCALE = 2.0**10


def test_the_op_moves_version_counters():
    """Of everything that it writes to, with the results that it has without us."""
    unscale.count_writes()
    grads = [torch.full((3,), 4.0), torch.tensor([1.0, torch.inf])]
    found_inf, inv_scale = torch.zeros(()), torch.tensor(0.5)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    assert torch.equal(grads[0], torch.full((3,), 2.0))
    assert torch.equal(grads[1], torch.tensor([0.5, torch.inf]))
    assert found_inf.item() == 1
    assert [grad._version for grad in grads] == [1, 1]
    assert found_inf._version == 1
    assert inv_scale._version == 0
    with torch.inference_mode():
        torch._amp_foreach_non_finite_check_and_unscale_([torch.ones(1)], found_inf.clone(), inv_scale)


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norm_and_clip_are_of_the_unscaled_gradients(backend_name, dtype, explicit):
    """The norm was that of the scaled gradients, and max_grad_norm divided by the scale once more."""
    model = mlp(dtype)
    optimizer = wrap(model, "sgd", backend=backend_name, max_grad_norm=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    batch = inputs(1, dtype)[0]
    twin = mlp(dtype)
    twin.load_state_dict(model.state_dict())
    plain = wrap(twin, "sgd", backend=backend_name, max_grad_norm=0.05)
    scaler.scale(loss_of(model, batch)).backward()
    if explicit:
        scaler.unscale_(optimizer)
        want = norm_of(param.grad for param in model.parameters())
        assert optimizer.clip_grad_norm_(0.05).item() == pytest.approx(want, rel=norm_rtol(32))
    scaler.step(optimizer)
    # A power of two changes no bit of an fp32 gradient; fp16's small ones are denormal without the scale.
    for param, scaled in zip(twin.parameters(), micro_grads_scaled(twin, batch), strict=True):
        param.grad = scaled
    plain.step()
    assert 0.05 < optimizer.grad_norm.item() == plain.grad_norm.item()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def micro_grads_scaled(model, batch):
    """The batch's gradients, taken of the scaled loss and divided by the scale in fp32."""
    params = list(model.parameters())
    grads = torch.autograd.grad(loss_of(model, batch) * SCALE, params)
    return [grad.float() / SCALE for grad in grads]
