"""Hooks, copies, checkpoints and master weights of the wrapper."""

from __future__ import annotations

import copy
import io
import pickle

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
    snapshot,
    wrap,
)
from torch import nn

from fusedaccum import FusedAccumOptimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_hooks(backend_name, name):
    """The wrapper's at each call, the wrapped optimizer's at each update."""
    model = mlp()
    optimizer = wrap(model, name, accumulation_steps=2, backend=backend_name)
    seen = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append(("pre", opt)))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append(("post", opt)))
    optimizer.inner.register_step_pre_hook(lambda opt, args, kwargs: seen.append(("inner pre", opt)))
    optimizer.inner.register_step_post_hook(lambda opt, args, kwargs: seen.append(("inner post", opt)))
    run_window(model, optimizer, inputs(2))
    outer, inner = optimizer, optimizer.inner
    assert seen == [
        ("pre", outer),
        ("post", outer),
        ("pre", outer),
        ("inner pre", inner),
        ("inner post", inner),
        ("post", outer),
    ]


def test_state_dict_hooks(backend_name):
    model = mlp()
    optimizer = wrap(model, backend=backend_name)
    run_window(model, optimizer, inputs(1))
    optimizer.step()
    seen = []

    def add(opt, state_dict):
        state_dict["note"] = 1
        return state_dict

    def take(opt, state_dict):
        seen.append(state_dict.pop("note"))
        return state_dict

    optimizer.register_state_dict_pre_hook(lambda opt: seen.append("pre"))
    optimizer.register_state_dict_post_hook(add)
    optimizer.register_load_state_dict_pre_hook(take)
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append("post"))
    before = snapshot(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["pre", 1, "post"]
    assert_unmoved(before, snapshot(optimizer))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(backend_name, name, dtype, how):
    """A copy wraps parameters of its own, with the same options, and goes on with the same bits."""
    model = mlp(dtype)
    optimizer = wrap(
        model,
        name,
        accumulation_steps=2,
        max_grad_norm=0.5,
        bucket_bytes=100,
        master_weights=True,
        backend=backend_name,
    )
    run_window(model, optimizer, inputs(4, dtype))
    optimizer.zero_grad()
    if how == "deepcopy":
        twin, other = copy.deepcopy((model, optimizer))
    elif how == "pickle":
        twin, other = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        file = io.BytesIO()
        torch.save((model, optimizer), file)
        file.seek(0)
        twin, other = torch.load(file, weights_only=False)
    assert repr(other) == repr(optimizer)
    assert other._options == optimizer._options
    assert next(twin.parameters()) is other.param_groups[0]["params"][0]
    before = snapshot(optimizer)
    assert_unmoved(before, snapshot(other))
    batches = inputs(2, dtype)
    run_window(twin, other, batches)
    assert_unmoved(before, snapshot(optimizer))
    run_window(model, optimizer, batches)
    assert_unmoved(snapshot(other), snapshot(optimizer))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda d: d["param_groups"].append(copy.deepcopy(d["param_groups"][0])),
            "different number of",
        ),
        (lambda d: d["param_groups"][0]["params"].pop(), r"param_groups\[0\] has 3 there and 4 here"),
        (lambda d: d["state"][0].update(exp_avg=torch.zeros(5)), r"exp_avg of shape \(5,\).*accepted: \(13, 7\)"),
        (lambda d: d["state"][3].update(master_param=torch.zeros(5)), r"master_param of shape \(5,\)"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused(backend_name, spoil, message):
    model = mlp(torch.bfloat16)
    optimizer = wrap(model, backend=backend_name)
    run_window(model, optimizer, inputs(1, torch.bfloat16))
    optimizer.step()
    before = snapshot(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    spoil(saved)
    saved["param_groups"][0]["lr"] = 0.5
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert_unmoved(before, snapshot(optimizer))
    assert optimizer.param_groups[0]["lr"] == 1e-2
    run_window(model, optimizer, inputs(1, torch.bfloat16))
    optimizer.step()
    assert optimizer.found_inf.item() == 0


def test_a_state_dict_without_state_starts_afresh(backend_name):
    """As torch: what it does not mention is not there."""
    model = mlp()
    optimizer = wrap(model, backend=backend_name)
    empty = copy.deepcopy(optimizer.state_dict())
    run_window(model, optimizer, inputs(2))
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(empty)
    assert len(optimizer.state) == 0
    oracle = Oracle(model)
    batch = inputs(1)
    sums = fp32_sums(micro_grads(model, batch))
    run_window(model, optimizer, batch)
    optimizer.step()
    oracle.step(sums)
    oracle.assert_matches(optimizer)
    assert optimizer.state[model[0].weight]["step"].item() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", ["load_state_dict", "copy_", "data.copy_"])
def test_writes_to_a_parameter_reach_its_master(backend_name, name, dtype, how):
    """A model loaded between two steps was overwritten by the old masters."""
    model = mlp(dtype)
    optimizer = wrap(model, name, backend=backend_name)
    run_window(model, optimizer, inputs(1, dtype))
    optimizer.step()
    optimizer.zero_grad()
    other = mlp(dtype)
    kept = model[0].bias.detach().clone()
    master = optimizer.state[model[0].bias]["master_param"].clone()
    with torch.no_grad():
        other[0].bias.copy_(kept)  # as it was: its master keeps the bits that 16 bits do not have
    if how == "load_state_dict":
        model.load_state_dict(other.state_dict())
    else:
        for param, new in zip(model.parameters(), other.parameters(), strict=True):
            with torch.no_grad():
                (param if how == "copy_" else param.data).copy_(new)
        if how == "data.copy_":  # leaves no trace
            optimizer.sync_masters()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    run_window(model, optimizer, inputs(1, dtype))
    optimizer.step()
    for param, new in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param, new)
        assert torch.equal(optimizer.state[param]["master_param"].to(dtype), new)
    assert torch.equal(optimizer.state[model[0].bias]["master_param"], master)
    assert not torch.equal(master, master.to(dtype).float())


def test_masters_catch_updates_too_small_for_16_bits(backend_name):
    """1 - 1e-3 * 2^-4 is 1 in bf16; after 100 of them it is not."""
    for masters in ("auto", True, False):
        weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = FusedAccumOptimizer(
            torch.optim.SGD([weight], lr=2.0**-12), master_weights=masters, backend=backend_name
        )
        for _ in range(64):
            weight.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(weight.float(), torch.full((3,), 1.0 if masters is False else 1 - 2.0**-6))
        assert ("master_param" in optimizer.state[weight]) == (masters is not False)


# Not float16: in it Adam's eps is 0 and its update 0 / 0, in plain torch.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("again", [True, False])
def test_the_optimizer_that_remove_returns_trains_on(backend_name, name, dtype, again):
    """torch's AdamW refused the fp32 averages of a 16-bit parameter, and a later wrapper took the old master for the
    parameter's newer value."""
    model = mlp(dtype)
    optimizer = wrap(model, name, backend=backend_name)
    for _ in range(2):
        run_window(model, optimizer, inputs(1, dtype))
        optimizer.step()
        optimizer.zero_grad()
    # What torch makes of the same state: it loads it in the parameter's dtype.
    twin = copy.deepcopy(model)
    plain = OPTIMIZERS[name](twin.parameters())
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    inner = optimizer.remove()
    for batch in inputs(3, dtype):
        for each, opt in ((model, inner), (twin, plain)):
            loss_of(each, batch).backward()
            opt.step()
            opt.zero_grad()
    for param, want in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(param, want)
        assert all(value.dtype is dtype for key, value in inner.state[param].items() if key != "step")
    if again:
        optimizer = FusedAccumOptimizer(inner, backend=backend_name)
        oracle = Oracle(model, lambda params: torch.optim.SGD(params, lr=0.0))
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        run_window(model, optimizer, inputs(1, dtype))
        optimizer.step()
        oracle.assert_matches(optimizer)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_momentum_that_was_never_filled_is_given_back_as_none(backend_name):
    """The first window was skipped: plain SGD took the zeros for a buffer, and damped the first gradient."""
    model = mlp()
    optimizer = FusedAccumOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, dampening=0.5), backend=backend_name
    )
    run_window(model, optimizer, inputs(1), weight=float("nan"))
    optimizer.step()
    assert optimizer.found_inf.item() == 1
    optimizer.zero_grad()
    for state in optimizer.state_dict()["state"].values():
        assert state == {"momentum_buffer": None}
    inner = optimizer.remove()
    for state in inner.state.values():
        assert state == {"momentum_buffer": None}
    batch = inputs(1)
    want = [param.detach() - grad for param, grad in zip(model.parameters(), micro_grads(model, batch)[0], strict=True)]
    loss_of(model, batch[0]).backward()
    inner.step()
    for param, value in zip(model.parameters(), want, strict=True):
        assert torch.equal(param, value)


def test_a_removed_wrapper_says_so(backend_name):
    """Its ``step`` did nothing, without a word."""
    model = mlp()
    optimizer = wrap(model, accumulation_steps=2, backend=backend_name)
    optimizer.remove()
    for call in (optimizer.step, optimizer.zero_grad, optimizer.flush, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match="was removed; use the optimizer that remove"):
            call()


def test_momentum_that_was_never_filled_stays_so_when_buffers_grow(backend_name):
    """A parameter that joins later has all buffers made anew: the first update after that was damped."""
    first, late = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    late.requires_grad_(False)
    inner = torch.optim.SGD([first, late], lr=1.0, momentum=0.9, dampening=0.5)
    optimizer = FusedAccumOptimizer(inner, backend=backend_name)
    (first * float("inf")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    late.requires_grad_(True)
    (first.sum() + late.sum()).backward()
    optimizer.step()
    assert torch.equal(first, torch.full((3,), -1.0))
    assert torch.equal(late, torch.full((3,), -1.0))
    optimizer.step()  # 0.9 * 1 + 0.5 * 1
    torch.testing.assert_close(first.detach(), torch.full((3,), -2.4), rtol=2**-22, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_are_live_when_only_empty_parameters_are_new(backend_name, dtype):
    """Only the counts grow then: those in ``optimizer.state`` stayed where they were."""
    model = mlp(dtype)
    optimizer = wrap(model, accumulation_steps=1, backend=backend_name)
    run_window(model, optimizer, inputs(1, dtype))
    optimizer.zero_grad()
    empty = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
    optimizer.add_param_group({"params": [empty]})
    for batch in inputs(2, dtype):
        (loss_of(model, batch) + empty.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state[empty]["step"].item() == 2
    assert all(optimizer.state[param]["step"].item() == 3 for param in model.parameters())
