"""Weighted micro-batches: the step is that of one large batch, sum(w g) / sum(w)."""

from __future__ import annotations

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from models import DTYPES, U32, mlp, wrap
from torch import Tensor, nn

from fusedaccum import FusedAccumOptimizer, validate

LR = 1024.0  # so that rounding the parameter costs the gradient no more than an ulp
KINDS = ("int", "float", "tensor", "int tensor", "numpy")


def as_kind(kind: str, weight: int) -> object:
    """The weight, in each of the ways that users have it."""
    return {
        "int": weight,
        "float": float(weight),
        "tensor": torch.tensor(float(weight)),
        "int tensor": torch.tensor(weight),
        "numpy": np.int64(weight),
    }[kind]


class Tokens(nn.Module):
    """Embedding and head of a language model, without what lies between."""

    def __init__(self, n_ids: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(n_ids, width)
        self.head = nn.Linear(width, n_ids)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids)))


def token_batches(counts: list[int], length: int = 40) -> list[tuple[Tensor, Tensor]]:
    """(ids, labels) with ``counts[i]`` valid labels each, the others -100."""
    batches = []
    for count in counts:
        ids, labels = torch.randint(11, (length,)), torch.full((length,), -100)
        labels[:count] = torch.randint(11, (count,))
        batches.append((ids, labels))
    return batches


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1], ignore_index=-100)


def whole_batch_grads(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Gradient of the token mean over all batches together, in fp64."""
    twin = copy.deepcopy(model).double()
    whole = (torch.cat([ids for ids, _ in batches]), torch.cat([labels for _, labels in batches]))
    loss = nn.functional.cross_entropy(twin(whole[0]), whole[1], ignore_index=-100)
    return list(torch.autograd.grad(loss, list(twin.parameters())))


def relative_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Of all parameters together."""
    difference = sum(float((a.double() - e).square().sum()) for a, e in zip(actual, expected, strict=True))
    return math.sqrt(difference / sum(float(e.square().sum()) for e in expected))


def sgd(model: nn.Module, **options: object) -> FusedAccumOptimizer:
    return FusedAccumOptimizer(torch.optim.SGD(model.parameters(), lr=LR), **options)


def run(optimizer: FusedAccumOptimizer, model: nn.Module, batches: list, weights: list, way: str = "backward") -> None:
    for batch, weight in zip(batches, weights, strict=True):
        if way == "backward":
            optimizer.backward(mean_loss(model, batch), weight=weight)
        else:
            with optimizer.micro_batch(weight=weight):
                mean_loss(model, batch).backward()
        if optimizer.accumulation_steps is not None:
            optimizer.step()


def applied(before: nn.Module, model: nn.Module) -> list[Tensor]:
    """The gradient that SGD has applied."""
    pairs = zip(before.parameters(), model.parameters(), strict=True)
    return [(p.detach().double() - q.detach().double()) / LR for p, q in pairs]


@pytest.mark.parametrize("way", ["backward", "micro_batch"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [None, 2])
def test_case_01_token_means_of_3_and_17(backend_name, steps, kind, way):
    """The mean of means over-weights the short micro-batch (transformers 34191, trl 2175)."""
    model = Tokens()
    before, batches = copy.deepcopy(model), token_batches([3, 17])
    expected = whole_batch_grads(model, batches)
    optimizer = sgd(model, accumulation_steps=steps, backend=backend_name)
    run(optimizer, model, batches, [as_kind(kind, 3), as_kind(kind, 17)], way)
    if steps is None:
        optimizer.step()
    assert optimizer.stepped
    assert relative_error(applied(before, model), expected) < 1e-6
    assert optimizer.grad_norm.item() == pytest.approx(
        math.sqrt(sum(float(g.square().sum()) for g in expected)), rel=1e-6
    )


@pytest.mark.parametrize("steps", [None, 8])
def test_against_fp64_over_many_unequal_micro_batches(backend_name, steps):
    model = Tokens()
    counts = [1, 40, 7, 0, 23, 2, 39, 11]
    batches = token_batches(counts)
    expected = whole_batch_grads(model, batches)
    optimizer = sgd(model, accumulation_steps=steps, backend=backend_name)
    before = copy.deepcopy(model)
    run(optimizer, model, batches, counts)  # the mean over no token is NaN, its weight 0
    if steps is None:
        optimizer.step()
    assert relative_error(applied(before, model), expected) < 1e-6
    assert optimizer.found_inf.item() == optimizer.skipped.item() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int", "tensor"])
@pytest.mark.parametrize("steps", [None, 3])
def test_clip_sees_the_mean(backend_name, steps, kind, dtype):
    """max_grad_norm and the class's own clip divide first, and so does the norm that is logged."""
    weights = [5, 1, 2]
    for clip_by in ("constructor", "method"):
        model = mlp(dtype)
        optimizer = wrap(
            model,
            "sgd",
            accumulation_steps=steps,
            max_grad_norm=0.01 if clip_by == "constructor" else None,
            backend=backend_name,
        )
        grads = []
        for weight in weights:
            batch = torch.randn(5, 7, dtype=dtype)
            loss = (model(batch).float() ** 2).mean()
            grads.append(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
            optimizer.backward(loss, weight=as_kind(kind, weight))
            if clip_by == "method" and weight == weights[-1]:
                asked = optimizer.clip_grad_norm_(0.01)
            if steps is not None:
                optimizer.step()
        if steps is None:
            optimizer.step()
        mean = [
            sum(w * g.double() for w, g in zip(weights, column, strict=True)) / 8 for column in zip(*grads, strict=True)
        ]
        norm = math.sqrt(sum(float(g.square().sum()) for g in mean))
        assert norm > 0.01, "nothing would be clipped"
        assert optimizer.grad_norm.item() == pytest.approx(norm, rel=1e-6)
        if clip_by == "method":
            assert asked.item() == pytest.approx(norm, rel=1e-6)
        assert optimizer.stats()["clip_fraction"].item() == 1.0


@pytest.mark.parametrize("kind", ["int", "tensor"])
@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("name", ["adamw", "sgd", "rmsprop"])
def test_a_total_weight_of_0_is_no_step(backend_name, name, steps, kind):
    model = mlp()
    optimizer = wrap(model, name, accumulation_steps=steps, backend=backend_name)
    before = [p.clone() for p in model.parameters()]
    for _ in range(2):
        optimizer.backward(model(torch.full((5, 7), torch.nan)).sum(), weight=as_kind(kind, 0))
        if steps is not None:
            optimizer.step()
    if steps is None:
        optimizer.step()
    assert optimizer.stepped
    assert optimizer.skipped.item() == 1
    assert optimizer.found_inf.item() == 0, "no gradient is infinite"
    assert math.isfinite(optimizer.grad_norm.item())
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, old)
        assert param.grad is None or torch.equal(param.grad, torch.zeros_like(param))
    optimizer.zero_grad()
    # The next window is a window like any other.
    for _ in range(2):
        optimizer.backward(model(torch.randn(5, 7)).sum(), weight=as_kind(kind, 3))
        if steps is not None:
            optimizer.step()
    if steps is None:
        optimizer.step()
    assert optimizer.skipped.item() == 0
    assert any(not torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))


def test_equal_weights_are_no_weights(backend_name):
    """K micro-batches of weight 1 give the very bits of K without."""
    plain, weighted = mlp(), mlp()
    weighted.load_state_dict(plain.state_dict())
    one = wrap(plain, accumulation_steps=4, max_grad_norm=0.1, backend=backend_name)
    other = wrap(weighted, accumulation_steps=4, max_grad_norm=0.1, backend=backend_name)
    for _ in range(8):
        batch = torch.randn(5, 7)
        (plain(batch) ** 2).mean().backward()
        one.step()
        other.backward((weighted(batch) ** 2).mean(), weight=1)
        other.step()
        for optimizer in (one, other):
            optimizer.zero_grad()
    for p, q in zip(plain.parameters(), weighted.parameters(), strict=True):
        assert torch.equal(p, q)


def test_one_without_a_weight_counts_1(backend_name):
    """With accumulation_steps a micro-batch without a weight counts 1, as its default says."""
    model = mlp()
    before = copy.deepcopy(model)
    optimizer = sgd(model, accumulation_steps=2, backend=backend_name)
    batches = [torch.randn(5, 7), torch.randn(5, 7)]
    grads = [torch.autograd.grad((model(b) ** 2).mean(), list(model.parameters())) for b in batches]
    (model(batches[0]) ** 2).mean().backward()
    optimizer.step()
    optimizer.backward((model(batches[1]) ** 2).mean(), weight=3)
    optimizer.step()
    expected = [(a.double() + 3 * b.double()) / 4 for a, b in zip(*grads, strict=True)]
    assert relative_error(applied(before, model), expected) < 1e-6


def test_a_short_window_of_weights(backend_name):
    model = Tokens()
    before, counts = copy.deepcopy(model), [3, 17]
    batches = token_batches(counts)
    optimizer = sgd(model, accumulation_steps=4, backend=backend_name)
    run(optimizer, model, batches, counts)
    assert not optimizer.stepped
    assert optimizer.flush()
    assert relative_error(applied(before, model), whole_batch_grads(before, batches)) < 1e-6


def test_a_sparse_gradient_is_weighted(backend_name):
    for kind in ("int", "tensor"):
        embed = nn.Embedding(9, 4, sparse=True)
        before = copy.deepcopy(embed)
        optimizer = sgd(embed, backend=backend_name)
        first, second, none = torch.tensor([1, 1, 5]), torch.tensor([5, 2]), torch.tensor([8])
        for ids, weight in ((first, 3), (second, 1), (none, 0)):
            factor = torch.nan if weight == 0 else 1.0
            optimizer.backward(embed(ids).sum() * factor, weight=as_kind(kind, weight))
        optimizer.step()
        expected = torch.zeros(9, 4)
        expected[1], expected[5], expected[2] = 6 / 4, 4 / 4, 1 / 4
        torch.testing.assert_close(applied(before, embed)[0].float(), expected, rtol=4 * U32, atol=4 * U32)


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (-1, ValueError, "weight is -1; accepted: a finite number of at least 0"),
        (math.nan, ValueError, "weight is nan; accepted"),
        (math.inf, ValueError, "weight is inf; accepted"),
        ("3", TypeError, "weight is '3'; accepted: a number of at least 0, or a 0-dim real tensor"),
        (True, TypeError, "weight is True; accepted"),
        (torch.ones(1), ValueError, r"weight is a tensor of shape \(1,\) and dtype float32; accepted"),
        (torch.tensor(1j), ValueError, r"weight is a tensor of shape \(\) and dtype complex64; accepted"),
        (torch.tensor(-2.0), ValueError, r"weight is -2.0; accepted"),
        (torch.tensor(math.nan), ValueError, r"weight is nan; accepted"),
    ],
)
@pytest.mark.filterwarnings("ignore:fusedaccum. an accumulation window")  # it is left open on purpose
@pytest.mark.parametrize("steps", [None, 3])
def test_a_bad_weight_changes_nothing(backend_name, steps, weight, error, message):
    model = mlp()
    optimizer = wrap(model, accumulation_steps=steps, backend=backend_name)
    optimizer.backward((model(torch.randn(5, 7)) ** 2).mean(), weight=2)
    if steps:
        optimizer.step()
    grads = [p.grad.clone() for p in model.parameters()]
    state = optimizer._window.state()
    with pytest.raises(error, match=message):
        optimizer.backward((model(torch.randn(5, 7)) ** 2).mean(), weight=weight)
    with pytest.raises(error, match=message), optimizer.micro_batch(weight=weight):
        pass
    assert optimizer._window.state() == state
    for param, old in zip(model.parameters(), grads, strict=True):
        assert torch.equal(param.grad, old)


@pytest.mark.parametrize("bad", [-1.0, math.nan, -math.inf])
def test_a_bad_weight_that_only_the_device_knows(backend_name, monkeypatch, bad):
    """It cannot be refused without waiting; its window is skipped, and says so."""
    monkeypatch.setattr(validate, "_is_readable", lambda tensor: False)
    model = mlp()
    optimizer = wrap(model, accumulation_steps=2, backend=backend_name)
    before = [p.clone() for p in model.parameters()]
    for weight in (5.0, bad):
        optimizer.backward((model(torch.randn(5, 7)) ** 2).mean(), weight=torch.tensor(weight))
        optimizer.step()
    assert optimizer.found_inf.item() == optimizer.skipped.item() == 1
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("steps", [None, 3])
def test_a_weight_after_the_backward(backend_name, steps):
    model = mlp()
    optimizer = wrap(model, accumulation_steps=steps, backend=backend_name)
    (model(torch.randn(5, 7)) ** 2).mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="weight was given after a backward without one"), optimizer.micro_batch(3):
        pass
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), grads, strict=True))
    if steps:  # the next micro-batch may have one
        optimizer.step()
        optimizer.backward((model(torch.randn(5, 7)) ** 2).mean(), weight=3)


@pytest.mark.parametrize("steps", [None, 3])
def test_a_backward_without_a_weight_behind_one_with(backend_name, steps):
    model = mlp()
    optimizer = wrap(model, accumulation_steps=steps, backend=backend_name)
    optimizer.backward((model(torch.randn(5, 7)) ** 2).mean(), weight=3)
    grads = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="a backward without a weight in a weighted"):
        (model(torch.randn(5, 7)) ** 2).mean().backward()
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), grads, strict=True))


def test_gradients_of_the_last_window_are_not_mixed_in(backend_name):
    model = mlp()
    optimizer = wrap(model, backend=backend_name)
    optimizer.backward((model(torch.randn(5, 7)) ** 2).mean(), weight=3)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"the gradients of the last window are still there.*zero_grad"):
        optimizer.backward((model(torch.randn(5, 7)) ** 2).mean(), weight=3)
    optimizer.zero_grad()
    optimizer.backward((model(torch.randn(5, 7)) ** 2).mean(), weight=3)


def test_a_backward_that_fails_does_not_count(backend_name):
    model = mlp()
    optimizer = sgd(model, accumulation_steps=2, backend=backend_name)
    before = copy.deepcopy(model)
    with pytest.raises(ZeroDivisionError), optimizer.micro_batch(weight=5):
        raise ZeroDivisionError
    batches = [torch.randn(5, 7), torch.randn(5, 7)]
    grads = [torch.autograd.grad((model(b) ** 2).mean(), list(model.parameters())) for b in batches]
    for batch, weight in zip(batches, (2, 6), strict=True):
        optimizer.backward((model(batch) ** 2).mean(), weight=weight)
        optimizer.step()
    expected = [(2 * a.double() + 6 * b.double()) / 8 for a, b in zip(*grads, strict=True)]
    assert relative_error(applied(before, model), expected) < 1e-6


@pytest.mark.parametrize("drop", ["optimizer", "model"])
def test_dropped_gradients_take_their_weights_with_them(backend_name, drop):
    model = mlp()
    optimizer = sgd(model, backend=backend_name)
    before = copy.deepcopy(model)
    optimizer.backward((model(torch.randn(5, 7)) ** 2).mean(), weight=torch.tensor(100.0))
    optimizer.backward((model(torch.randn(5, 7)) ** 2).mean(), weight=100)
    (optimizer if drop == "optimizer" else model).zero_grad()
    batch = torch.randn(5, 7)
    expected = [g.double() for g in torch.autograd.grad((model(batch) ** 2).mean(), list(model.parameters()))]
    optimizer.backward((model(batch) ** 2).mean(), weight=2)
    optimizer.step()
    assert relative_error(applied(before, model), expected) < 1e-6


def test_a_clip_by_torch_of_a_weighted_sum_is_said(backend_name):
    model = mlp()
    optimizer = wrap(model, backend=backend_name)
    optimizer.backward((model(torch.randn(5, 7)) ** 2).mean(), weight=7)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.warns(UserWarning, match=r"weighted sum, not the mean.*optimizer.clip_grad_norm_"):
        optimizer.step()


def test_case_32_two_accumulations_at_once(backend_name):
    """accumulation_steps=4 while Accelerate, Trainer or the loop accumulates too: said once, with both counts."""
    model = mlp()
    optimizer = wrap(model, accumulation_steps=4, backend=backend_name)
    for _ in range(3):
        (model(torch.randn(5, 7)) ** 2).mean().backward()
    with pytest.warns(UserWarning, match=r"3 backward calls came before one step\(\), and accumulation_steps is 4"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            (model(torch.randn(5, 7)) ** 2).mean().backward()
        optimizer.step()
        optimizer.flush()
