"""Clip, norm, and writes to ``.grad`` that must reach both."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import assert_same_bits
from models import (
    DTYPES,
    OPTIMIZERS,
    Oracle,
    fp32_sums,
    inputs,
    micro_grads,
    mlp,
    norm_of,
    norm_rtol,
    run_window,
    wrap,
)
from torch import nn

from fusedaccum import FusedAccumOptimizer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_norm", [0.0, 0.01, 1e9, math.inf])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clip_of_the_three_kinds_agrees(backend_name, name, dtype, max_norm):
    """The method, the constructor's option and torch's function: one update."""
    results = []
    for kind in ("method", "option", "torch"):
        torch.manual_seed(3)
        model = mlp(dtype)
        oracle = Oracle(model, name)
        option = max_norm if kind == "option" else None
        optimizer = wrap(model, name, max_grad_norm=option, backend=backend_name)
        for _ in range(2):
            batches = inputs(2, dtype)
            sums = fp32_sums(micro_grads(model, batches))
            run_window(model, optimizer, batches)
            if kind == "method":
                norm = optimizer.clip_grad_norm_(max_norm)
                for param, want in zip(model.parameters(), sums, strict=True):
                    assert_same_bits(param.grad, want)  # .grad is left as it is
                assert norm.item() == pytest.approx(norm_of(sums), rel=norm_rtol(32))
            elif kind == "torch":
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            oracle.step(sums, max_norm=max_norm)
        oracle.assert_matches(optimizer)
        results.append([param.detach().clone() for param in model.parameters()])
    for a, b in zip(results[0], results[1], strict=True):
        assert torch.equal(a, b)


def test_clip_counts_for_one_boundary(backend_name):
    """And dies with the gradients that it was asked for: a batch that was dropped clipped the next one."""
    weight = nn.Parameter(torch.zeros(4))
    optimizer = FusedAccumOptimizer(torch.optim.SGD([weight], lr=1.0), max_grad_norm=1.0, backend=backend_name)
    moved = []
    for requested, dropped in ((None, False), (0.5, False), (None, False), (0.5, True), (None, False)):
        before = weight.detach().clone()
        weight.sum().backward()
        if requested is not None:
            assert optimizer.clip_grad_norm_(requested).item() == 2.0
        if not dropped:
            optimizer.step()
            moved.append(torch.linalg.vector_norm(weight.detach() - before).item())
        optimizer.zero_grad()
    # torch's 1e-6 in the divisor, and fp32.
    assert moved == pytest.approx([1.0, 0.5, 1.0, 1.0], rel=1e-6)


def test_clip_inside_a_window_has_no_effect(backend_name):
    weight = nn.Parameter(torch.zeros(4))
    optimizer = FusedAccumOptimizer(torch.optim.SGD([weight], lr=1.0), accumulation_steps=2, backend=backend_name)
    weight.sum().backward()
    assert optimizer.clip_grad_norm_(0.1).item() == 1.0
    optimizer.step()
    weight.sum().backward()
    optimizer.step()
    assert torch.equal(weight, torch.full((4,), -1.0))


def test_clip_at_a_flush_is_of_the_true_gradient(backend_name):
    """The divisor's correction comes before the clip."""
    weight = nn.Parameter(torch.zeros(4))
    optimizer = FusedAccumOptimizer(
        torch.optim.SGD([weight], lr=1.0), accumulation_steps=4, max_grad_norm=1.0, backend=backend_name
    )
    weight.sum().backward()
    optimizer.step()
    assert optimizer.flush()
    assert optimizer.grad_norm.item() == 2.0
    torch.testing.assert_close(weight.detach(), torch.full((4,), -0.5), rtol=1e-6, atol=0)  # 1e-6: torch's eps


def test_error_if_nonfinite(backend_name):
    model = mlp()
    optimizer = wrap(model, backend=backend_name)
    assert optimizer.clip_grad_norm_(1.0).item() == 0.0  # no gradients
    run_window(model, optimizer, inputs(1), weight=float("inf"))
    with pytest.raises(RuntimeError, match=r"the norm of the gradients is (inf|nan)"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert not math.isfinite(optimizer.clip_grad_norm_(1.0).item())


@pytest.mark.parametrize("edit", ["mul_", "clip_grad_norm_", "clip_grad_value_", "foreach", "data", "copy_", "view"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_to_grad_are_noticed(backend_name, dtype, edit):
    """The norm follows, before and after further micro-batches."""
    model = mlp(dtype)
    optimizer = wrap(model, "sgd", backend=backend_name)
    oracle = Oracle(model, "sgd")
    batches = inputs(2, dtype)
    first, second = micro_grads(model, batches)
    run_window(model, optimizer, batches[:1])
    weights = [param.grad for param in model.parameters()]
    if edit == "mul_":
        weights[0].mul_(3)
    elif edit == "clip_grad_norm_":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    elif edit == "clip_grad_value_":
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    elif edit == "foreach":
        torch._foreach_mul_(weights, 3)
    elif edit == "data":
        weights[0].detach().mul_(3)
    elif edit == "copy_":
        weights[0].copy_(torch.ones(13, 7))
    else:
        weights[0][2:5].zero_()
    edited = [grad.clone() for grad in weights]
    assert not torch.equal(edited[0], first[0].float())
    assert optimizer.clip_grad_norm_(math.inf).item() == pytest.approx(norm_of(edited), rel=norm_rtol(32))
    run_window(model, optimizer, batches[1:])
    want = [grad + more.float() for grad, more in zip(edited, second, strict=True)]
    for param, grad in zip(model.parameters(), want, strict=True):
        assert_same_bits(param.grad, grad)
    weights[1].mul_(2)  # and once more, just before the step
    want[1] = want[1] * 2
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(norm_of(want), rel=norm_rtol(32))
    oracle.step(want)
    oracle.assert_matches(optimizer)


@pytest.mark.parametrize("then", ["another parameter's gradient", "growth", "a sparse gradient", "another .grad"])
def test_a_write_is_noticed_whatever_comes_after_it(backend_name, then):
    """Our own next write, or a new buffer, made an earlier one of somebody else's look like ours."""
    a, b, late = (nn.Parameter(torch.ones(4, 3)) for _ in range(3))
    late.requires_grad_(False)
    optimizer = FusedAccumOptimizer(torch.optim.SGD([a, b, late], lr=1.0), backend=backend_name)
    (a.sum() + b.sum()).backward()
    a.grad.mul_(3)
    want = [torch.full((4, 3), 3.0), torch.ones(4, 3)]
    if then == "another parameter's gradient":
        b.sum().backward()
        want[1] += 1
    elif then == "growth":
        late.requires_grad_(True)
        late.sum().backward()
        want.append(torch.ones(4, 3))
    elif then == "a sparse gradient":
        nn.functional.embedding(torch.tensor([1, 1]), b, sparse=True).sum().backward()
        want[1][1] += 2
    else:
        b.grad = torch.full((4, 3), 5.0)
        want[1].fill_(5.0)
    norm = optimizer.clip_grad_norm_(math.inf).item()
    assert norm == pytest.approx(norm_of(want), rel=norm_rtol(32))
    for param, grad in zip((a, b, late), want, strict=False):
        assert_same_bits(param.grad, grad)
