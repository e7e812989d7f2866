"""What an inf or NaN in one micro-batch costs: the window, that micro-batch, or an error."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from models import DTYPES, mlp, wrap
from torch import Tensor, nn

from fusedaccum import FusedAccumOptimizer

LR = 1024.0  # so that rounding the parameter costs the gradient no more than an ulp
BAD = [math.inf, -math.inf, math.nan]


def sgd(model: nn.Module, **options: object) -> FusedAccumOptimizer:
    return FusedAccumOptimizer(torch.optim.SGD(model.parameters(), lr=LR), **options)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch).float() ** 2).mean()


def batches_with(bad: dict[int, float], n: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    found = [torch.randn(5, 7).to(dtype) for _ in range(n)]
    for i, value in bad.items():
        found[i][2, 3] = value
    return found


def grads_of(model: nn.Module, batches: list[Tensor]) -> list[tuple[Tensor, ...]]:
    return [torch.autograd.grad(loss_of(model, batch), list(model.parameters())) for batch in batches]


def assert_applied(before: nn.Module, model: nn.Module, expected: list[Tensor]) -> None:
    for p, q, g in zip(before.parameters(), model.parameters(), expected, strict=True):
        torch.testing.assert_close((p.double() - q.double()) / LR, g, rtol=2e-6, atol=2e-8)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("weights", [None, [3, 50, 1, 4]])
@pytest.mark.parametrize("way", ["K", "loop", "context"])
def test_skip_micro_batch_leaves_it_out(backend_name, way, weights, bad):
    """The result is that of the window without it, its weight gone from the denominator."""
    if way == "context" and weights is None:
        weights = [1, 1, 1, 1]
    model = mlp()
    before = copy.deepcopy(model)
    batches = batches_with({1: bad})
    grads = grads_of(model, batches)
    steps = 4 if way == "K" else None
    optimizer = sgd(model, accumulation_steps=steps, nonfinite="skip_micro_batch", backend=backend_name)
    for i, batch in enumerate(batches):
        weight = None if weights is None else weights[i]
        if way == "context":
            with optimizer.micro_batch(weight):
                loss_of(model, batch).backward()
        else:
            loss = loss_of(model, batch)
            # The loop's own mean, where neither K nor weights say what to divide by.
            optimizer.backward(loss / 4 if steps is None and weights is None else loss, weight=weight)
        if steps:
            optimizer.step()
    if not steps:
        optimizer.step()
    left = [(grads[i], 1 if weights is None else weights[i]) for i in (0, 2, 3)]
    total = sum(weight for _, weight in left)
    columns = zip(*[[w * g.double() for g in gs] for gs, w in left], strict=True)
    assert optimizer.skipped.item() == optimizer.found_inf.item() == 0
    assert_applied(before, model, [sum(column) / total for column in columns])


@pytest.mark.parametrize("dtype", DTYPES)
def test_skip_micro_batch_on_16_bits(backend_name, dtype):
    """As if the bad one had never been, but for the divisor: 1/5 rounds where 1/4 does not."""
    model = mlp(dtype)
    twin = copy.deepcopy(model)
    batches = batches_with({2: math.nan}, 5, dtype)
    one = wrap(model, accumulation_steps=5, max_grad_norm=0.1, nonfinite="skip_micro_batch", backend=backend_name)
    other = wrap(twin, accumulation_steps=4, max_grad_norm=0.1, backend=backend_name)
    for i, batch in enumerate(batches):
        one.backward(loss_of(model, batch))
        one.step()
        if i != 2:
            other.backward(loss_of(twin, batch))
            other.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        # Four additions, each half an ulp of a sum that may be larger than what is left in the end.
        largest = float(q.grad.abs().max()) + 0.01
        torch.testing.assert_close(p.grad * 5 / 4, q.grad, rtol=0, atol=8 * 2.0**-24 * largest)
        torch.testing.assert_close(p.float(), q.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("bad", BAD)
def test_all_bad_is_no_step(backend_name, bad):
    model = mlp()
    before = copy.deepcopy(model)
    optimizer = sgd(model, accumulation_steps=2, nonfinite="skip_micro_batch", backend=backend_name)
    for batch in batches_with({0: bad, 1: bad}, 2):
        optimizer.backward(loss_of(model, batch))
        optimizer.step()
    assert optimizer.stepped
    assert optimizer.skipped.item() == 1
    assert all(torch.equal(p, q) for p, q in zip(before.parameters(), model.parameters(), strict=True))
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())


def test_one_context_is_one_micro_batch(backend_name):
    """Two backward calls inside of one context stand or fall together; a parameter that both reach is summed."""
    model = mlp()
    before = copy.deepcopy(model)
    good, bad = batches_with({1: math.inf}, 2)
    optimizer = sgd(model, nonfinite="skip_micro_batch", backend=backend_name)
    with optimizer.micro_batch(2):
        loss_of(model, good).backward()
        loss_of(model, bad).backward()
    with optimizer.micro_batch(3):
        loss_of(model, good).backward()
        loss_of(model, good).backward()
    optimizer.step()
    assert_applied(before, model, [2 * g.double() for g in grads_of(before, [good])[0]])


def test_dynamic_scale_and_skip_micro_batch(backend_name):
    """A micro-batch that overflows fp16 is left out; the window steps, so the scale does not back off."""
    model = mlp()
    optimizer = sgd(
        model, accumulation_steps=2, nonfinite="skip_micro_batch", loss_scale="dynamic", backend=backend_name
    )
    before = copy.deepcopy(model)
    good, bad = batches_with({1: math.inf}, 2)
    for batch in (good, bad):
        optimizer.backward(loss_of(model, batch))
        optimizer.step()
    assert optimizer.loss_scale.item() == 2.0**16
    assert_applied(before, model, [g.double() for g in grads_of(before, [good])[0]])


def test_sparse_and_kept_gradients(backend_name):
    """Repeated ids, and a gradient that its Function goes on writing to."""
    embed = nn.Embedding(5, 2, sparse=True)
    kept: list[Tensor] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, p):
            return p.sum()

        @staticmethod
        def backward(ctx, grad):
            kept.append(grad.expand(3).clone())
            return kept[0]

    param = nn.Parameter(torch.zeros(3))
    optimizer = FusedAccumOptimizer(
        torch.optim.SGD([embed.weight, param], lr=1.0), nonfinite="skip_micro_batch", backend=backend_name
    )
    with optimizer.micro_batch(1):
        (embed(torch.tensor([1, 1, 4])).sum() + Keeps.apply(param)).backward()
        kept[0].fill_(math.nan)
    optimizer.step()
    assert embed.weight.grad.sum(1).tolist() == [0, 4, 0, 0, 2]
    assert param.grad.tolist() == [1, 1, 1]
    optimizer.zero_grad()
    with optimizer.micro_batch(1):
        (embed(torch.tensor([0])).sum() * math.inf).backward()
    optimizer.step()
    assert optimizer.skipped.item() == 1


def test_a_hook_that_wants_the_sum_is_refused(backend_name):
    model = mlp()
    optimizer = sgd(model, nonfinite="skip_micro_batch", backend=backend_name)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(RuntimeError, match=r"post-accumulate-grad hook.*skip_micro_batch"):
        optimizer.backward(loss_of(model, batches_with({}, 1)[0]))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("end", ["step", "flush"])
def test_raise_names_the_parameters_and_changes_nothing(backend_name, end, steps, bad):
    if end == "flush":
        if steps is None:
            return  # there is no window to flush
        steps = 3
    model = mlp()
    optimizer = FusedAccumOptimizer(
        torch.optim.AdamW(model.named_parameters()), accumulation_steps=steps, nonfinite="raise", backend=backend_name
    )
    good, poisoned = batches_with({}, 2)
    for i, batch in enumerate((good, poisoned)):
        loss = loss_of(model, batch) + (model[2].bias.sum() * bad if i == 1 else 0.0)
        optimizer.backward(loss)
        if i == 0 and steps:
            optimizer.step()
    if end == "flush":
        optimizer.step()
    before = copy.deepcopy(model)
    grads = [p.grad.clone() for p in model.parameters()]
    state = optimizer._window.state()
    with pytest.raises(
        FloatingPointError, match=r"gradient of param_groups\[0\]\['params'\]\[3\] \(2.bias\) holds an inf"
    ):
        getattr(optimizer, end)()
    assert optimizer._window.state() == state
    for p, q, g in zip(model.parameters(), before.parameters(), grads, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p.grad.nan_to_num(7.0), g.nan_to_num(7.0))
    assert not optimizer.state
    optimizer._window.close()  # what reset() does, without its warning
    optimizer.zero_grad()
    for _ in range(steps or 1):
        optimizer.backward(loss_of(model, good))
        optimizer.step()
    assert optimizer.stepped


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="nonfinite is 'ignore'; accepted: 'skip_window', 'skip_micro_batch', 'raise'"):
        wrap(mlp(), nonfinite="ignore")


@pytest.mark.parametrize("policy", ["skip_window", "raise"])
def test_the_default_path_pays_nothing(backend_name, policy):
    """No gradient outlives its bucket, and no pass judges it, unless skip_micro_batch asks for it."""
    model = mlp()
    optimizer = sgd(model, nonfinite=policy, bucket_bytes=1, backend=backend_name)
    assert optimizer._capture.judge is None
    optimizer.backward(loss_of(model, batches_with({}, 1)[0]))
    assert all(not bucket.grads for bucket in optimizer._capture._buckets.values())
