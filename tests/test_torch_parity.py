"""Against plain torch: every configuration that torch tests its own optimizers with, and its state_dict both ways."""

from __future__ import annotations

import copy

import pytest
import torch
from models import U32, assert_unmoved, snapshot
from torch import nn
from torch.testing._internal.common_optimizers import optim_db

from fusedaccum import FusedAccumOptimizer
from fusedaccum.rules import rule_for

N_STEPS = 20


def _configurations():
    """(class, kwargs) for all that torch has, and a few for which it has none on the CPU."""
    for info in optim_db:
        cls = info.optim_cls
        if cls not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
            continue
        kwargs = [each.kwargs for each in info.optim_inputs_func(device="cpu")]
        kwargs.append({"lr": torch.tensor(1e-3), "weight_decay": 0.1})
        if cls is not torch.optim.SGD:
            kwargs.append({"betas": (0.5, 0.99), "eps": 1e-3, "amsgrad": True, "maximize": True, "weight_decay": 0.1})
        else:
            kwargs.append({"lr": 0.01, "momentum": 0.5, "dampening": 0.1, "maximize": True, "weight_decay": 0.1})
        if cls is torch.optim.Adam:
            kwargs.append({"weight_decay": 0.1, "decoupled_weight_decay": True})
        for each in kwargs:
            yield pytest.param(cls, each, id=f"{cls.__name__}-{each}")


CONFIGURATIONS = list(_configurations())


def test_torch_still_has_these_configurations():
    """An empty list would pass."""
    assert len(CONFIGURATIONS) >= 25


def _params():
    return [nn.Parameter(torch.randn(shape)) for shape in [(13, 7), (13,), (), (70, 33)]]


def _bound(wants, starts, n_steps):
    """How far two fp32 runs with the same gradients may be apart.

    Each step rounds the parameter once in either run (weight decay once more): 2 * 2 * U32 * |param|. The update is a
    handful of fp32 operations on either side; Adam's quotient magnifies the error of its numerator by at most
    1 / sqrt(1 - beta2) = 32: 2^9 * U32 of the distance moved, for both runs together. Errors add up over the steps.
    """
    size = max(float(max(want.abs().max(), start.abs().max())) for want, start in zip(wants, starts, strict=True))
    moved = max(float((want - start).abs().max()) for want, start in zip(wants, starts, strict=True))
    return n_steps * U32 * (4 * size + 2**9 * moved)


def _train(params, optimizer, n_steps, seed):
    """Gradients that do not depend on the parameters: an error is not fed back."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n_steps):
        loss = sum((param * torch.randn(param.shape, generator=generator)).sum() for param in params)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _assert_close(params, wants, starts, n_steps):
    bound = _bound([want.detach() for want in wants], starts, n_steps)
    for param, want, start in zip(params, wants, starts, strict=True):
        torch.testing.assert_close(param.detach(), want.detach(), rtol=0, atol=bound)
        assert not torch.equal(want, start)


def _assert_state_close(ours, plain):
    """Averages of the same gradients: a few roundings a step, of values that no step makes larger than 2^4."""
    assert ours.keys() == plain.keys()
    for key, held in plain.items():
        assert ours[key].keys() == held.keys()
        for name, value in held.items():
            if value is None:
                assert ours[key][name] is None
                continue
            assert ours[key][name].dtype == value.dtype
            atol = 0 if name == "step" else N_STEPS * 4 * U32 * 2**4
            torch.testing.assert_close(ours[key][name], value, rtol=0, atol=atol)


@pytest.mark.parametrize(("cls", "kwargs"), CONFIGURATIONS)
def test_the_same_parameters_after_20_steps(backend_name, cls, kwargs):
    params = _params()
    starts = [param.detach().clone() for param in params]
    plain = copy.deepcopy(params)
    reference = cls(plain, **copy.deepcopy(kwargs), foreach=False)
    optimizer = FusedAccumOptimizer(cls(params, **copy.deepcopy(kwargs)), backend=backend_name)
    assert rule_for(optimizer.inner) is not None
    _train(plain, reference, N_STEPS, seed=1)
    _train(params, optimizer, N_STEPS, seed=1)
    _assert_close(params, plain, starts, N_STEPS)
    _assert_state_close(optimizer.state_dict()["state"], reference.state_dict()["state"])
    for group, want in zip(optimizer.state_dict()["param_groups"], reference.state_dict()["param_groups"], strict=True):
        assert {**group, "foreach": False} == want


@pytest.mark.parametrize(("cls", "kwargs"), CONFIGURATIONS)
def test_differentiable_is_refused(cls, kwargs):
    """Whatever else is set."""
    params = _params()
    with pytest.raises(ValueError, match=r"param_groups\[0\] has differentiable=True"):
        FusedAccumOptimizer(cls(params, **kwargs, differentiable=True))


@pytest.mark.parametrize(
    ("cls", "option"),
    [(cls, option) for cls in (torch.optim.Adam, torch.optim.AdamW) for option in ("foreach", "fused", "capturable")]
    + [(torch.optim.SGD, option) for option in ("foreach", "fused")],
)
def test_ways_of_computing_the_same_are_accepted(backend_name, cls, option):
    results = []
    for kwargs in ({}, {option: True}):
        torch.manual_seed(0)
        params = _params()
        optimizer = FusedAccumOptimizer(cls(params, lr=0.01, **kwargs), backend=backend_name)
        _train(params, optimizer, 3, seed=1)
        results.append(params)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("cls", "kwargs"), CONFIGURATIONS)
@pytest.mark.parametrize("direction", ["plain to ours", "ours to plain"])
@pytest.mark.parametrize("n_before", [0, 1, 7])
def test_state_dict_interchange(backend_name, cls, kwargs, direction, n_before):
    """Train with one, go on with the other: as if there had been one only."""
    params = _params()
    starts = [param.detach().clone() for param in params]
    plain = copy.deepcopy(params)
    reference = cls(plain, **copy.deepcopy(kwargs))
    _train(plain, reference, n_before, seed=1)
    _train(plain, reference, 5, seed=2)

    def make(ours):
        inner = cls(params, **copy.deepcopy(kwargs))
        return FusedAccumOptimizer(inner, backend=backend_name) if ours else inner

    first = make(direction == "ours to plain")
    _train(params, first, n_before, seed=1)
    saved = copy.deepcopy(first.state_dict())
    if direction == "ours to plain":
        first.remove()
    second = make(direction == "plain to ours")
    second.load_state_dict(saved)
    _train(params, second, 5, seed=2)
    _assert_close(params, plain, starts, n_before + 5)
    _assert_state_close(second.state_dict()["state"], reference.state_dict()["state"])


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_state_of_older_torch(backend_name, cls):
    """``step`` as a number, options that did not exist yet."""
    params = _params()
    kwargs = {"lr": 0.01} if cls is not torch.optim.SGD else {"lr": 0.01, "momentum": 0.9}
    inner = cls(params, **kwargs)
    _train(params, inner, 3, seed=1)
    old = copy.deepcopy(inner.state_dict())
    for state in old["state"].values():
        if "step" in state:
            state["step"] = int(state["step"].item())
    for group in old["param_groups"]:
        group.pop("decoupled_weight_decay", None)
        group.pop("fused", None)
    twin = copy.deepcopy(params)
    starts = [param.detach().clone() for param in params]
    other = cls(twin, **kwargs)
    other.load_state_dict(inner.state_dict())
    _train(twin, other, 5, seed=2)
    optimizer = FusedAccumOptimizer(inner, backend=backend_name)
    optimizer.load_state_dict(old)
    _train(params, optimizer, 5, seed=2)
    _assert_close(params, twin, starts, 5)


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_wrapping_an_optimizer_that_has_state(backend_name, cls):
    """After a warm-up with the plain one: its state is taken over, and given back."""
    kwargs = {"lr": 0.01} if cls is not torch.optim.SGD else {"lr": 0.01, "momentum": 0.9}
    params = _params()
    starts = [param.detach().clone() for param in params]
    plain = copy.deepcopy(params)
    reference, inner = cls(plain, **kwargs), cls(params, **kwargs)
    _train(plain, reference, 9, seed=1)
    _train(params, inner, 9, seed=1)
    optimizer = FusedAccumOptimizer(inner, backend=backend_name)
    for opt, some in ((optimizer, params), (reference, plain)):
        _train(some, opt, 3, seed=2)
    inner = optimizer.remove()
    for opt, some in ((inner, params), (reference, plain)):
        _train(some, opt, 3, seed=3)
    _assert_close(params, plain, starts, 15)
    _assert_state_close(inner.state_dict()["state"], reference.state_dict()["state"])


class Subclass(torch.optim.AdamW):
    """What users derive: its own ``step`` must run."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad)


def test_a_subclass_has_no_fused_rule(backend_name):
    params = [nn.Parameter(torch.randn(3)) for _ in range(2)]
    optimizer = FusedAccumOptimizer(Subclass(params), backend=backend_name)
    before = snapshot(optimizer)
    (params[0].sum() + 2 * params[1].sum()).backward()
    optimizer.step()
    assert_unmoved([[before[0][0] - 1, before[0][1] - 2], []], [[p.detach() for p in params], []])
