"""Every scheduler of torch, on the wrapped and on the wrapping optimizer: the values, the updates, the warnings."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from models import Oracle, fp32_sums, inputs, micro_grads, mlp, run_window
from torch.optim import lr_scheduler, swa_utils

from fusedaccum import FusedAccumOptimizer

N_WINDOWS = 12

SCHEDULERS = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, [lambda i: 0.9**i, lambda i: 1 / (1 + i)]),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda i: 0.95),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, step_size=3, gamma=0.5),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, milestones=[2, 7], gamma=0.1),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, factor=0.5, total_iters=4),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, start_factor=0.1, total_iters=6),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, gamma=0.8),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=5, eta_min=1e-3),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, start_factor=0.1, total_iters=4), lr_scheduler.ExponentialLR(opt, gamma=0.8)],
        milestones=[4],
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, factor=0.1, total_iters=3), lr_scheduler.ExponentialLR(opt, gamma=0.9)]
    ),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=2),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, base_lr=1e-3, max_lr=1e-2, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=3, T_mult=2),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=N_WINDOWS + 1),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, total_iters=8, power=2.0),
    "SWALR": lambda opt: swa_utils.SWALR(opt, swa_lr=1e-3, anneal_epochs=5),
}


def _make(cls, tensor_lr=False):
    """Two groups with settings of their own."""

    def make(params):
        first, *rest = params
        lr, small = (torch.tensor(1e-2), torch.tensor(1e-3)) if tensor_lr else (1e-2, 1e-3)
        settings = {"momentum": 0.9} if cls is torch.optim.SGD else {}
        return cls([{"params": [first], "lr": small}, {"params": rest}], lr=lr, weight_decay=0.01, **settings)

    return make


def _settings(optimizer):
    """All that a scheduler may have changed: copies, for a tensor is changed in place."""
    return [
        {key: copy.deepcopy(group[key]) for key in ("lr", "momentum", "betas", "initial_lr") if key in group}
        for group in optimizer.param_groups
    ]


def _advance(scheduler, i):
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0 if i > 2 else 1.0 / (1 + i))  # no progress from the third window on
    else:
        scheduler.step()


def test_no_scheduler_of_torch_is_left_out():
    assert set(SCHEDULERS) == {*lr_scheduler.__all__, "SWALR"} - {"LRScheduler"}


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("on", ["inner", "outer", "outer, tensor lr"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler(backend_name, name, on, cls):
    """lr, momentum and betas are those of the plain optimizer after each window, the update uses them, and torch says
    nothing that it does not say there."""
    model = mlp()
    make = _make(cls, tensor_lr="tensor" in on)
    oracle = Oracle(model, make)
    optimizer = FusedAccumOptimizer(make(model.parameters()), accumulation_steps=2, backend=backend_name)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        scheduler = SCHEDULERS[name](optimizer.inner if on == "inner" else optimizer)
        assert not said
        seen = [_settings(optimizer)]
        for i in range(N_WINDOWS):
            batches = inputs(2)
            oracle_grads = fp32_sums(micro_grads(model, batches), scale=0.5)
            for batch in batches:
                run_window(model, optimizer, [batch])
                if optimizer.stepped:
                    _advance(scheduler, i)
                optimizer.zero_grad()
            seen.append((_settings(optimizer), oracle_grads))
    with warnings.catch_warnings(record=True) as said_by_plain:
        warnings.simplefilter("always")
        reference = SCHEDULERS[name](oracle.optimizer)
        assert seen[0] == _settings(oracle.optimizer)
        for i, (settings, grads) in enumerate(seen[1:]):
            oracle.step(grads)
            _advance(reference, i)
            assert settings == _settings(oracle.optimizer)
    oracle.assert_matches(optimizer)
    assert [str(each.message) for each in said] == [str(each.message) for each in said_by_plain]
    assert any(settings != seen[0] for settings, _ in seen[1:])  # else it does nothing here


@pytest.mark.parametrize("on", ["inner", "outer"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_from_its_state(backend_name, name, on):
    """Saved with the optimizer after 5 windows, loaded into new ones."""
    model = mlp()
    make = _make(torch.optim.SGD)

    def build(some):
        optimizer = FusedAccumOptimizer(make(some.parameters()), backend=backend_name)
        return optimizer, SCHEDULERS[name](optimizer.inner if on == "inner" else optimizer)

    optimizer, scheduler = build(model)
    batches = inputs(N_WINDOWS)
    resumed = None
    for i, batch in enumerate(batches):
        if i == 5:
            twin = copy.deepcopy(model)
            resumed = twin, *build(twin)
            resumed[1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
            resumed[2].load_state_dict(copy.deepcopy(scheduler.state_dict()))
        for some, opt, sched in [(model, optimizer, scheduler)] + ([resumed] if resumed else []):
            run_window(some, opt, [batch])
            opt.step()
            opt.zero_grad()
            _advance(sched, i)
    assert _settings(resumed[1]) == _settings(optimizer)
    for param, want in zip(resumed[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(param, want)


@pytest.mark.parametrize("on", ["inner", "outer"])
def test_a_step_of_the_scheduler_too_early_is_said_as_in_torch(backend_name, on):
    """Before any step of the optimizer: torch's own warning, once."""
    said = []
    for wrapped in (True, False):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if wrapped:
            wrapper = FusedAccumOptimizer(optimizer, backend=backend_name)
            optimizer = wrapper if on == "outer" else optimizer
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("always")
            lr_scheduler.ExponentialLR(optimizer, gamma=0.5).step()
        said.append([str(record.message) for record in records])
    assert said[0] == said[1]
    assert "Detected call of `lr_scheduler.step()` before `optimizer.step()`" in said[0][0]
