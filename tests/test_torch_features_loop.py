"""torch features around the loop: conversions, copies and toggles of the model, profiling, evaluation, hooks."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits
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
    snapshot,
    wrap,
)
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fusedaccum import FusedAccumOptimizer


def _assert_grads(params, wants):
    for param, want in zip(params, wants, strict=True):
        if want is None:
            assert param.grad is None
        else:
            assert_same_bits(param.grad, want)


# What users do to the model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("whole", [True, False])
def test_requires_grad_toggles(backend_name, name, dtype, whole):
    """Frozen for a window and thawed again: no update while frozen, and no gradient lost afterwards. torch keeps a
    parameter's ``.grad`` through the toggle, and so does the wrapper."""
    model = mlp(dtype)
    layer = model if whole else model[0]
    oracle = Oracle(model, name)
    optimizer = wrap(model, name, backend=backend_name)
    for window in range(4):
        batches = inputs(2, dtype)
        if window == 1:
            layer.requires_grad_(False)
            if whole:
                with pytest.raises(RuntimeError, match="does not require grad"):
                    loss_of(model, batches[0]).backward()
                optimizer.step()
                layer.requires_grad_(True)
                continue
        if window == 2:
            layer.requires_grad_(True)
        sums = fp32_sums(micro_grads(model, batches))
        run_window(model, optimizer, batches)
        if window == 3:  # while gradients wait for the step
            layer.requires_grad_(False)
            layer.requires_grad_(True)
        _assert_grads(model.parameters(), sums)
        optimizer.step()
        optimizer.zero_grad()
        oracle.step(sums)
        oracle.assert_matches(optimizer)


def test_module_to_that_changes_nothing(backend_name):
    """The same device and dtype: a loop that calls it each epoch goes on as before."""
    model = mlp(torch.bfloat16)
    oracle = Oracle(model)
    optimizer = wrap(model, accumulation_steps=2, backend=backend_name)
    for _ in range(3):
        batches = inputs(2, torch.bfloat16)
        sums = fp32_sums(micro_grads(model, batches), 0.5)
        for batch in batches:
            model.to("cpu").to(torch.bfloat16)
            run_window(model, optimizer, [batch])
        optimizer.zero_grad()
        oracle.step(sums)
    oracle.assert_matches(optimizer)


def test_deepcopy_of_the_model_in_mid_window(backend_name):
    """A snapshot for an evaluation: it has neither gradients nor hooks, and its training is its own."""
    model = mlp(torch.bfloat16)
    optimizer = wrap(model, accumulation_steps=2, backend=backend_name)
    first, second, other = inputs(3, torch.bfloat16)
    sums = fp32_sums(micro_grads(model, [first, second]), 0.5)
    run_window(model, optimizer, [first])
    twin = copy.deepcopy(model)
    loss_of(twin, other).backward()
    assert all(param.grad.dtype is torch.bfloat16 for param in twin.parameters())
    loss_of(model, second).backward()
    _assert_grads(model.parameters(), sums)
    optimizer.step()


@pytest.mark.parametrize("flag", ["overwrite_module_params_on_conversion", "swap_module_params_on_conversion"])
def test_conversions_that_replace_parameters(backend_name, flag):
    """torch's two other ways of ``Module.to``: new parameters that no optimizer knows, or a swap, which torch itself
    refuses while anybody holds the parameter's autograd node. Either way no gradient is mistaken for another's."""
    model = mlp()
    optimizer = wrap(model, backend=backend_name)
    olds = list(model.parameters())
    was = getattr(torch.__future__, f"get_{flag}")()
    getattr(torch.__future__, f"set_{flag}")(True)
    try:
        if flag.startswith("swap"):
            with pytest.raises(RuntimeError, match="swap"):
                model.to(torch.bfloat16)
        else:
            model.to(torch.bfloat16)
            assert all(new is not old for new, old in zip(model.parameters(), olds, strict=True))
    finally:
        getattr(torch.__future__, f"set_{flag}")(was)
    dtype = torch.float32 if flag.startswith("swap") else torch.bfloat16
    loss_of(model, inputs(1, dtype)[0]).backward()
    assert all((param.grad is not None) == flag.startswith("swap") for param in olds)
    optimizer.step()


# Around the loop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_profiler(backend_name, name):
    """The step is in the trace under its name, as any optimizer's, and profiling changes no bit."""
    results = []
    for profiled in (True, False):
        torch.manual_seed(0)
        model = mlp()
        optimizer = wrap(model, name, backend=backend_name)
        batches = inputs(3)
        if profiled:
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
                run_window(model, optimizer, batches)
                optimizer.step()
                optimizer.zero_grad()
        else:
            run_window(model, optimizer, batches)
            optimizer.step()
            optimizer.zero_grad()
        results.append(snapshot(optimizer))
    assert_unmoved(*results)
    keys = {event.key for event in trace.key_averages()}
    assert "Optimizer.step#FusedAccumOptimizer.step" in keys
    assert "Optimizer.zero_grad#FusedAccumOptimizer.zero_grad" in keys
    if backend_name == "native":
        assert "fusedaccum::accumulate_" in keys


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_evaluation_in_mid_window(backend_name, name, mode):
    """Between two micro-batches: the model and the optimizer are looked at, and nothing changes."""
    model = mlp(torch.bfloat16)
    oracle = Oracle(model, name)
    optimizer = wrap(model, name, accumulation_steps=2, max_grad_norm=0.01, backend=backend_name)
    for _ in range(2):
        batches = inputs(2, torch.bfloat16)
        sums = fp32_sums(micro_grads(model, batches), 0.5)
        for batch in batches:
            run_window(model, optimizer, [batch])
            with mode():
                model(batch)
                torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
                assert optimizer.grad_norm.item() >= 0
                repr(optimizer)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    optimizer.state_dict()
        optimizer.zero_grad()
        oracle.step(sums, max_norm=0.01)
        oracle.assert_matches(optimizer)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
def test_anomaly_detection_and_saved_tensor_hooks(backend_name):
    """torch's debugging aids: the same bits, and anomaly detection still finds the NaN."""
    model = mlp(torch.bfloat16)
    optimizer = wrap(model, backend=backend_name)
    batches = inputs(2, torch.bfloat16)
    sums = fp32_sums(micro_grads(model, batches))
    with torch.autograd.detect_anomaly():
        loss_of(model, batches[0]).backward()
    with torch.autograd.graph.save_on_cpu(), torch.autograd.set_multithreading_enabled(False):
        loss_of(model, batches[1]).backward()
    _assert_grads(model.parameters(), sums)
    optimizer.step()
    optimizer.zero_grad()
    loss = F.mse_loss(torch.sqrt(model(batches[0]) * 0 - 1), torch.zeros(5, 3, dtype=torch.bfloat16))
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="returned nan values"):
        loss.backward()


def test_module_backward_hooks_and_tensor_hooks(backend_name):
    """Others' hooks run as often as under plain torch, and what they return is what is accumulated."""

    def run(wrapped):
        torch.manual_seed(0)
        model, calls = mlp(), []
        optimizer = wrap(model, backend=backend_name) if wrapped else OPTIMIZERS["adamw"](model.parameters())
        model[0].register_full_backward_hook(lambda module, given, out: calls.append("module"))
        model[0].weight.register_hook(lambda grad: calls.append("tensor") or grad * 2)
        model[2].weight.register_post_accumulate_grad_hook(lambda param: calls.append(float(param.grad.sum())))
        for batch in inputs(3):
            loss_of(model, batch.requires_grad_()).backward()
        optimizer.step()
        return calls, [param.grad.clone() for param in model.parameters()]

    results = [run(True), run(False)]
    assert results[0][0] == results[1][0]
    assert len(results[0][0]) == 9
    for ours, plain in zip(results[0][1], results[1][1], strict=True):
        assert_same_bits(ours, plain)


def test_data_parallel_wrapper_of_one_device(backend_name):
    """``nn.DataParallel`` without a GPU is the module itself."""
    model = nn.DataParallel(mlp())
    optimizer = FusedAccumOptimizer(OPTIMIZERS["adamw"](model.parameters()), backend=backend_name)
    batches = inputs(2)
    sums = fp32_sums(micro_grads(model, batches))
    run_window(model, optimizer, batches)
    _assert_grads(model.parameters(), sums)
