"""What the gradients tell: norms, counts, and the gradient noise scale against a problem whose covariance is known."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from models import mlp, wrap
from torch import nn

import fusedaccum
from fusedaccum import FusedAccumOptimizer


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("steps", [None, 8])
def test_the_noise_scale_of_a_known_covariance(backend_name, steps, weighted):
    """Gradients drawn from N(g, s^2) element by element: tr / |g|^2 = n s^2 / |g|^2, to be found within 10%."""
    n, sigma, windows, k = 4000, 0.5, 60, 8
    generator = torch.Generator().manual_seed(11)
    truth = torch.randn(n, generator=generator) * 0.1
    param = nn.Parameter(torch.zeros(n))
    # The parameter must stay where it is: its gradient is to be drawn from one distribution.
    optimizer = FusedAccumOptimizer(
        torch.optim.SGD([param], lr=0.0),
        accumulation_steps=steps,
        max_grad_norm=1.0,
        statistics=True,
        backend=backend_name,
    )
    sizes = [1, 3, 2, 6, 1, 1, 8, 2] if weighted else [4] * k
    for _ in range(windows):
        for size in sizes:
            # The mean gradient of `size` samples.
            drawn = truth + torch.randn(n, generator=generator) * sigma / math.sqrt(size)
            loss = (param * drawn).sum()
            if weighted:
                optimizer.backward(loss, weight=size)
            else:
                optimizer.backward(loss if steps else loss / k)
            if steps:
                optimizer.step()
        if not steps:
            optimizer.step()
        optimizer.zero_grad()
    stats = optimizer.stats()
    true_noise = n * sigma**2 / float(truth.double().square().sum())  # in samples
    in_samples = stats["noise_scale"].item() * (1 if weighted else 4)
    assert in_samples == pytest.approx(true_noise, rel=0.1)
    mean_size = sum(s * s for s in sizes) / sum(sizes) if weighted else 4
    assert stats["useful_accumulation_steps"].item() == pytest.approx(true_noise / mean_size, rel=0.1)
    # The last window's micro-batches: |g|^2 + n s^2 / size, weighted by size^2.
    expected = sum(s * s * (float(truth.square().sum()) + n * sigma**2 / s) for s in sizes) / sum(s * s for s in sizes)
    assert stats["micro_batch_norm"].item() == pytest.approx(math.sqrt(expected), rel=0.1)
    assert stats["clip_fraction"].item() == 1.0


def test_the_micro_batches_own_norms_exactly(backend_name):
    """Root mean square of the norms of the single gradients, over layers with and without a gradient."""
    model = nn.ModuleList([nn.Linear(300, 200), nn.Linear(5, 2)])
    optimizer = wrap(model, statistics=True, accumulation_steps=3, backend=backend_name)
    squares = []
    for i in range(3):
        loss = model[0](torch.randn(4, 300)).square().mean() + (model[1](torch.randn(4, 5)).sum() if i == 1 else 0.0)
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
        squares.append(sum(float(g.double().square().sum()) for g in grads if g is not None))
        loss.backward()
        optimizer.step()
    stats = optimizer.stats()
    assert stats["micro_batch_norm"].item() == pytest.approx(math.sqrt(sum(squares) / 3), rel=1e-6)
    assert stats["grad_norm"].item() == pytest.approx(optimizer.grad_norm.item(), rel=1e-7)


def test_counts(backend_name):
    model = mlp()
    optimizer = wrap(model, statistics=True, max_grad_norm=1.0, backend=backend_name)
    for factor in (1e-3, 1e3, math.inf, 1e3, math.nan):
        optimizer.backward((model(torch.randn(5, 7)) ** 2).mean() * factor)
        optimizer.step()
        optimizer.zero_grad()
    stats = {name: value.item() for name, value in optimizer.stats().items()}
    assert (stats["windows"], stats["skipped"]) == (5, 2)
    assert stats["clip_fraction"] == pytest.approx(2 / 3)
    assert stats["loss_scale"] == 1.0
    assert math.isnan(stats["noise_scale"]), "one micro-batch a window tells nothing"


def test_before_the_first_window(backend_name):
    stats = wrap(mlp(), statistics=True, backend=backend_name).stats()
    assert stats["windows"].item() == stats["skipped"].item() == stats["clip_fraction"].item() == 0
    assert math.isnan(stats["noise_scale"].item())


def test_a_skipped_window_teaches_nothing(backend_name):
    model = mlp()
    optimizer = wrap(model, statistics=True, accumulation_steps=2, backend=backend_name)
    seen = []
    for factor in (1.0, math.inf):
        for i in range(2):
            optimizer.backward((model(torch.randn(5, 7)) ** 2).mean() * (factor if i else 1.0))
            optimizer.step()
        optimizer.zero_grad()
        seen.append(optimizer.stats()["noise_scale"].item())
    assert seen[0] == seen[1]
    assert math.isfinite(seen[0])


def test_without_statistics(backend_name):
    """Nothing is kept, nothing is reported, and the training is the same."""
    results = []
    for statistics in (True, False):
        torch.manual_seed(2)
        model = mlp()
        optimizer = wrap(model, accumulation_steps=2, statistics=statistics, backend=backend_name)
        for _ in range(4):
            optimizer.backward((model(torch.randn(5, 7)) ** 2).mean())
            optimizer.step()
            optimizer.zero_grad()
        results.append((model, optimizer))
    (with_model, _), (model, optimizer) = results
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), with_model.parameters(), strict=True))
    assert "noise_scale" not in optimizer.stats()
    assert all(arena.micro_partials is None for arena in optimizer._registry.arenas.values())


def test_a_gradient_of_somebody_elses_counts_as_one(backend_name):
    """p.grad = tensor, and a sparse gradient: in the statistics with their own norms."""
    embed = nn.Embedding(4, 3, sparse=True)
    optimizer = wrap(embed, "sgd", statistics=True, accumulation_steps=2, backend=backend_name)
    for ids in ([0, 0, 1], [2]):
        embed(torch.tensor(ids)).sum().backward()
        optimizer.step()
    # (4 + 1) * 3 and 3 elements of 1, the first id twice.
    assert optimizer.stats()["micro_batch_norm"].item() == pytest.approx(math.sqrt((15 + 3) / 2), rel=1e-6)


def test_zeroed_gradients_start_afresh_too(backend_name):
    """zero_grad(set_to_none=False): what an earlier window's micro-batches added does not count again."""
    found = []
    for set_to_none in (True, False):
        torch.manual_seed(3)
        model = mlp()
        optimizer = wrap(model, statistics=True, accumulation_steps=2, backend=backend_name)
        for _ in range(3):
            for _ in range(2):
                optimizer.backward((model(torch.randn(5, 7)) ** 2).mean())
                optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        found.append({name: value.item() for name, value in optimizer.stats().items()})
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_copy_keeps_scale_and_statistics(backend_name):
    """deepcopy and pickle: what the device has learnt goes along, the open window stays behind."""
    model = mlp()
    optimizer = wrap(model, statistics=True, accumulation_steps=2, loss_scale="dynamic", backend=backend_name)
    for factor in (1.0, math.inf, 1.0, 1.0):
        optimizer.backward((model(torch.randn(5, 7)) ** 2).mean() * factor, weight=torch.tensor(2.0))
        optimizer.step()
        optimizer.zero_grad()
    twin = copy.deepcopy(optimizer)
    for name, value in optimizer.stats().items():
        if name not in ("grad_norm", "micro_batch_norm"):  # those are the last boundary's, and the copy has had none
            assert twin.stats()[name].item() == value.item(), name
    assert twin.loss_scale.item() == 2.0**15


def test_the_statistics_survive_a_checkpoint(backend_name):
    model = mlp()
    optimizer = wrap(model, statistics=True, accumulation_steps=2, backend=backend_name)
    for _ in range(6):
        optimizer.backward((model(torch.randn(5, 7)) ** 2).mean())
        optimizer.step()
        optimizer.zero_grad()
    other = wrap(mlp(), statistics=True, accumulation_steps=2, backend=backend_name)
    other.load_state_dict(optimizer.state_dict())
    for name in ("noise_scale", "windows", "clip_fraction"):
        assert other.stats()[name].item() == optimizer.stats()[name].item()


def test_scale_lr():
    assert fusedaccum.scale_lr(0.1, 256, 1024) == pytest.approx(0.4)
    assert fusedaccum.scale_lr(1e-3, 32, 512, rule="sqrt") == pytest.approx(4e-3)
    for bad in ((0, 1, 1), (1, -1, 1), (1, 1, math.inf), (math.nan, 1, 1)):
        with pytest.raises(ValueError, match=r"is .*; accepted: a finite number above 0"):
            fusedaccum.scale_lr(*bad)
    with pytest.raises(ValueError, match="rule is 'square'; accepted: 'linear', 'sqrt'"):
        fusedaccum.scale_lr(1, 1, 1, rule="square")
