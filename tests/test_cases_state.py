"""What users reported of state and of changed parameters (shared cases 13, 15, 29, 30)."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from models import (
    DTYPES,
    OPTIMIZERS,
    Oracle,
    assert_unmoved,
    fp32_sums,
    inputs,
    loss_of,
    micro_grads,
    mlp,
    run_window,
    slot_of,
    snapshot,
    wrap,
)
from torch import nn

from fusedaccum import FusedAccumOptimizer


def _train(model, optimizer, n_windows, seed):
    """The same micro-batches for the same seed."""
    torch.manual_seed(seed)
    for _ in range(n_windows):
        run_window(model, optimizer, inputs(2, model[0].weight.dtype))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_case_13_a_checkpoint_continues_with_the_same_bits(backend_name, name, dtype, order):
    """States and masters of 16-bit parameters were cast by ``load_state_dict`` (pytorch 43706, Megatron 1359), or
    rebuilt from the parameters (OpenTau 185)."""
    model = mlp(dtype)
    optimizer = wrap(model, name, backend=backend_name)
    _train(model, optimizer, 3, seed=1)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    _train(model, optimizer, 3, seed=2)

    resumed = mlp(dtype)
    again = wrap(resumed, name, backend=backend_name)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for state in saved["optimizer"]["state"].values():
        assert ("master_param" in state) == (dtype is not torch.float32)
        assert all(value.dtype is torch.float32 for value in state.values() if torch.is_tensor(value))
    if order == "model first":
        resumed.load_state_dict(saved["model"])
        again.load_state_dict(saved["optimizer"])
    else:
        again.load_state_dict(saved["optimizer"])
        resumed.load_state_dict(saved["model"])
    for state in again.state_dict()["state"].values():
        assert all(value.dtype is torch.float32 for value in state.values() if torch.is_tensor(value))
    _train(resumed, again, 3, seed=2)
    assert_unmoved(snapshot(optimizer), snapshot(again))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_case_13_loading_does_not_alias(backend_name, name, dtype):
    """Two optimizers that loaded the same dictionary, or an optimizer and the one that it was saved from."""
    model = mlp(dtype)
    optimizer = wrap(model, name, backend=backend_name)
    _train(model, optimizer, 2, seed=1)
    twin = copy.deepcopy(model)
    other = wrap(twin, name, backend=backend_name)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()) if name == "rmsprop" else optimizer.state_dict())
    before = snapshot(optimizer)
    _train(twin, other, 2, seed=2)
    assert_unmoved(before, snapshot(optimizer))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("n_windows", [0, 2])
def test_case_15_loading_the_own_state_dict_is_a_no_op(backend_name, name, dtype, n_windows):
    """Before any step (torchao 1044; Accelerate does it at prepare), and after some."""
    model, twin = mlp(dtype), None
    twin = copy.deepcopy(model)
    optimizer, other = (wrap(each, name, backend=backend_name) for each in (model, twin))
    for each, opt in ((model, optimizer), (twin, other)):
        _train(each, opt, n_windows, seed=1)
    before = snapshot(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_unmoved(before, snapshot(optimizer))
    assert len(optimizer.state) == (4 if n_windows else 0)
    for each, opt in ((model, optimizer), (twin, other)):
        _train(each, opt, 2, seed=2)
    assert_unmoved(snapshot(other), snapshot(optimizer))


# Case 29: changed parameters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("when", ["before anything", "after a dropped window"])
def test_case_29_to_dtype_before_the_first_step_is_followed(backend_name, name, dtypes, when):
    """``model.to(dtype)`` after wrapping: the hooks were gone, and gradients bypassed the window."""
    model = mlp(dtypes[0])
    optimizer = wrap(model, name, accumulation_steps=2, backend=backend_name)
    if when == "after a dropped window":
        run_window(model, optimizer, inputs(1, dtypes[0]))
        with pytest.warns(UserWarning, match="1 of 2"):
            optimizer.reset()
    model.to(dtypes[1])
    oracle = Oracle(model, name)
    for _ in range(2):
        batches = inputs(2, dtypes[1])
        sums = fp32_sums(micro_grads(model, batches), scale=0.5)
        run_window(model, optimizer, batches)
        oracle.step(sums)
        oracle.assert_matches(optimizer)
        optimizer.zero_grad()
    run_window(model, optimizer, inputs(1, dtypes[1]))
    assert all(param.grad.dtype is torch.float32 for param in model.parameters())
    optimizer.flush()


def test_case_29_to_dtype_with_gradients_is_refused(backend_name):
    """With the name of the parameter, and until they are dropped."""
    model = mlp()
    inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = FusedAccumOptimizer(inner, backend=backend_name)
    run_window(model, optimizer, inputs(1))
    model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"0.weight.* was float32 on cpu and is now bfloat16 on cpu, and holds"):
        optimizer.step()
    optimizer.zero_grad()  # what the message recommends
    oracle = Oracle(model, lambda params: torch.optim.SGD(params, lr=0.1))
    batches = inputs(2, torch.bfloat16)
    sums = fp32_sums(micro_grads(model, batches))
    optimizer.zero_grad()
    run_window(model, optimizer, batches)
    optimizer.step()
    oracle.step(sums)
    oracle.assert_matches(optimizer)


def test_case_29_to_dtype_with_state_is_refused(backend_name):
    model = mlp()
    optimizer = FusedAccumOptimizer(torch.optim.AdamW(model.named_parameters(), lr=0.1), backend=backend_name)
    _train(model, optimizer, 1, seed=1)
    model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"0.weight.* was float32 on cpu and is now bfloat16.* has optimizer state"):
        optimizer.zero_grad()


def test_case_29_to_an_unsupported_dtype_is_refused(backend_name):
    model = mlp()
    optimizer = FusedAccumOptimizer(torch.optim.AdamW(model.named_parameters(), lr=0.1), backend=backend_name)
    model.double()
    loss_of(model, inputs(1, torch.float64)[0]).backward()
    with pytest.raises(TypeError, match=r"0.weight.* has dtype float64"):
        optimizer.step()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_case_29_there_and_back_again_is_followed(backend_name, name, dtype):
    """``model.double()`` for an evaluation and back again: the dtype was as before, the hooks were gone, and each
    gradient of the window counted in full instead of 1/K."""
    model = mlp(dtype)
    oracle = Oracle(model, name)
    optimizer = wrap(model, name, accumulation_steps=2, backend=backend_name)
    for window in range(3):
        if window == 1:  # every 16-bit value survives fp32, every fp32 value fp64
            model.double().to(dtype)
        batches = inputs(2, dtype)
        grads = micro_grads(model, batches)
        if window == 1 and dtype is not torch.float32:
            # Until the boundary notices, torch accumulates in the parameter's dtype.
            sums = [(a + b).float() * 0.5 for a, b in zip(*grads, strict=True)]
        else:
            sums = fp32_sums(grads, scale=0.5)
        run_window(model, optimizer, batches)
        oracle.step(sums)
        oracle.assert_matches(optimizer)
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_case_29_new_weights_on_the_way_back_reach_the_master(backend_name, dtype):
    """``model.float()``, new values, ``model.bfloat16()``: the parameter may lie at its old address again."""
    model, other = mlp(dtype), mlp(dtype)
    optimizer = wrap(model, "sgd", backend=backend_name)
    _train(model, optimizer, 2, seed=1)
    optimizer.param_groups[0]["lr"] = 0.0
    model.float()
    for param, new in zip(model.parameters(), other.float().parameters(), strict=True):
        param.data = new.detach().clone()
    model.to(dtype)
    for param in model.parameters():  # what the allocator may do
        slot_of(optimizer, param).data_ptr = param.data_ptr()
    _train(model, optimizer, 1, seed=2)
    for param, want in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param.float(), want)  # stepped by nothing, from the master
        assert torch.equal(optimizer.state[param]["master_param"].to(dtype), want.to(dtype))


def test_case_29_there_and_back_again_inside_a_window_is_refused(backend_name):
    model = mlp()
    inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = FusedAccumOptimizer(inner, accumulation_steps=2, backend=backend_name)
    run_window(model, optimizer, inputs(1))
    model.double().float()
    with pytest.raises(RuntimeError, match=r"0.weight.* was converted to another dtype or device and back, and holds"):
        run_window(model, optimizer, inputs(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("transposed", [True, False])
def test_case_29_assignment_to_data_is_followed(backend_name, name, dtype, transposed):
    """New values, in other memory and perhaps another order: the master has them at the next step."""
    model = mlp(dtype)
    oracle = Oracle(model, name)
    optimizer = wrap(model, name, backend=backend_name)
    for step in range(4):
        if step in (1, 2):  # without a gradient
            new = torch.randn(13, 7).to(dtype)
            model[0].weight.data = new.t().contiguous().t() if transposed else new.clone()
            oracle.params[0].data.copy_(new)
            oracle._start[0].copy_(new)
        batches = inputs(1, dtype)
        sums = fp32_sums(micro_grads(model, batches))
        run_window(model, optimizer, batches)
        if step == 3:  # with one
            model[2].weight.data = new = torch.randn(3, 13).to(dtype)
            oracle.params[2].data.copy_(new)
        optimizer.step()
        optimizer.zero_grad()
        oracle.step(sums)
        oracle.assert_matches(optimizer)


@pytest.mark.parametrize("shape", [(7, 13), (91,)])
def test_case_29_data_of_another_shape_is_refused(backend_name, shape):
    model = mlp()
    optimizer = FusedAccumOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1), backend=backend_name)
    run_window(model, optimizer, inputs(1))
    before = [param.detach().clone() for param in model.parameters()]
    model[0].weight.data = torch.randn(shape)
    with pytest.raises(RuntimeError, match=r"0.weight.* had shape \(13, 7\) and now has"):
        optimizer.step()
    for param, was in list(zip(model.parameters(), before, strict=True))[1:]:
        assert torch.equal(param, was)


# Case 30: copies and rivals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_case_30_a_deepcopy_of_the_model_is_its_own(backend_name, name, dtype):
    """Gradients of the copy went into the original's window, or the other way round."""
    model = mlp(dtype)
    optimizer = wrap(model, name, backend=backend_name)
    _train(model, optimizer, 1, seed=1)
    run_window(model, optimizer, inputs(1, dtype))
    kept = [param.grad.clone() for param in model.parameters()]
    twin = copy.deepcopy(model)
    batches = inputs(2, dtype)
    plain = OPTIMIZERS[name](twin.parameters())
    run_window(twin, optimizer, batches)
    for param, grad in zip(model.parameters(), kept, strict=True):
        assert torch.equal(param.grad, grad)
    for param in twin.parameters():
        assert param.grad.dtype is dtype
    before = snapshot(optimizer)
    plain.step()
    assert_unmoved(before, snapshot(optimizer))
    assert slot_of(optimizer, model[0].weight).view is model[0].weight.grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_case_30_a_deepcopy_of_both_trains_alike_and_apart(backend_name, name, dtype):
    model = mlp(dtype)
    optimizer = wrap(model, name, max_grad_norm=0.1, backend=backend_name)
    _train(model, optimizer, 2, seed=1)
    twin, other = copy.deepcopy((model, optimizer))
    assert other.max_grad_norm == 0.1
    before = snapshot(optimizer)
    assert_unmoved(before, snapshot(other))
    _train(twin, other, 2, seed=2)
    assert_unmoved(before, snapshot(optimizer))
    _train(model, optimizer, 2, seed=2)
    assert_unmoved(snapshot(other), snapshot(optimizer))


def test_case_30_a_second_wrapper_is_refused_by_name(backend_name):
    """Two wrappers over one parameter would each take half of the gradients."""
    model = mlp()
    optimizer = wrap(model, "sgd", backend=backend_name)
    rival = torch.optim.SGD(model[2].named_parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"weight.* already belongs to another FusedAccumOptimizer"):
        FusedAccumOptimizer(rival, backend=backend_name)
    batches = inputs(2)
    oracle = Oracle(model, "sgd")
    sums = fp32_sums(micro_grads(model, batches))
    run_window(model, optimizer, batches)  # the first one is none the worse
    optimizer.step()
    oracle.step(sums)
    oracle.assert_matches(optimizer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["remove", "deletion"])
def test_case_30_a_second_wrapper_after_the_first(backend_name, dtype, how):
    model = mlp(dtype)
    optimizer = wrap(model, "sgd", backend=backend_name)
    _train(model, optimizer, 1, seed=1)
    if how == "remove":
        assert isinstance(optimizer.remove(), torch.optim.SGD)
    del optimizer
    model.zero_grad()
    again = wrap(model, "sgd", backend=backend_name)
    oracle = Oracle(model, "sgd")
    for _ in range(2):
        batches = inputs(2, dtype)
        sums = fp32_sums(micro_grads(model, batches))
        run_window(model, again, batches)
        again.step()
        again.zero_grad()
        oracle.step(sums)
    oracle.assert_matches(again)


def test_case_30_a_plain_optimizer_beside_it(backend_name):
    """It has the fp32 sums as gradients, and its writes to fp32 parameters count."""
    model = mlp()
    optimizer = wrap(model, "sgd", backend=backend_name)
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    run_window(model, optimizer, inputs(2))
    want = [param.detach() - 0.5 * param.grad for param in model.parameters()]
    plain.step()
    for param, value in zip(model.parameters(), want, strict=True):
        assert torch.equal(param, value)
    plain.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    assert isinstance(nn.utils.parameters_to_vector(model.parameters()), torch.Tensor)
