"""The wrapper as a torch optimizer: what users call on it, and what they edit behind its back."""

from __future__ import annotations

import math
import re
import warnings

import pytest
import torch
from helpers import assert_same_bits
from models import (
    DTYPES,
    OPTIMIZERS,
    U32,
    Oracle,
    assert_unmoved,
    fp32_sums,
    inputs,
    loss_of,
    micro_grads,
    mlp,
    norm_of,
    norm_rtol,
    run_window,
    snapshot,
    wrap,
)

import fusedaccum
from fusedaccum import FusedAccumOptimizer


def test_it_is_a_torch_optimizer_that_shares_groups_and_state(backend_name):
    model = mlp()
    inner = OPTIMIZERS["adamw"](model.parameters())
    optimizer = FusedAccumOptimizer(inner, backend=backend_name)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert optimizer.inner is inner
    run_window(model, optimizer, inputs(1))
    optimizer.step()
    assert optimizer.state is inner.state
    assert inner.state[model[0].weight]["step"].item() == 1
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    groups = optimizer.param_groups
    optimizer.param_groups = [dict(groups[0])]
    assert inner.param_groups is optimizer.param_groups is not groups


def test_repr_names_options_and_the_inner_optimizer(backend_name):
    text = repr(wrap(mlp(), accumulation_steps=4, max_grad_norm=1.5, backend=backend_name))
    assert text.startswith("FusedAccumOptimizer(accumulation_steps=4, max_grad_norm=1.5, AdamW (")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_with_settings_of_their_own(backend_name, name):
    """And one of parameters of another dtype."""
    model = mlp()
    model[2].bfloat16()

    def make(params):
        params = list(params)
        inner = OPTIMIZERS[name](params[:1])
        inner.add_param_group({"params": params[1:3], "lr": 0.1, "weight_decay": 0.0})
        inner.add_param_group({"params": params[3:], "lr": 0.0})
        return inner

    oracle = Oracle(model, make)
    optimizer = FusedAccumOptimizer(make(model.parameters()), max_grad_norm=0.05, backend=backend_name)
    for _ in range(3):
        x = inputs(1)[0]
        loss = model[2](torch.tanh(model[0](x)).bfloat16()).float().square().mean()
        sums = [grad.float() for grad in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        norm = oracle.step(sums, max_norm=0.05)
        assert norm > 0.05
        oracle.assert_matches(optimizer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("through", ["outer", "inner", "list"])
def test_new_parameters(backend_name, name, dtype, through):
    """Through either optimizer, or by an edit of the list: noticed by whatever is called next."""
    model = mlp(dtype)
    params = list(model.parameters())
    oracle = Oracle(model, name)
    optimizer = FusedAccumOptimizer(OPTIMIZERS[name](params[:2]), backend=backend_name)
    for step in range(3):
        if step == 1:
            if through == "list":
                optimizer.param_groups[0]["params"] += params[2:]
            else:
                (optimizer if through == "outer" else optimizer.inner).add_param_group({"params": params[2:]})
        optimizer.zero_grad()
        if step == 0:
            model.zero_grad()
        batches = inputs(2, dtype)
        sums = fp32_sums(micro_grads(model, batches))
        run_window(model, optimizer, batches)
        optimizer.step()
        if step == 0:
            sums[2:] = [None, None]
            model.zero_grad()
        oracle.step(sums)
    oracle.assert_matches(optimizer)


@pytest.mark.parametrize(
    ("group", "error", "message"),
    [
        (lambda: {"params": [torch.zeros(2, dtype=torch.float64, requires_grad=True)]}, TypeError, "dtype float64"),
        (
            lambda: {"params": [torch.zeros(2, requires_grad=True)], "differentiable": True},
            ValueError,
            "differentiable",
        ),
        (lambda: {"params": [torch.zeros(4, 2)[:, ::2].requires_grad_()]}, ValueError, "gaps or overlaps"),
        (lambda: {"params": [torch.zeros(2, dtype=torch.int64)], "lr": -1}, None, None),
    ],
)
def test_add_param_group_refuses_and_leaves_the_groups(backend_name, group, error, message):
    model = mlp()
    optimizer = wrap(model, backend=backend_name)
    before = [list(each["params"]) for each in optimizer.param_groups]
    if error is None:  # a frozen integer tensor is nobody's business
        optimizer.add_param_group(group())
        assert len(optimizer.param_groups) == 2
        run_window(model, optimizer, inputs(1))
        optimizer.step()
        return
    with pytest.raises(error, match=message):
        optimizer.add_param_group(group())
    after = [list(each["params"]) for each in optimizer.param_groups]
    assert len(before) == len(after)
    assert all(a is b for a, b in zip(before[0], after[0], strict=True))
    oracle = Oracle(model)
    batch = inputs(1)
    sums = fp32_sums(micro_grads(model, batch))
    run_window(model, optimizer, batch)
    optimizer.step()
    oracle.step(sums)
    oracle.assert_matches(optimizer)


# Windows -------------------------------------------------------------------------------------------------------------


def test_zero_grad_inside_a_window_does_nothing(backend_name):
    model = mlp()
    oracle = Oracle(model)
    optimizer = wrap(model, accumulation_steps=2, backend=backend_name)
    first, second = batches = inputs(2)
    sums = fp32_sums(micro_grads(model, batches), 0.5)
    optimizer.zero_grad()
    run_window(model, optimizer, [first])
    optimizer.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    run_window(model, optimizer, [second])
    for param, want in zip(model.parameters(), sums, strict=True):
        assert_same_bits(param.grad, want)
    oracle.step(sums)
    oracle.assert_matches(optimizer)
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("steps", [None, 1, 3])
def test_stepped(backend_name, steps):
    model = mlp()
    optimizer = wrap(model, accumulation_steps=steps, backend=backend_name)
    assert optimizer.accumulation_steps == steps
    assert not optimizer.stepped
    seen = []
    for batch in inputs(7):
        loss_of(model, batch).backward()
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.step()
        moved = not torch.equal(before[0], model[0].weight)
        assert moved == optimizer.stepped
        seen.append(moved)
        optimizer.zero_grad()
    assert seen == [(i + 1) % (steps or 1) == 0 for i in range(7)]
    if steps is None:
        with pytest.raises(RuntimeError, match="flush: accumulation_steps is None"):
            optimizer.flush()
    else:
        assert optimizer.flush() == (steps == 3)
        assert optimizer.stepped == (steps == 3)


def test_reset_drops_the_window(backend_name):
    model = mlp()
    optimizer = wrap(model, accumulation_steps=3, backend=backend_name)
    before = snapshot(optimizer)
    run_window(model, optimizer, inputs(2))
    with pytest.warns(UserWarning, match="2 of 3"):
        optimizer.reset()
    assert all(param.grad is None for param in model.parameters())
    assert_unmoved(before, snapshot(optimizer))
    oracle = Oracle(model)
    batches = inputs(3)
    sums = fp32_sums(micro_grads(model, batches), scale=1 / 3)
    run_window(model, optimizer, batches)
    assert optimizer.stepped
    oracle.step(sums)
    oracle.assert_matches(optimizer)


def test_found_inf_and_grad_norm_are_of_the_last_boundary(backend_name):
    model = mlp()
    optimizer = wrap(model, accumulation_steps=2, backend=backend_name)
    assert optimizer.found_inf.item() == 0
    assert optimizer.grad_norm.item() == 0
    batches = inputs(2)
    sums = fp32_sums(micro_grads(model, batches), scale=0.5)
    run_window(model, optimizer, batches)
    norm = optimizer.grad_norm
    assert norm.shape == ()
    assert norm.dtype is torch.float32
    want = pytest.approx(norm_of(sums), rel=norm_rtol(32))
    assert norm.item() == want
    optimizer.zero_grad()
    run_window(model, optimizer, inputs(1), weight=float("nan"))
    assert optimizer.grad_norm.item() == want
    assert optimizer.found_inf.item() == 0
    run_window(model, optimizer, inputs(1))
    assert optimizer.found_inf.item() == 1
    assert norm.item() == want  # a copy: not the next window's


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"accumulation_steps": 0}, ValueError, "accumulation_steps is 0; accepted: None or an integer"),
        ({"accumulation_steps": -1}, ValueError, "accumulation_steps is -1"),
        ({"accumulation_steps": 2.0}, ValueError, "accumulation_steps is 2.0"),
        ({"accumulation_steps": True}, ValueError, "accumulation_steps is True"),
        ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm is -1.0; accepted: a number of at least 0"),
        ({"max_grad_norm": math.nan}, ValueError, "max_grad_norm is nan"),
        ({"max_grad_norm": "1"}, ValueError, "max_grad_norm is '1'"),
        ({"master_weights": "yes"}, ValueError, "master_weights is 'yes'; accepted: 'auto', True, False"),
        ({"master_weights": None}, ValueError, "master_weights is None"),
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes is 0; accepted: an integer of at least 1"),
        ({"bucket_bytes": 1.5}, ValueError, "bucket_bytes is 1.5"),
        ({"backend": "cudnn"}, ValueError, "backend is 'cudnn'; accepted: 'auto', 'native'"),
    ],
)
def test_bad_options_are_refused(options, error, message):
    model = mlp(torch.bfloat16)
    with pytest.raises(error, match=re.escape(message)):
        wrap(model, **options)
    loss_of(model, inputs(1, torch.bfloat16)[0]).backward()
    assert all(param.grad.dtype is torch.bfloat16 for param in model.parameters())


def test_bad_optimizers_are_refused(backend_name):
    model = mlp()
    with pytest.raises(TypeError, match=r"optimizer is a Sequential; accepted: an instance of torch\.optim\.Optimizer"):
        FusedAccumOptimizer(model)
    optimizer = wrap(model, backend=backend_name)
    with pytest.raises(TypeError, match="optimizer is a FusedAccumOptimizer already"):
        FusedAccumOptimizer(optimizer)
    for options, message in (
        ({"max_norm": -1.0}, "max_norm is -1.0"),
        ({"max_norm": 1.0, "norm_type": 1.0}, "norm_type is 1.0; accepted: 2"),
        ({"max_norm": math.nan}, "max_norm is nan"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.clip_grad_norm_(**options)


def test_a_process_group_of_two_is_refused(monkeypatch):
    """Nothing would reduce the gradients over the ranks."""
    model = mlp()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="process group has 2 ranks; accepted: 1"):
        wrap(model)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    wrap(model)


def test_public_names():
    names = ["FusedAccumOptimizer", "GradScaler", "LossScale", "__version__", "from_deepspeed_config", "scale_lr"]
    assert fusedaccum.__all__ == names
    for name in names:
        assert getattr(fusedaccum, name) is not None


def test_no_warning_in_plain_use(backend_name):
    """Nothing is said in a loop that does everything right."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = mlp()
        optimizer = wrap(model, accumulation_steps=2, max_grad_norm=1.0, backend=backend_name)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        for batch in inputs(5):
            run_window(model, optimizer, [batch])
            if optimizer.stepped:
                scheduler.step()
            optimizer.zero_grad()
        optimizer.flush()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.remove()


def test_torch_norm_of_the_gradients(backend_name):
    """``torch.nn.utils.get_total_norm`` sees fp32 gradients of a bf16 model."""
    model = mlp(torch.bfloat16)
    optimizer = wrap(model, backend=backend_name)
    run_window(model, optimizer, inputs(3, torch.bfloat16))
    grads = [param.grad for param in model.parameters()]
    norm = torch.nn.utils.get_total_norm(grads)
    assert norm.dtype is torch.float32
    n_elems = sum(grad.numel() for grad in grads)
    assert norm.item() == pytest.approx(optimizer.clip_grad_norm_(1.0).item(), rel=n_elems * U32)
