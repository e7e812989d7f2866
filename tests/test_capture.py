"""Interception of gradients: what arrives, when, and what is left behind. In both modes, before and behind the node."""

from __future__ import annotations

import copy
import math
import threading

import pytest
import torch
from helpers import assert_same_bits
from models import DTYPES, fp32_sums, inputs, loss_of, micro_grads, mlp, norm_of, norm_rtol, run_window, wrap
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedaccum import FusedAccumOptimizer, capture


@pytest.fixture(params=["through node", "behind node"])
def mode(request, monkeypatch):
    """The default, and what stands in for it where AccumulateGrad does not skip undefined gradients."""
    if request.param == "behind node":
        monkeypatch.setattr(capture, "node_skips_undefined", lambda: False)
    return request.param


def test_this_torch_skips_undefined_gradients():
    """If it does not, every other test here runs behind the node twice."""
    assert capture.node_skips_undefined()


class Zoo(nn.Module):
    """Every kind of parameter and gradient that autograd delivers."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0))
        self.embedding = nn.Embedding(9, 12, sparse=True)
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.randn(1, 3))  # its gradient is expanded
        self.tied = nn.Linear(3, 3, bias=False)
        self.turned = nn.Parameter(torch.randn(3, 3).t())
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x):
        x = self.embedding(x).view(-1, 3, 2, 2)  # unique ids: nothing to coalesce
        x = self.conv(x.contiguous(memory_format=torch.channels_last)).flatten(1)[:, :3]
        x = self.frozen(torch.tanh(x)) * self.scale
        x = checkpoint(lambda y: torch.tanh(self.tied(y)), x, use_reentrant=False)
        x = torch.tanh(self.tied(x) @ self.turned) + self.row
        return torch.cat([x.sum(0), self.empty * 2])


def _zoo_batches():
    return [torch.randperm(9)[:4] for _ in range(3)]


def _zoo_sums(model, batches):
    grads = micro_grads(model, batches)
    return fp32_sums([[g.to_dense() if g is not None and g.is_sparse else g for g in row] for row in grads])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**30])
def test_the_sum_whatever_the_bucket(backend_name, mode, dtype, bucket_bytes):
    """The plain fp32 sum, bit for bit, and its norm."""
    model = Zoo().to(dtype)
    model.conv.to(memory_format=torch.channels_last)
    optimizer = wrap(model, bucket_bytes=bucket_bytes, backend=backend_name)
    batches = _zoo_batches()
    sums = _zoo_sums(model, batches)
    run_window(model, optimizer, batches)
    for (name, param), want in zip(model.named_parameters(), sums, strict=True):
        if want is None:
            assert param.grad is None, name
            continue
        assert param.grad.dtype is torch.float32
        assert param.grad.shape == param.shape
        assert_same_bits(param.grad.contiguous(), want.contiguous(), name)
        if param.numel():
            # .grad has the parameter's own strides.
            assert param.grad.stride() == param.stride() or param.dim() == 0 or 1 in param.shape
    assert model.frozen.weight.grad is None
    assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(norm_of(sums), rel=norm_rtol(32))


@pytest.mark.parametrize("bucket_bytes", [1, 2**30])
def test_second_gradient_of_one_backward_is_added(backend_name, mode, bucket_bytes):
    """A reentrant checkpoint delivers a shared weight's gradients one by one, in one bucket."""
    weight = nn.Parameter(torch.tensor([2.0, 3.0]))
    optimizer = FusedAccumOptimizer(torch.optim.SGD([weight], lr=1.0), bucket_bytes=bucket_bytes, backend=backend_name)
    x = torch.ones(2, requires_grad=True)
    for _ in range(3):
        x = checkpoint(lambda y: y * weight, x, use_reentrant=True)
    x.sum().backward()
    assert torch.equal(weight.grad, 3 * weight.detach() ** 2)
    assert optimizer._capture._tasks == set()


def test_hooks_of_others(backend_name, mode):
    """Tensor hooks run before and may change the gradient; post-accumulate hooks run after and see the sum. Those that
    were there before the wrapper, and those that came later."""
    model = mlp(torch.bfloat16)
    weight, bias = model[0].weight, model[0].bias
    seen = []
    order = []
    weight.register_hook(lambda grad: order.append("tensor") or grad * 2)
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    optimizer = wrap(model, backend=backend_name)
    bias.register_hook(lambda grad: grad * 4)
    bias.register_post_accumulate_grad_hook(lambda p: order.append("post") or seen.append(p.grad.clone()))
    batches = inputs(2, torch.bfloat16)
    grads = micro_grads(model, batches)  # of a copy, without the hooks
    sums = fp32_sums(grads)
    run_window(model, optimizer, batches)
    assert_same_bits(weight.grad, sums[0] * 2)
    assert_same_bits(bias.grad, sums[1] * 4)
    of_weight = [each for each in seen if each.dim() == 2]
    of_bias = [each for each in seen if each.dim() == 1]
    assert torch.equal(of_weight[0], grads[0][0].float() * 2)
    assert torch.equal(of_weight[1], sums[0] * 2)
    assert torch.equal(of_bias[0], grads[0][1].float() * 4)
    assert torch.equal(of_bias[1], sums[1] * 4)
    assert order.count("tensor") == order.count("post") == 2


def test_a_post_accumulate_hook_may_drop_the_gradient(backend_name, mode):
    """``p.grad = None`` in the hook: torch's optimizer-in-backward idiom."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    FusedAccumOptimizer(torch.optim.SGD([weight], lr=1.0), backend=backend_name)

    def drop(param):
        param.grad = None

    handle = weight.register_post_accumulate_grad_hook(drop)
    weight.sum().backward()
    assert weight.grad is None
    handle.remove()
    optimizer = FusedAccumOptimizer(torch.optim.SGD([weight], lr=1.0), backend=backend_name)
    weight.sum().backward()
    assert torch.equal(weight.grad, torch.ones(3))
    optimizer.remove()


class Fail(torch.autograd.Function):
    """Passes on, and fails in the backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


@pytest.mark.parametrize("bucket_bytes", [1, 2**30])
def test_a_backward_that_fails_leaves_what_torch_leaves(backend_name, mode, bucket_bytes):
    """Gradients that arrived before the failure count; later ``model.zero_grad()`` drops them all."""

    def failing(model, batch):
        with pytest.raises(ZeroDivisionError):
            model[2](Fail.apply(torch.tanh(model[0](batch)))).square().mean().backward()

    model = mlp()
    plain = copy.deepcopy(model)
    optimizer = wrap(model, bucket_bytes=bucket_bytes, backend=backend_name)
    first, second = inputs(2)
    for each in (model, plain):
        loss_of(each, first).backward()
        failing(each, second)
    for param, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same_bits(param.grad, want.grad)
    assert not torch.equal(plain[2].weight.grad, micro_grads(plain, [first])[0][2])  # else nothing was tried
    model.zero_grad()
    failing(model, second)
    model.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    run_window(model, optimizer, [first])
    for param, want in zip(model.parameters(), micro_grads(model, [first])[0], strict=True):
        assert_same_bits(param.grad, want)
    assert optimizer._capture._tasks == set()


def test_a_nested_backward(backend_name, mode):
    """A hook that runs another backward over the same parameters, in the middle of one."""
    model = mlp()
    optimizer = wrap(model, backend=backend_name)
    outer, inner = inputs(2)
    hidden = torch.tanh(model[0](outer))

    @torch.enable_grad()
    def another(grad):
        loss_of(model, inner).backward()

    hidden.register_hook(another)
    model[2](hidden).square().mean().backward()
    want = micro_grads(model, [outer, inner])
    for param, grads in zip(model.parameters(), zip(*want, strict=True), strict=True):
        # Two addends: the order does not matter.
        assert_same_bits(param.grad, grads[0] + grads[1])
    assert optimizer._capture._tasks == set()
    assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(norm_of(fp32_sums(want)), rel=norm_rtol(32))


def test_backward_with_inputs(backend_name, mode):
    """Only the parameters that are asked for get a gradient."""
    model = mlp()
    optimizer = wrap(model, backend=backend_name)
    batch = inputs(1)[0]
    want = micro_grads(model, [batch])[0]
    for n in (1, 2):
        torch.autograd.backward(loss_of(model, batch), inputs=[model[0].weight, model[2].bias])
        assert_same_bits(model[0].weight.grad, want[0] * n)
        assert_same_bits(model[2].bias.grad, want[3] * n)
        assert model[0].bias.grad is None
        assert model[2].weight.grad is None
    before = model[0].weight.grad.clone()
    torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
    assert torch.equal(model[0].weight.grad, before)
    assert model[0].bias.grad is None
    optimizer.step()
    assert model[0].bias not in optimizer.state


def test_retain_graph_and_undefined_gradients(backend_name, mode):
    """A second backward through the same graph adds again; an undefined gradient is no gradient."""

    class Undefined(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            return a * 1

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    a, b = (nn.Parameter(torch.ones(3, dtype=torch.float16)) for _ in range(2))
    optimizer = FusedAccumOptimizer(torch.optim.SGD([a, b], lr=1.0), backend=backend_name)
    loss = Undefined.apply(a, b).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(a.grad, torch.full((3,), 2.0))
    assert b.grad is None
    optimizer.step()
    assert torch.equal(b, torch.ones(3, dtype=torch.float16))


def test_backward_in_another_thread(backend_name, mode):
    model = mlp()
    optimizer = wrap(model, backend=backend_name)
    batches = inputs(2)
    for batch in batches:
        thread = threading.Thread(target=loss_of(model, batch).backward)
        thread.start()
        thread.join()
    for param, want in zip(model.parameters(), fp32_sums(micro_grads(model, batches)), strict=True):
        assert_same_bits(param.grad, want)
    optimizer.step()
    assert optimizer.grad_norm.item() > 0


class SharedWorkspace(torch.autograd.Function):
    """``x @ weight``, whose weight gradient is always the same tensor, as some fused layers return it."""

    workspace = torch.zeros(4, 4)

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        torch.mm(x.t(), grad, out=SharedWorkspace.workspace)
        return grad @ weight.t(), SharedWorkspace.workspace


def test_a_gradient_that_its_producer_writes_to_again(backend_name, mode):
    """It waited in the bucket while the next layer wrote its own gradient over it. torch copies such a gradient."""
    weights = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    x = torch.randn(2, 4)

    def loss(apply):
        y = x
        for weight in weights:
            y = apply(y, weight)
        return y.square().mean()

    want = torch.autograd.grad(loss(torch.matmul), weights)
    optimizer = FusedAccumOptimizer(torch.optim.SGD(weights, lr=1.0), backend=backend_name)
    loss(SharedWorkspace.apply).backward()
    for weight, grad in zip(weights, want, strict=True):
        assert_same_bits(weight.grad, grad)
    assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(norm_of(want), rel=norm_rtol(16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("later", [True, False])
def test_frozen_and_unfrozen(backend_name, mode, dtype, later):
    """A layer that is frozen when it is wrapped, unfrozen and frozen again."""
    model = mlp(dtype)
    model[0].requires_grad_(not later)
    optimizer = wrap(model, backend=backend_name)
    grads = []
    for i, batch in enumerate(inputs(4, dtype)):
        model[0].requires_grad_((i % 2 == 1) == later)
        grads += micro_grads(model, [batch])
        loss_of(model, batch).backward()
    for param, want in zip(model.parameters(), fp32_sums(grads), strict=True):
        assert_same_bits(param.grad, want)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(norm_of(fp32_sums(grads)), rel=norm_rtol(32))


def test_both_modes_step_to_the_same_bits(backend_name, monkeypatch):
    results = []
    for skips in (True, False):
        monkeypatch.setattr(capture, "node_skips_undefined", lambda skips=skips: skips)
        torch.manual_seed(1)
        model = Zoo().bfloat16()
        model.conv.to(memory_format=torch.channels_last)
        optimizer = wrap(model, accumulation_steps=3, max_grad_norm=0.1, bucket_bytes=64, backend=backend_name)
        assert optimizer._capture.through_node is skips
        for _ in range(2):
            run_window(model, optimizer, _zoo_batches())
            optimizer.zero_grad()
        results.append([param.detach() for param in model.parameters()] + [optimizer.grad_norm])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# Leaving -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_remove_gives_the_model_back(backend_name, mode, dtype):
    """Gradients stay, in the parameters' dtypes; training goes on as if nothing had been there."""
    model = mlp(dtype)
    plain = copy.deepcopy(model)
    optimizer = wrap(model, "sgd", backend=backend_name)
    batches = inputs(2, dtype)
    sums = fp32_sums(micro_grads(model, batches))
    run_window(model, optimizer, batches)
    inner = optimizer.remove()
    for param, want, other in zip(model.parameters(), sums, plain.parameters(), strict=True):
        assert_same_bits(param.grad, want.to(dtype))
        assert param.grad_dtype == other.grad_dtype
        assert not param._post_accumulate_grad_hooks
        assert not param._backward_hooks
        other.grad = param.grad.clone()
    twin = torch.optim.SGD(plain.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.01)
    for batch in inputs(2, dtype):
        for each, opt in ((model, inner), (plain, twin)):
            loss_of(each, batch).backward()
            opt.step()
    for param, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, want)
        assert torch.equal(param.grad, want.grad)
    assert optimizer._capture._attached == {}


def test_a_parameter_that_leaves_its_group_is_given_back(backend_name, mode):
    model = mlp(torch.bfloat16)
    optimizer = wrap(model, "sgd", backend=backend_name)
    run_window(model, optimizer, inputs(1, torch.bfloat16))
    weight = optimizer.param_groups[0]["params"].pop(0)
    kept = weight.detach().clone()
    optimizer.step()
    assert torch.equal(weight, kept)
    assert weight.grad.dtype is torch.bfloat16
    assert weight.grad_dtype is torch.bfloat16
    want = weight.grad.clone() + micro_grads(model, [torch.ones(5, 7).bfloat16()])[0][0]
    run_window(model, optimizer, [torch.ones(5, 7).bfloat16()])
    assert torch.equal(weight.grad, want)


def test_a_graph_that_outlives_the_optimizer(backend_name, mode):
    """Nobody takes the gradient any more: torch does."""
    model = mlp()
    optimizer = wrap(model, backend=backend_name)
    batch = inputs(1)[0]
    loss = loss_of(model, batch)
    want = micro_grads(model, [batch])[0]
    del optimizer
    loss.backward(retain_graph=True)
    loss.backward()
    for param, grad in zip(model.parameters(), want, strict=True):
        assert torch.equal(param.grad, 2 * grad)


def test_a_param_hook_sees_the_mean(backend_name, mode):
    """What a post-accumulate hook sees inside a window of K is the sum so far, times 1/K."""
    weight = nn.Parameter(torch.ones(3))
    seen = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad[0].item()))
    optimizer = FusedAccumOptimizer(torch.optim.SGD([weight], lr=1.0), accumulation_steps=4, backend=backend_name)
    for _ in range(4):
        weight.sum().backward()
        optimizer.step()
    assert seen == [0.25, 0.5, 0.75, 1.0]
    assert math.isclose(optimizer.grad_norm.item(), 3**0.5, rel_tol=norm_rtol(3))
