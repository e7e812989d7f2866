"""torch's optimizers that have no fused rule: gradients accumulated and clipped in fp32, steps by their own code.

That code runs on fp32 masters, so that a bf16 parameter's master must be, bit for bit, what the same optimizer makes of
an fp32 parameter given the same fp32 gradients. What is left to derive is how near those are to the exact ones.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from helpers import assert_same_bits
from models import U32, norm_of, norm_rtol
from torch import nn

from fusedaccum import FusedAccumOptimizer
from fusedaccum.rules import rule_for

N_STEPS = 20
K = 4
SHAPES = [(13, 7), (5, 3, 2), (11,), ()]

OPTIMIZERS = {
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.5, centered=True, weight_decay=0.01),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-1, lr_decay=0.1, initial_accumulator_value=0.5),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=1e-2, weight_decay=0.1),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=1e-2, weight_decay=0.1),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=1.0, maximize=True),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=1e-2, t0=5, weight_decay=0.1),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2, weight_decay=0.1),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=1e-2),
    "Muon": lambda params: torch.optim.Muon(params, lr=1e-2, weight_decay=0.1),
}
REFUSED = {"LBFGS": "evaluates the closure several times", "SparseAdam": "takes sparse gradients only"}
FUSED = {"Adam", "AdamW", "SGD"}


def test_no_optimizer_of_torch_is_left_out():
    classes = {
        name
        for name in torch.optim.__all__
        if isinstance(getattr(torch.optim, name), type) and name not in ("Optimizer", "lr_scheduler", "swa_utils")
    }
    assert classes == set(OPTIMIZERS) | set(REFUSED) | FUSED


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    """LBFGS calls its closure, and so the backward, many times a step: no window could say which gradients are its own.
    SparseAdam is refused before a first gradient could be of the wrong kind. Neither has touched a parameter."""
    param = nn.Parameter(torch.zeros(3))
    with pytest.raises(
        ValueError, match=rf"optimizer is a torch\.optim\.{name}, which cannot be wrapped: .*{REFUSED[name]}"
    ):
        FusedAccumOptimizer(getattr(torch.optim, name)([param]))
    assert param.grad_dtype is torch.float32


def _params(name, dtype):
    shapes = [shape for shape in SHAPES if name != "Muon" or len(shape) == 2] + ([(4, 9)] if name == "Muon" else [])
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def _twins(params):
    """The same values in fp32."""
    return [nn.Parameter(param.detach().to(torch.float32, copy=True)) for param in params]


def _window(params, generator, size=1.0, step=None):
    """``K`` backwards, each followed by ``step``; returns the gradients' exact mean.

    The gradients do not depend on the parameters: an error is not fed back.
    """
    means = [torch.zeros(param.shape, dtype=torch.float64) for param in params]
    for _ in range(K):
        coefs = [(size * torch.randn(param.shape, generator=generator)).to(param.dtype) for param in params]
        sum((param * coef).sum() for param, coef in zip(params, coefs, strict=True)).backward()
        for mean, coef in zip(means, coefs, strict=True):
            mean += coef.double() / K
        if step is not None:
            step()
    return means


def _gradients_seen(optimizer):
    """What the wrapped optimizer's own ``step`` is given, through torch's own hook."""
    seen = []

    def note(inner, args, kwargs):
        seen.append([param.grad.clone() for group in inner.param_groups for param in group["params"]])

    optimizer.inner.register_step_pre_hook(note)
    return seen


def _masters(optimizer, params):
    return [optimizer.state[param].get("master_param", param.detach()) for param in params]


def _assert_as_plain(optimizer, params, plain, twins):
    """Masters and every state to the bit; parameters their masters, rounded to nearest."""
    for param, master, twin in zip(params, _masters(optimizer, params), twins, strict=True):
        assert_same_bits(master, twin.detach(), "master")
        assert_same_bits(param.detach(), twin.detach().to(param.dtype), "param")
        held = {key: value for key, value in optimizer.state[param].items() if key != "master_param"}
        want = plain.state[twin]
        assert held.keys() == want.keys()
        for key, value in want.items():
            if isinstance(value, torch.Tensor):
                assert_same_bits(held[key], value, key)
            else:
                assert held[key] == value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_follows_the_same_optimizer_in_fp32(backend_name, name, max_norm, dtype):
    """Over 20 windows of 4 micro-batches.

    Gradients: each micro-batch's is exact in ``dtype``, and times 1/4 exact in fp32, so that a mean of 4 is off by 3
    roundings of a number below 5, more than randn gives here. Clipped ones are multiplied by a coefficient that has
    the relative error of the norm and 3 roundings more (divide, to fp32, multiply).
    """
    params = _params(name, dtype)
    twins = _twins(params)
    optimizer = FusedAccumOptimizer(
        OPTIMIZERS[name](params), accumulation_steps=K, max_grad_norm=max_norm, backend=backend_name, bucket_bytes=100
    )
    assert rule_for(optimizer.inner) is None
    plain = OPTIMIZERS[name](twins)
    seen = _gradients_seen(optimizer)
    generator = torch.Generator().manual_seed(1)
    starts = [twin.detach().clone() for twin in twins]
    n_elems = sum(param.numel() for param in params)
    for _ in range(N_STEPS):
        exact = _window(params, generator, step=optimizer.step)
        optimizer.zero_grad()
        assert optimizer.stepped
        norm = norm_of(exact)
        assert max_norm is None or norm > max_norm
        coef = 1.0 if max_norm is None else max_norm / (norm + 1e-6)
        rtol = 0.0 if max_norm is None else norm_rtol(n_elems) + 3 * U32
        for grad, want, twin in zip(seen[-1], exact, twins, strict=True):
            assert grad.dtype is torch.float32
            torch.testing.assert_close(grad.double(), want * coef, rtol=rtol, atol=3 * U32 * 5 * coef)
            twin.grad = grad
        plain.step()
    assert len(seen) == N_STEPS
    _assert_as_plain(optimizer, params, plain, twins)
    assert all(not torch.equal(twin, start) for twin, start in zip(twins, starts, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("through", ["memory", "a file"])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_checkpoint_goes_on_with_the_same_bits(backend_name, name, through, max_norm):
    """bf16, saved after 7 of 14 windows, loaded into a new model and optimizer."""

    def build(params):
        return FusedAccumOptimizer(
            OPTIMIZERS[name](params), accumulation_steps=K, max_grad_norm=max_norm, backend=backend_name
        )

    def train(params, optimizer, seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(7):
            _window(params, generator, step=optimizer.step)
            optimizer.zero_grad()

    params = _params(name, torch.bfloat16)
    optimizer = build(params)
    train(params, optimizer, 1)
    file = io.BytesIO()
    torch.save({"params": params, "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    if through == "a file":
        saved = torch.load(file, weights_only=True)
    else:
        saved = copy.deepcopy({"params": params, "optimizer": optimizer.state_dict()})
    train(params, optimizer, 2)

    again = [nn.Parameter(param.detach()) for param in saved["params"]]
    resumed = build(again)
    resumed.load_state_dict(saved["optimizer"])
    train(again, resumed, 2)
    for one, other in zip(params, again, strict=True):
        assert_same_bits(other.detach(), one.detach())
        assert optimizer.state[one].keys() == resumed.state[other].keys()
        for key, value in optimizer.state[one].items():
            if isinstance(value, torch.Tensor):
                assert_same_bits(resumed.state[other][key], value, key)
            else:
                assert resumed.state[other][key] == value


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_masters_each_update_is_rounded(backend_name, name):
    """``master_weights=False``: fp32 state, and a parameter that is the rounded fp32 update of itself."""
    params = _params(name, torch.bfloat16)
    twins = _twins(params)
    optimizer = FusedAccumOptimizer(OPTIMIZERS[name](params), master_weights=False, backend=backend_name)
    plain = OPTIMIZERS[name](twins)
    seen = _gradients_seen(optimizer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        _window(params, generator)
        optimizer.step()
        optimizer.zero_grad()
        for twin, grad in zip(twins, seen[-1], strict=True):
            twin.grad = grad
        plain.step()
        for param, twin in zip(params, twins, strict=True):
            assert "master_param" not in optimizer.state[param]
            with torch.no_grad():
                twin.copy_(twin.to(torch.bfloat16))
            assert_same_bits(param.detach(), twin.detach().to(torch.bfloat16))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_window_with_an_inf_leaves_everything(backend_name, name):
    """Parameters, masters, states and step counts keep their bits; the next window is as if it had not been."""
    params = _params(name, torch.bfloat16)
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    optimizers = [
        FusedAccumOptimizer(OPTIMIZERS[name](some), max_grad_norm=1.0, backend=backend_name) for some in (params, twins)
    ]
    for i in range(4):
        for some, optimizer in zip((params, twins), optimizers, strict=True):
            if i == 2 and some is params:
                _window(some, torch.Generator().manual_seed(9), size=float("inf"))
                optimizer.step()
                assert optimizer.found_inf.item() == 1
                optimizer.zero_grad()
            _window(some, torch.Generator().manual_seed(i))
            optimizer.step()
            assert optimizer.found_inf.item() == 0
            optimizer.zero_grad()
    for param, twin in zip(params, twins, strict=True):
        assert_same_bits(param.detach(), twin.detach())
        for key, value in optimizers[1].state[twin].items():
            if isinstance(value, torch.Tensor):
                assert_same_bits(optimizers[0].state[param][key], value, key)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_of_masters_alone(backend_name, name):
    """Its only window was skipped: the optimizer's own state is not there yet, and some look for it by name."""
    params = _params(name, torch.bfloat16)
    optimizer = FusedAccumOptimizer(OPTIMIZERS[name](params), backend=backend_name)
    _window(params, torch.Generator().manual_seed(9), size=float("inf"))
    optimizer.step()
    optimizer.zero_grad()
    again = [nn.Parameter(param.detach().clone()) for param in params]
    resumed = FusedAccumOptimizer(OPTIMIZERS[name](again), backend=backend_name)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all("master_param" in resumed.state[param] for param in again)
    for some, each in ((params, optimizer), (again, resumed)):
        _window(some, torch.Generator().manual_seed(1))
        each.step()
    for one, other in zip(params, again, strict=True):
        assert_same_bits(other.detach(), one.detach())
        assert optimizer.state[one].keys() == resumed.state[other].keys() > {"master_param"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_plain_optimizer_goes_on_from_its_checkpoint(backend_name, name):
    """fp32 parameters: our state_dict loaded into the plain optimizer, and the plain one's into ours, the same bits."""
    for ours_first in (True, False):
        torch.manual_seed(0)
        params = _params(name, torch.float32)
        twins = _twins(params)
        reference = OPTIMIZERS[name](twins)

        def make(params, ours):
            inner = OPTIMIZERS[name](params)
            return FusedAccumOptimizer(inner, backend=backend_name) if ours else inner

        first = make(params, ours_first)
        for seed in range(3):
            for some, optimizer in ((params, first), (twins, reference)):
                _window(some, torch.Generator().manual_seed(seed))
                optimizer.step()
                optimizer.zero_grad()
        saved = copy.deepcopy(first.state_dict())
        if ours_first:
            first.remove()
        second = make(params, not ours_first)
        second.load_state_dict(saved)
        for seed in range(3, 6):
            for some, optimizer in ((params, second), (twins, reference)):
                _window(some, torch.Generator().manual_seed(seed))
                optimizer.step()
                optimizer.zero_grad()
        for param, twin in zip(params, twins, strict=True):
            assert_same_bits(param.detach(), twin.detach())
