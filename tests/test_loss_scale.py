"""Loss scaling: the optimizer's own, ``fusedaccum.GradScaler``, and torch's."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from models import mlp, wrap
from torch import nn

import fusedaccum
from fusedaccum import LossScale

POWERS = LossScale(init_scale=2.0**10, growth_interval=2)


def batches(n: int, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    return [torch.randn(5, 7).to(dtype) for _ in range(n)]


def loss_of(model: nn.Module, batch: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return (model(batch).float() ** 2).mean() * factor


def same_parameters(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


# The optimizer's own --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("scale", [2.0**10, POWERS])
def test_grad_is_the_true_gradient(backend_name, steps, scale):
    """A power of two scales exactly: in fp32, with a scale or without, the same bits, in .grad and after the step."""
    plain = mlp()
    scaled = copy.deepcopy(plain)
    one = wrap(plain, accumulation_steps=steps, max_grad_norm=0.1, backend=backend_name)
    other = wrap(scaled, accumulation_steps=steps, max_grad_norm=0.1, loss_scale=scale, backend=backend_name)
    for batch in batches(6, torch.float32):
        one.backward(loss_of(plain, batch))
        other.backward(loss_of(scaled, batch))
        for p, q in zip(plain.parameters(), scaled.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
    assert same_parameters(plain, scaled)
    assert one.grad_norm.item() == other.grad_norm.item()


def test_small_fp16_gradients_survive(backend_name):
    """What underflows in fp16 without a scale."""
    model = mlp(torch.float16)
    batch = batches(1)[0]
    unscaled = torch.autograd.grad(loss_of(model, batch, 1e-7), list(model.parameters()))
    assert sum(int(g.count_nonzero()) for g in unscaled) == 0
    optimizer = wrap(model, "sgd", loss_scale=2.0**16, backend=backend_name)
    optimizer.backward(loss_of(model, batch, 1e-7))
    twin = copy.deepcopy(model).float()
    expected = torch.autograd.grad(loss_of(twin, batch.float(), 1e-7), list(twin.parameters()))
    for param, grad in zip(model.parameters(), expected, strict=True):
        # The fp16 forward and backward round to 11 bits, some ten times in a row.
        torch.testing.assert_close(param.grad, grad, rtol=0.02, atol=1e-9)


@pytest.mark.parametrize("steps", [None, 2])
def test_dynamic_follows_torch(backend_name, steps):
    """The scale after each window is torch.amp.GradScaler's, over a long mix of good and bad windows."""
    model = mlp()
    settings = {"init_scale": 2.0**20, "growth_factor": 1.5, "backoff_factor": 0.25, "growth_interval": 3}
    optimizer = wrap(model, accumulation_steps=steps, loss_scale=LossScale(**settings), backend=backend_name)
    scaler = torch.amp.GradScaler("cpu", **settings)
    scaler.scale(torch.ones(()))  # makes its tensors
    generator = torch.Generator().manual_seed(3)
    for _ in range(40):
        is_bad = bool(torch.rand((), generator=generator) < 0.25)
        before = [p.clone() for p in model.parameters()]
        for i in range(steps or 1):
            factor = math.inf if is_bad and i == 0 else 1.0
            optimizer.backward(loss_of(model, batches(1, torch.float32)[0], factor))
            optimizer.step()
        torch._amp_update_scale_(
            scaler._scale, scaler._growth_tracker, torch.tensor(float(is_bad)),
            settings["growth_factor"], settings["backoff_factor"], settings["growth_interval"],
        )  # fmt: skip
        assert optimizer.loss_scale.item() == scaler.get_scale()
        assert optimizer.found_inf.item() == optimizer.skipped.item() == is_bad
        assert is_bad == all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        optimizer.zero_grad()


def test_the_scale_is_in_the_state_dict(backend_name):
    model = mlp()
    optimizer = wrap(model, loss_scale="dynamic", backend=backend_name)
    assert optimizer.loss_scale.item() == 2.0**16
    for _ in range(3):
        optimizer.backward(loss_of(model, batches(1, torch.float32)[0], math.inf))
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.loss_scale.item() == 2.0**13
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    twin = wrap(copy.deepcopy(model), loss_scale="dynamic", backend=backend_name)
    twin.load_state_dict(torch.load(file, weights_only=True))
    assert twin.loss_scale.item() == 2.0**13
    assert twin.stats()["skipped"].item() == 3


@pytest.mark.parametrize("loss_scale", [0, -1.0, math.nan, math.inf, "static", True, [1.0]])
def test_a_bad_scale_is_refused(loss_scale):
    with pytest.raises(ValueError, match=r"loss_scale is .*; accepted: None, a finite number above 0, 'dynamic'"):
        wrap(mlp(), loss_scale=loss_scale)


@pytest.mark.parametrize(
    ("name", "value"),
    [("init_scale", 0), ("growth_factor", 0.5), ("backoff_factor", 0), ("backoff_factor", 2), ("growth_interval", 1.5),
     ("growth_interval", 0), ("init_scale", "big"), ("growth_factor", math.nan)],
)  # fmt: skip
def test_a_bad_setting_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}; accepted"):
        LossScale(**{name: value})


# GradScaler -----------------------------------------------------------------------------------------------------------


def loop(model, optimizer, scaler, windows, clip=None, steps=4, outer=False):
    """torch's documented loop. ``outer``: step and update once a window; else after every micro-batch."""
    for window in windows:
        for i, batch in enumerate(window):
            scaler.scale(loss_of(model, batch, 1.0 if not outer else 1.0 / steps)).backward()
            if not outer or i + 1 == len(window):
                if clip is not None and (outer or i + 1 == len(window)):
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_ours_and_torchs_give_the_same(backend_name, dtype, clip):
    """The loop of torch's documentation, with one class in the place of the other."""
    ours, theirs = mlp(dtype), None
    theirs = copy.deepcopy(ours)
    windows = [batches(4, dtype) for _ in range(5)]
    windows[2][1][0, 0] = math.inf
    scalers = []
    for model, cls in ((ours, fusedaccum.GradScaler), (theirs, torch.amp.GradScaler)):
        scaler = cls("cpu", init_scale=2.0**8, growth_interval=2)
        loop(model, wrap(model, backend=backend_name), scaler, windows, clip, outer=True)
        scalers.append(scaler)
    # Powers of two: unscaling at the add and at the end round alike.
    assert same_parameters(ours, theirs)
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**9  # up, down, up
    assert scalers[0].state_dict() == scalers[1].state_dict()


def test_no_pass_over_the_gradients(backend_name, monkeypatch):
    """Neither torch's unscale nor a second measuring of the accumulator."""
    model = mlp(torch.float16)
    optimizer = wrap(model, backend=backend_name)
    scaler = fusedaccum.GradScaler("cpu", init_scale=2.0**8)
    scaler.scale(loss_of(model, batches(1)[0])).backward()

    def forbidden(*args, **kwargs):
        raise AssertionError("a pass over the gradients")

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", forbidden)
    for arena in optimizer._registry.arenas.values():
        monkeypatch.setattr(arena, "measure", forbidden)
    grads = [p.grad.clone() for p in model.parameters()]
    scaler.unscale_(optimizer)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.stepped
    # torch's own does need its pass: the patch is in the way.
    optimizer.zero_grad()
    plain = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    plain.scale(loss_of(model, batches(1)[0])).backward()
    with pytest.raises(AssertionError, match="a pass"):
        plain.unscale_(optimizer)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_step_and_update_after_every_micro_batch(backend_name, clip):
    """With accumulation_steps the scale moves at boundaries, and a skipped window costs no count."""
    ours, theirs = mlp(), None
    theirs = copy.deepcopy(ours)
    windows = [batches(4, torch.float32) for _ in range(6)]
    windows[1][2][0, 0] = math.inf
    inner = wrap(ours, accumulation_steps=4, backend=backend_name)
    scaler = fusedaccum.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    loop(ours, inner, scaler, windows, clip)
    reference = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    loop(theirs, wrap(theirs, backend=backend_name), reference, windows, clip, outer=True)
    assert same_parameters(ours, theirs)
    assert scaler.get_scale() == reference.get_scale()
    assert inner.stats()["windows"].item() == 6
    assert inner.stats()["skipped"].item() == 1


def test_torchs_own_with_accumulation_steps_is_refused(backend_name):
    model = mlp()
    optimizer = wrap(model, accumulation_steps=4, backend=backend_name)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, batches(1, torch.float32)[0])).backward()
    with pytest.raises(
        RuntimeError, match=r"GradScaler.step was given an optimizer with accumulation_steps=4; accepted"
    ):
        scaler.step(optimizer)
    optimizer.reset()


def test_a_loss_scaled_by_hand_is_unscaled_in_torchs_way(backend_name):
    model = mlp()
    twin = copy.deepcopy(model)
    batch = batches(1, torch.float32)[0]
    for m, cls in ((model, fusedaccum.GradScaler), (twin, torch.amp.GradScaler)):
        optimizer, scaler = wrap(m, backend=backend_name), cls("cpu", init_scale=2.0**8)
        scaler.scale(torch.ones(()))
        (loss_of(m, batch) * scaler.get_scale()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert same_parameters(model, twin)


def test_some_scaled_and_some_not_is_refused(backend_name):
    model = mlp()
    optimizer, scaler = wrap(model, backend=backend_name), fusedaccum.GradScaler("cpu")
    scaler.scale(loss_of(model, batches(1, torch.float32)[0])).backward()
    loss_of(model, batches(1, torch.float32)[0]).backward()
    with pytest.raises(RuntimeError, match="some did not; accepted: all or none"):
        scaler.step(optimizer)


def test_two_scales_are_refused(backend_name):
    model = mlp()
    optimizer, scaler = wrap(model, loss_scale=8.0, backend=backend_name), fusedaccum.GradScaler("cpu")
    scaler.scale(loss_of(model, batches(1, torch.float32)[0])).backward()
    with pytest.raises(RuntimeError, match="a loss_scale of its own; accepted: one of the two"):
        scaler.step(optimizer)


@pytest.mark.parametrize("cls", [fusedaccum.GradScaler, torch.amp.GradScaler])
def test_case_06_unscale_on_every_micro_batch(backend_name, cls):
    """torch's own error, with the gradients as they were (Lightning 4427)."""
    model = mlp()
    optimizer, scaler = wrap(model, backend=backend_name), cls("cpu")
    scaler.scale(loss_of(model, batches(1, torch.float32)[0])).backward()
    scaler.unscale_(optimizer)
    grads = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("cls", [fusedaccum.GradScaler, torch.amp.GradScaler])
def test_case_10_no_gradient_at_all(backend_name, cls):
    model = mlp()
    optimizer, scaler = wrap(model, backend=backend_name), cls("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)


def test_other_optimizers_are_treated_as_torch_treats_them():
    one, other = mlp(), None
    other = copy.deepcopy(one)
    for model, cls in ((one, fusedaccum.GradScaler), (other, torch.amp.GradScaler)):
        optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.01), cls("cpu", init_scale=2.0**4)
        torch.manual_seed(1)
        for batch in batches(3, torch.float32):
            scaler.scale(loss_of(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert same_parameters(one, other)


def test_several_losses_and_reentrant_checkpointing(backend_name):
    """A backward inside of the backward is scaled too, and scale() takes whatever torch's takes."""
    model, plain = mlp(), None
    plain = copy.deepcopy(model)
    batch = batches(1, torch.float32)[0].requires_grad_()

    def forward(m):
        return torch.utils.checkpoint.checkpoint(m, batch, use_reentrant=True)

    scaler = fusedaccum.GradScaler("cpu", init_scale=2.0**6)
    optimizer = wrap(model, backend=backend_name)
    losses = scaler.scale([forward(model).square().mean(), (forward(model).sum(),)])
    torch.autograd.backward([losses[0], losses[1][0]])
    optimizer._capture.flush()
    (forward(plain).square().mean() + forward(plain).sum()).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    scaler.step(optimizer)


def test_a_failed_backward_leaves_no_scale_behind(backend_name):
    model = mlp()
    optimizer = wrap(model, backend=backend_name)
    scaler = fusedaccum.GradScaler("cpu", init_scale=2.0**6)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        scaler.scale(Fails.apply(loss_of(model, batches(1, torch.float32)[0]))).backward()
    optimizer.zero_grad()
    batch = batches(1, torch.float32)[0]
    expected = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
    loss_of(model, batch).backward()
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param.grad, grad)


def test_each_micro_batch_is_divided_by_its_own_scale(backend_name):
    """Whatever moves the scale inside a window: torch's one pass at the end would divide by the last one."""
    model = mlp()
    scaler = fusedaccum.GradScaler("cpu", init_scale=2.0**6)
    window = batches(2, torch.float32)
    grads = [torch.autograd.grad(loss_of(model, batch), list(model.parameters())) for batch in window]
    optimizer = wrap(model, backend=backend_name)
    for batch in window:
        scaler.scale(loss_of(model, batch)).backward()
        scaler._scale.mul_(0.5)
    optimizer._capture.flush()
    for param, first, second in zip(model.parameters(), *grads, strict=True):
        assert torch.equal(param.grad, first + second)


@pytest.mark.parametrize("given", ["grad_scale", "found_inf", "both", "neither"])
@pytest.mark.parametrize("bad", [0.0, 1.0])
def test_case_11_found_inf_without_grad_scale_and_the_reverse(backend_name, given, bad):
    """What torch's fused optimizers take from a caller of their own: each is honoured by itself (pytorch 95847)."""
    model = mlp()
    twin = copy.deepcopy(model)
    optimizer = wrap(model, max_grad_norm=0.1, backend=backend_name)
    plain = wrap(twin, max_grad_norm=0.1, backend=backend_name)
    scaled = given in ("grad_scale", "both")
    batch = batches(1, torch.float32)[0]
    loss_of(model, batch, 8.0 if scaled else 1.0).backward()
    loss_of(twin, batch).backward()
    if scaled:
        optimizer.grad_scale = torch.tensor(8.0)
    if given in ("found_inf", "both"):
        optimizer.found_inf = torch.tensor(bad)
    before = copy.deepcopy(model)
    optimizer.step()
    plain.step()
    is_skipped = bad != 0 and given in ("found_inf", "both")
    assert optimizer.found_inf.item() == optimizer.skipped.item() == is_skipped
    assert same_parameters(model, before if is_skipped else twin)
    del optimizer.found_inf
    optimizer.grad_scale = None
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()
    assert optimizer.skipped.item() == 0
