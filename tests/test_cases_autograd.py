"""What users reported of autograd (shared cases 17-20, 24)."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same_bits
from models import (
    DTYPES,
    OPTIMIZERS,
    Oracle,
    fp32_sums,
    inputs,
    loss_of,
    micro_grads,
    mlp,
    norm_of,
    norm_rtol,
    run_window,
    slot_of,
    wrap,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedaccum import FusedAccumOptimizer


class Tied(nn.Module):
    """One weight at both ends, with or without checkpoints."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.middle = nn.Linear(7, 7)
        self.last = nn.Linear(7, 7)
        self.last.weight = self.first.weight
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for block in (self.first, self.middle, self.last):
            if self.use_reentrant is None:
                x = torch.tanh(block(x))
            else:
                # A reentrant checkpoint needs an input with a gradient.
                x = x if x.requires_grad else x.detach().requires_grad_()
                x = torch.tanh(checkpoint(block, x, use_reentrant=self.use_reentrant))
        return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bucket_bytes", [1, 2**25])
def test_case_17_tied_weights(backend_name, name, dtype, use_reentrant, bucket_bytes):
    """One of the two contributions was lost, or counted twice, under checkpointing (pytorch 81296)."""
    model = Tied(use_reentrant).to(dtype)
    optimizer = wrap(model, name, backend=backend_name, bucket_bytes=bucket_bytes)
    oracle = Oracle(model, name)
    batches = inputs(3, dtype)
    # Plain autograd adds the two contributions in the parameter's dtype. A reentrant checkpoint delivers them one by
    # one, which here are added in fp32: the fp64 sums of both differ by that one rounding each, and those of the adds.
    loose = torch.finfo(dtype).eps if use_reentrant else 0.0
    model.use_reentrant = None
    sums = fp32_sums(micro_grads(model, batches))
    parts = [sum(column[i].float().abs() for column in micro_grads(model, batches)) for i in range(len(sums))]
    model.use_reentrant = use_reentrant
    run_window(model, optimizer, batches)
    for param, want, size in zip(model.parameters(), sums, parts, strict=True):
        if use_reentrant:
            # The contributions may be larger than their sum; no more than tenfold with these values.
            torch.testing.assert_close(param.grad, want, rtol=0, atol=float(10 * loose * size.max()))
        else:
            assert_same_bits(param.grad, want)
    sums = [param.grad.clone() for param in model.parameters()]
    assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(norm_of(sums), rel=norm_rtol(32))
    optimizer.step()
    oracle.step(sums)
    oracle.assert_matches(optimizer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("repeats", [True, False])
def test_case_18_sparse_embedding(backend_name, name, dtype, repeats):
    """``nn.Embedding(sparse=True)``: only one of the repeated ids counted (pytorch 36786)."""
    model = nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Linear(4, 2)).to(dtype)
    dense = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 2)).to(dtype)
    dense.load_state_dict(model.state_dict())
    optimizer = wrap(model, name, accumulation_steps=2, max_grad_norm=0.1, backend=backend_name)
    oracle = Oracle(model, name)
    ids = [[3, 5, 7], [7, 8, 9]] if not repeats else [[3, 3, 5, 3], [5, 5, 5, 9]]
    for _ in range(2):
        for some in ids:
            loss_of(model, torch.tensor(some)).backward()
            optimizer.step()
        # Repeated ids add up in the parameter's dtype in the dense embedding, in fp32 here: sum its rows one by one.
        grads = []
        for some in ids:
            dense.load_state_dict({key: value.detach() for key, value in oracle_values(model, dense, oracle).items()})
            rows = dense[0].weight.detach()[torch.tensor(some)].requires_grad_()
            loss = (dense[1](rows).float() ** 2).mean()
            by_row, *others = torch.autograd.grad(loss, [rows, *dense[1].parameters()])
            grads.append([torch.zeros(11, 4).index_add_(0, torch.tensor(some), by_row.float()), *others])
        sums = fp32_sums(grads, scale=0.5)
        oracle.step(sums, max_norm=0.1)
        oracle.assert_matches(optimizer)
        optimizer.zero_grad()


def oracle_values(model, dense, oracle):
    """The oracle's parameters, rounded to the model's dtype: the values that the model had in this window."""
    return {key: value.to(model[0].weight.dtype) for key, value in zip(dense.state_dict(), oracle.params, strict=True)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_18_dense_and_sparse_gradients_of_one_weight(backend_name, dtype):
    """A sparse gradient onto a dense sum, and the reverse."""
    for order in ((True, False), (False, True)):
        weight = nn.Parameter(torch.randn(6, 3).to(dtype))
        optimizer = FusedAccumOptimizer(torch.optim.SGD([weight], lr=1.0), backend=backend_name)
        ids = torch.tensor([1, 4, 4])
        want = torch.zeros(6, 3)
        for sparse in order:
            nn.functional.embedding(ids, weight, sparse=sparse).sum().backward()
            want.index_add_(0, ids, torch.ones(3, 3))
        assert_same_bits(weight.grad, want)
        assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(norm_of([want]), rel=norm_rtol(32))


# torch's own advice against backward(create_graph=True): there is no cycle here.
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_19_create_graph(backend_name, dtype):
    """The buffer kept the graph of a micro-batch alive (pytorch 4661)."""
    model = mlp(dtype)
    optimizer = wrap(model, "sgd", backend=backend_name)
    batches = inputs(2, dtype)
    sums = fp32_sums(micro_grads(model, batches))
    for batch in batches:
        loss_of(model, batch).backward(create_graph=True)
    for param, want in zip(model.parameters(), sums, strict=True):
        assert param.grad.grad_fn is None
        assert not param.grad.requires_grad
        assert_same_bits(param.grad, want)
    oracle = Oracle(model, "sgd")
    optimizer.step()
    oracle.step(sums)
    oracle.assert_matches(optimizer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("over", ["inputs", "parameters"])
def test_case_19_a_gradient_penalty(backend_name, dtype, over):
    """``autograd.grad`` adds nothing to the window; the penalty's own backward does."""

    def penalised(model, batch):
        batch = batch.detach().requires_grad_()
        loss = loss_of(model, batch)
        of = [batch] if over == "inputs" else list(model.parameters())
        grads = torch.autograd.grad(loss, of, create_graph=True)
        return loss + sum(grad.float().square().sum() for grad in grads)

    model = mlp(dtype)
    optimizer = wrap(model, backend=backend_name)
    batch = inputs(1, dtype)[0]
    loss = penalised(model, batch)
    assert all(param.grad is None for param in model.parameters())
    want = torch.autograd.grad(penalised(model, batch), list(model.parameters()))
    loss.backward()
    kept = [param.grad.clone() for param in model.parameters()]
    torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
    for param, grad, sum_ in zip(model.parameters(), want, kept, strict=True):
        assert_same_bits(param.grad, grad.float())
        assert torch.equal(param.grad, sum_)
    assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(norm_of(want), rel=norm_rtol(32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", ["unfreeze", "add_param_group", "inner add_param_group", "late"])
def test_case_20_a_layer_that_joins_in_mid_window(backend_name, name, dtype, how):
    """It joins, is stepped and is reset with the rest (apex 292). "late": torch has accumulated its gradient of the
    window's first micro-batch by itself, as it has what comes before we notice that somebody extended the inner
    optimizer: such a gradient is of the window too, and counts 1/K."""
    model = mlp(dtype)
    head, body = list(model[2].parameters()), list(model[0].parameters())
    for param in body:
        param.requires_grad_(False)
    if how == "unfreeze":
        optimizer = wrap(model, name, accumulation_steps=3, max_grad_norm=0.1, backend=backend_name)
    else:
        optimizer = FusedAccumOptimizer(
            OPTIMIZERS[name](head), accumulation_steps=3, max_grad_norm=0.1, backend=backend_name
        )
    oracle = Oracle(model, name)
    for param in oracle.params:
        param.requires_grad_(True)
    if how != "unfreeze":  # the oracle's order is the model's, ours the groups'
        oracle.params = oracle.params[2:] + oracle.params[:2]
        oracle._start = oracle._start[2:] + oracle._start[:2]
    for window in range(3):
        grads = []
        for i, batch in enumerate(inputs(3, dtype)):
            if window == 1 and i == (0 if how == "late" else 1):
                for param in body:
                    param.requires_grad_(True)
            if window == 1 and i == 1:
                if how in ("add_param_group", "late"):
                    optimizer.add_param_group({"params": body})
                elif how == "inner add_param_group":
                    optimizer.inner.add_param_group({"params": body})
            found = micro_grads(model, [batch])[0]
            grads.append(found if how == "unfreeze" else found[2:] + found[:2])
            run_window(model, optimizer, [batch])
        sums = fp32_sums(grads, scale=1 / 3)
        norm = oracle.step(sums, max_norm=0.1)
        assert optimizer.grad_norm.item() == pytest.approx(norm, rel=norm_rtol(32))
        if window == 0:
            assert all(slot.arena is None for slot in optimizer._registry.slots.values() if slot.param in set(body))
            assert len(optimizer.param_groups) == 1
        optimizer.zero_grad()
        assert all(param.grad is None for param in model.parameters())
        if how == "unfreeze" or window > 0:
            oracle.assert_matches(optimizer)
    assert slot_of(optimizer, body[0]).arena is slot_of(optimizer, head[0]).arena


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_24_a_closure_runs_with_grad_enabled(backend_name, name, dtype):
    """The closure was run under ``no_grad`` (HeavyBall 10)."""
    model = mlp(dtype)
    optimizer = wrap(model, name, backend=backend_name)
    oracle = Oracle(model, name)
    losses = []
    for batch in inputs(3, dtype):
        sums = fp32_sums(micro_grads(model, [batch]))

        def closure(batch=batch):
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss)
            return loss

        with torch.no_grad():
            assert optimizer.step(closure) is losses[-1]
        oracle.step(sums)
        oracle.assert_matches(optimizer)
    assert len(losses) == 3
