"""torch functions that read or write gradients, optimizer hooks, and torch.distributed.checkpoint's state_dict."""

from __future__ import annotations

import copy
import math
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
    run_window,
    snapshot,
    wrap,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import optimizer as torch_optimizer

# Functions of torch.nn.utils -------------------------------------------------------------------------------------


def _loss_of_grads(sums, norm_type):
    return float(torch.cat([grad.double().flatten() for grad in sums]).norm(norm_type))


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clip_grad_norm(backend_name, name, norm_type, foreach):
    """Of any norm: an fp32 norm of a bf16 model's gradients, and a step that sees the clipped ones."""
    model = mlp(torch.bfloat16)
    oracle = Oracle(model, name)
    optimizer = wrap(model, name, accumulation_steps=2, backend=backend_name)
    max_norm = 0.01
    for _ in range(3):
        first, second = batches = inputs(2, torch.bfloat16)
        sums = fp32_sums(micro_grads(model, batches), 0.5)
        run_window(model, optimizer, [first])
        loss_of(model, second).backward()
        norm = clip_grad_norm_(model.parameters(), max_norm, norm_type=norm_type, foreach=foreach)
        assert norm.dtype is torch.float32
        want = _loss_of_grads(sums, norm_type)
        n_elems = sum(param.numel() for param in model.parameters())
        # torch sums n powers in fp32, in an order of its own, and takes a root; pow is good to a few ulp.
        assert norm.item() == pytest.approx(want, rel=(n_elems + 16) * U32)
        assert want > max_norm
        clipped = [param.grad.clone() for param in model.parameters()]
        for grad, total in zip(clipped, sums, strict=True):
            coef = max_norm / (want + 1e-6)
            torch.testing.assert_close(grad.double(), total.double() * coef, rtol=(n_elems + 20) * U32, atol=0)
        oracle.step(clipped)
        optimizer.step()
        optimizer.zero_grad()
        oracle.assert_matches(optimizer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clip_grad_value(backend_name, name, foreach, dtype):
    """And ``max_grad_norm`` on top of it: the norm is that of the values after the clip, by one more pass."""
    model = mlp(dtype)
    oracle = Oracle(model, name)
    optimizer = wrap(model, name, max_grad_norm=0.05, backend=backend_name)
    for _ in range(3):
        batches = inputs(2, dtype)
        sums = fp32_sums(micro_grads(model, batches))
        run_window(model, optimizer, batches)
        clip_grad_value_(model.parameters(), 0.02, foreach=foreach)
        clipped = [grad.clamp(-0.02, 0.02) for grad in sums]
        assert any(not torch.equal(a, b) for a, b in zip(sums, clipped, strict=True))
        for param, want in zip(model.parameters(), clipped, strict=True):
            assert_same_bits(param.grad, want)
        norm = oracle.step(clipped, max_norm=0.05)
        assert norm > 0.05
        optimizer.step()
        assert optimizer.grad_norm.item() == pytest.approx(norm, rel=2**-20)
        optimizer.zero_grad()
        oracle.assert_matches(optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_get_total_norm_and_clip_grads_with_norm(backend_name, name):
    """The two halves of ``clip_grad_norm_``."""
    model = mlp(torch.bfloat16)
    oracle = Oracle(model, name)
    optimizer = wrap(model, name, backend=backend_name)
    for _ in range(2):
        batches = inputs(2, torch.bfloat16)
        sums = fp32_sums(micro_grads(model, batches))
        run_window(model, optimizer, batches)
        norm = get_total_norm([param.grad for param in model.parameters()])
        assert norm.dtype is torch.float32
        for param, want in zip(model.parameters(), sums, strict=True):
            assert_same_bits(param.grad, want)
        clip_grads_with_norm_(model.parameters(), 0.01, norm)
        oracle.step([param.grad.clone() for param in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        oracle.assert_matches(optimizer)


def test_error_if_nonfinite(backend_name):
    """torch's own error, with gradients and window as they were."""
    model = mlp(torch.bfloat16)
    optimizer = wrap(model, accumulation_steps=2, backend=backend_name)
    run_window(model, optimizer, inputs(1, torch.bfloat16), weight=math.inf)
    loss_of(model, inputs(1, torch.bfloat16)[0]).backward()
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    before = snapshot(optimizer)
    optimizer.step()
    assert optimizer.stepped
    assert optimizer.found_inf.item() == 1
    assert_unmoved([before[0], []], [snapshot(optimizer)[0], []])


# Hooks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_pre_hook_may_change_gradients(backend_name, name):
    """The wrapper's, before a step looks at them: what it writes is what the step sees. The wrapped one's sees a fused
    step's unclipped accumulators, and whatever else an optimizer's own step is given."""
    model = mlp()
    oracle = Oracle(model, name)
    optimizer = wrap(model, name, backend=backend_name)

    def halve(opt, args, kwargs):
        for group in opt.param_groups:
            for param in group["params"]:
                param.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    for _ in range(2):
        batches = inputs(2)
        sums = fp32_sums(micro_grads(model, batches), 0.5)
        run_window(model, optimizer, batches)
        optimizer.step()
        optimizer.zero_grad()
        oracle.step(sums)
        oracle.assert_matches(optimizer)


def test_hooks_can_be_removed_and_reordered(backend_name):
    model = mlp()
    optimizer = wrap(model, backend=backend_name)
    seen = []
    handle = optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    optimizer.register_state_dict_post_hook(lambda opt, state: seen.append("second"))
    optimizer.register_state_dict_post_hook(lambda opt, state: seen.append("first"), prepend=True)
    load = optimizer.register_load_state_dict_pre_hook(lambda opt, state: seen.append("load"))
    optimizer.step()
    handle.remove()
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    load.remove()
    optimizer.load_state_dict(state)
    assert seen == ["post", "first", "second", "load"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hooks_on_all_optimizers(backend_name, name):
    """torch's global hooks see the wrapper at each call, and a wrapped optimizer where its own ``step`` runs."""
    model = mlp()
    optimizer = wrap(model, name, accumulation_steps=2, backend=backend_name)
    seen = []
    handles = [
        torch_optimizer.register_optimizer_step_pre_hook(lambda opt, args, kwargs: seen.append(("pre", opt))),
        torch_optimizer.register_optimizer_step_post_hook(lambda opt, args, kwargs: seen.append(("post", opt))),
    ]
    try:
        run_window(model, optimizer, inputs(2))
    finally:
        for handle in handles:
            handle.remove()
    own = [("pre", optimizer.inner), ("post", optimizer.inner)] if name == "rmsprop" else []
    assert seen == [("pre", optimizer), ("post", optimizer), ("pre", optimizer), *own, ("post", optimizer)]


# torch.distributed.checkpoint.state_dict -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("flatten", [False, True])
def test_distributed_state_dict(backend_name, name, dtype, steps, flatten):
    """Read from one wrapper, set in a new one, by the parameters' names: it goes on with the same bits.

    torch makes the new one step once with zeros, so that there is a state to fill. Counted as a micro-batch, that moved
    every boundary of ``accumulation_steps`` by one.
    """
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model = mlp(dtype)
    optimizer = wrap(model, name, accumulation_steps=steps, backend=backend_name)

    def window(some, opt, batches):
        run_window(some, opt, batches)
        if steps is None:
            opt.step()
        assert opt.stepped
        opt.zero_grad()

    window(model, optimizer, inputs(3, dtype))
    before = snapshot(optimizer)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    assert_unmoved(before, snapshot(optimizer))
    key = "state.0.weight.master_param"
    held = saved if flatten else {f"state.0.weight.{k}": v for k, v in saved["state"]["0.weight"].items()}
    assert (key in held) == (dtype is torch.bfloat16)
    assert all(value.dtype is torch.float32 for k, value in held.items() if k.startswith("state.0.weight."))

    twin = copy.deepcopy(model)
    resumed = wrap(twin, name, accumulation_steps=steps, backend=backend_name)
    set_optimizer_state_dict(twin, resumed, saved, options=options)
    assert_unmoved(before, snapshot(resumed))
    for _ in range(2):
        batches = inputs(3, dtype)
        for some, opt in ((model, optimizer), (twin, resumed)):
            window(some, opt, batches)
    assert_unmoved(snapshot(optimizer), snapshot(resumed))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [None, 2])
def test_distributed_state_dict_before_the_first_step(backend_name, name, steps):
    """torch makes the state exist, as for a plain optimizer; parameters, learning rates and window stay."""
    model = mlp(torch.bfloat16)
    oracle = Oracle(model, "sgd" if name == "sgd" else name)
    optimizer = wrap(model, name, accumulation_steps=steps, backend=backend_name)
    start = [param.detach().clone() for param in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved_model, saved = get_state_dict(model, optimizer)
    assert set(saved["state"]) == {n for n, _ in model.named_parameters()}
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert all(torch.equal(param, was) for param, was in zip(model.parameters(), start, strict=True))
    assert all(param.grad is None for param in model.parameters())
    batches = inputs(2, torch.bfloat16)
    sums = fp32_sums(micro_grads(model, batches), 1.0 if steps is None else 0.5)
    run_window(model, optimizer, batches)
    for param, want in zip(model.parameters(), sums, strict=True):
        assert_same_bits(param.grad, want)
    if steps is None:
        optimizer.step()
    assert optimizer.stepped
    for param in oracle.params:  # torch does the same to a plain optimizer
        param.grad = torch.zeros_like(param)
    for group in oracle.optimizer.param_groups:
        group["lr"] = 0.0
    oracle.optimizer.step()
    for group in oracle.optimizer.param_groups:
        group["lr"] = 1e-2
    oracle.step(sums)
    oracle.assert_matches(optimizer)
    twin = mlp(torch.bfloat16)
    set_state_dict(
        twin,
        wrap(twin, name, accumulation_steps=steps, backend=backend_name),
        model_state_dict=saved_model,
        optim_state_dict=saved,
    )


def test_a_learning_rate_of_zero_is_not_taken_for_torchs_first_step(backend_name):
    """A warm-up that starts at 0: its micro-batches have gradients of their own, and count."""
    model = mlp()
    optimizer = wrap(model, accumulation_steps=2, backend=backend_name)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    stepped = []
    for batch in inputs(4):
        run_window(model, optimizer, [batch])
        stepped.append(optimizer.stepped)
        optimizer.zero_grad()
    assert stepped == [False, True, False, True]
