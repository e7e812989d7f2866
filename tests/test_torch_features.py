"""torch features around the model: checkpointing, autocast, functional calls, parametrizations, averaging.

Everything is compared with the same loop under plain torch, or with the gradients that autograd gives a copy.
"""

from __future__ import annotations

import copy

import pytest
import torch
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
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


def _assert_grads(params, wants):
    for param, want in zip(params, wants, strict=True):
        if want is None:
            assert param.grad is None
        else:
            assert_same_bits(param.grad, want)


# Activation checkpointing ----------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Blocks with dropout, so that what is computed again must be the same."""

    def __init__(self, kind, dtype):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(7, 7), nn.Dropout(0.5), nn.Tanh())  # noqa: E731
        self.blocks = nn.Sequential(*(block() for _ in range(4))).to(dtype)
        self.kind = kind

    def forward(self, x):
        if self.kind == "sequential":
            return checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)
        if self.kind == "nested":
            inner = lambda y: checkpoint(self.blocks[1], self.blocks[0](y), use_reentrant=False)  # noqa: E731
            return self.blocks[2:](checkpoint(inner, x, use_reentrant=False))
        if self.kind is None:
            return self.blocks(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.kind == "reentrant")
        return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "sequential", "nested"])
def test_activation_checkpointing(backend_name, kind, dtype):
    """The reentrant kind runs a backward of its own inside of the backward: more than one graph task a micro-batch."""
    model = Checkpointed(kind, dtype)
    plain = copy.deepcopy(model)
    plain.kind = None
    optimizer = wrap(model, backend=backend_name, bucket_bytes=100)
    batches = [batch.requires_grad_() for batch in inputs(3, dtype)]
    grads = []
    for i, batch in enumerate(batches):
        torch.manual_seed(i)
        loss_of(model, batch).backward()
        torch.manual_seed(i)
        grads.append(torch.autograd.grad(loss_of(plain, batch), list(plain.parameters())))
    _assert_grads(model.parameters(), fp32_sums(grads))
    assert optimizer.clip_grad_norm_(1.0).item() > 0


# Autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_enabled", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_autocast_with_fp32_parameters(backend_name, name, cache_enabled):
    """The parameters' gradients come in fp32 out of the casts: bit for bit what plain torch accumulates."""
    model = mlp()
    plain = copy.deepcopy(model)
    oracle = Oracle(model, name)
    optimizer = wrap(model, name, backend=backend_name)
    for _ in range(3):
        plain.load_state_dict(model.state_dict())
        plain.zero_grad()
        for batch in inputs(4):
            for each in (model, plain):
                with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
                    out = each(batch)
                    assert out.dtype is torch.bfloat16
                    loss = out.float().square().mean() / 4
                loss.backward()
        wants = [param.grad for param in plain.parameters()]
        _assert_grads(model.parameters(), wants)
        oracle.step(wants)
        optimizer.step()
        optimizer.zero_grad()
        oracle.assert_matches(optimizer)
        assert all("master_param" not in state for state in optimizer.state.values())


# Functional calls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_functional_call(backend_name, dtype):
    """With the module's own parameters it is a micro-batch, with others not; torch.func's transforms add nothing."""
    model = mlp(dtype)
    optimizer = wrap(model, backend=backend_name)
    own = dict(model.named_parameters())
    others = {name: param.detach().clone().requires_grad_() for name, param in own.items()}
    batches = inputs(3, dtype)
    want = fp32_sums(micro_grads(model, batches[:2]))
    loss = lambda params, x: (torch.func.functional_call(model, params, (x,)).float() ** 2).mean()  # noqa: E731
    loss(own, batches[0]).backward()
    loss(others, batches[2]).backward()
    functional = torch.func.grad(loss)({name: param.detach() for name, param in own.items()}, batches[2])
    torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(
        {name: param.detach() for name, param in own.items()}, torch.stack(batches)
    )
    loss_of(model, batches[1]).backward()
    _assert_grads(model.parameters(), want)
    for name, other in others.items():
        assert other.grad.dtype is dtype
        assert functional[name].shape == other.shape
    optimizer.step()
    assert all(param in optimizer.state for param in own.values())


# Parametrizations ------------------------------------------------------------------------------------------------


PARAMETRIZATIONS = {
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral_norm": parametrizations.spectral_norm,
    "own": lambda module: parametrize.register_parametrization(module, "weight", _Symmetric()),
}


class _Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", PARAMETRIZATIONS)
def test_parametrizations(backend_name, kind, name):
    """Of fp32 parameters: gradients reach the original ones, with torch's cache and without."""
    model = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
    for layer in (model[0], model[2]):
        PARAMETRIZATIONS[kind](layer)
    plain = copy.deepcopy(model)
    reference = OPTIMIZERS[name](plain.parameters())
    optimizer = wrap(model, name, backend=backend_name)
    for window in range(2):
        with torch.no_grad():  # so that an error of the update is not fed back
            for param, other in zip(model.parameters(), plain.parameters(), strict=True):
                other.copy_(param)
        for some, opt in ((model, optimizer), (plain, reference)):
            torch.manual_seed(window)
            for batch in inputs(2):
                if window:
                    with parametrize.cached():
                        loss_of(some, batch).backward()
                else:
                    loss_of(some, batch).backward()
            grads = [param.grad.clone() for param in some.parameters()]
            if some is model:
                wants, before = grads, [param.detach().clone() for param in model.parameters()]
            opt.step()
            opt.zero_grad()
        for grad, want, param, start in zip(grads, wants, model.parameters(), before, strict=True):
            assert_same_bits(grad, want)
            assert not torch.equal(param, start)


def test_a_parametrization_registered_after_wrapping(backend_name):
    """One that keeps the parameter keeps it trained; one that makes new ones leaves the old one behind, as in torch."""
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    first, second = model[0].weight, model[1].weight
    optimizer = wrap(model, "sgd", backend=backend_name)
    parametrize.register_parametrization(model[0], "weight", _Symmetric())
    parametrizations.weight_norm(model[1])
    assert model[0].parametrizations.weight.original is first
    starts = first.detach().clone(), second.detach().clone()
    loss_of(model, inputs(1)[0]).backward()
    assert second.grad is None
    assert model[1].parametrizations.weight.original1.grad is not None
    optimizer.step()
    assert not torch.equal(first, starts[0])
    assert torch.equal(second, starts[1])


# Averaging -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["mean", "ema"])
def test_averaged_model(backend_name, kind, dtype):
    """It copies the model after wrapping, and sees every update."""
    model = nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Linear(13, 3)).to(dtype)
    optimizer = wrap(model, accumulation_steps=2, backend=backend_name)
    average = AveragedModel(model, **({"multi_avg_fn": get_ema_multi_avg_fn(0.5)} if kind == "ema" else {}))
    seen = []
    for batch in inputs(8, dtype):
        run_window(model, optimizer, [batch])
        if optimizer.stepped:
            average.update_parameters(model)
            seen.append([param.detach().double() for param in model.parameters()])
        optimizer.zero_grad()
    assert len(seen) == 4
    weights = [1 / 8, 1 / 8, 1 / 4, 1 / 2] if kind == "ema" else [1 / 4] * 4
    eps = torch.finfo(dtype).eps
    for i, param in enumerate(average.module.parameters()):
        want = sum(weight * values[i] for weight, values in zip(weights, seen, strict=True))
        # Each update of the average rounds two or three times, in the parameter's dtype.
        bound = 4 * 3 * eps * max(float(values[i].abs().max()) for values in seen)
        torch.testing.assert_close(param.detach().double(), want, rtol=0, atol=bound)
        assert param.grad is None
    before = snapshot(optimizer)
    update_bn(inputs(2, dtype), average)
    assert_unmoved(before, snapshot(optimizer))
