"""What users reported of edited and of huge gradients, and of memory (shared cases 26, 27, 31)."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import assert_same_bits
from models import (
    DTYPES,
    OPTIMIZERS,
    U32,
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

from fusedaccum import FusedAccumOptimizer


@pytest.mark.parametrize("dtype", DTYPES)
class TestCase26:
    """What users do to ``.grad`` means what it means in torch."""

    def start(self, backend_name, dtype):
        model = mlp(dtype)
        optimizer = wrap(model, "sgd", backend=backend_name)
        batches = inputs(3, dtype)
        run_window(model, optimizer, batches[:2])
        grads = micro_grads(model, batches)
        return model, optimizer, batches[2], grads

    def check(self, model, optimizer, batch, want, oracle):
        """One more micro-batch, then a step."""
        loss_of(model, batch).backward()
        for param, grad in zip(model.parameters(), want, strict=True):
            assert_same_bits(param.grad, grad)
        # Before the step, so that the norm is seen to follow the edit.
        assert optimizer.clip_grad_norm_(math.inf).item() == pytest.approx(norm_of(want), rel=norm_rtol(32))
        optimizer.step()
        oracle.step(want)
        oracle.assert_matches(optimizer)

    def test_case_26_model_zero_grad(self, backend_name, dtype):
        model, optimizer, batch, grads = self.start(backend_name, dtype)
        model.zero_grad()
        assert all(param.grad is None for param in model.parameters())
        self.check(model, optimizer, batch, fp32_sums(grads[2:]), Oracle(model, "sgd"))

    def test_case_26_set_to_none_false(self, backend_name, dtype):
        model, optimizer, batch, grads = self.start(backend_name, dtype)
        optimizer.zero_grad(set_to_none=False)
        for param in model.parameters():
            assert torch.equal(param.grad, torch.zeros_like(param, dtype=torch.float32))
        # 0 + grad; adding to a zero is exact.
        self.check(model, optimizer, batch, fp32_sums(grads[2:]), Oracle(model, "sgd"))

    def test_case_26_zeros_are_stepped_with(self, backend_name, dtype):
        model, optimizer, _, _ = self.start(backend_name, dtype)
        oracle = Oracle(model, "sgd")
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        oracle.step([torch.zeros_like(param) for param in model.parameters()])  # decays, as in torch
        oracle.assert_matches(optimizer)
        assert optimizer.grad_norm.item() == 0.0

    def test_case_26_grad_none_for_one_parameter(self, backend_name, dtype):
        model, optimizer, batch, grads = self.start(backend_name, dtype)
        oracle = Oracle(model, "sgd")
        model[0].weight.grad = None
        want = [fp32_sums(grads[2:])[0]] + fp32_sums(grads)[1:]
        self.check(model, optimizer, batch, want, oracle)

    def test_case_26_grad_none_for_one_parameter_at_the_boundary(self, backend_name, dtype):
        model, optimizer, _, grads = self.start(backend_name, dtype)
        oracle = Oracle(model, "sgd")
        model[0].weight.grad = None
        want = [None] + fp32_sums(grads[:2])[1:]
        optimizer.step()
        assert optimizer.grad_norm.item() == pytest.approx(norm_of(want), rel=norm_rtol(32))
        oracle.step(want)
        oracle.assert_matches(optimizer)

    def test_case_26_mul(self, backend_name, dtype):
        model, optimizer, batch, grads = self.start(backend_name, dtype)
        oracle = Oracle(model, "sgd")
        model[2].weight.grad.mul_(2)
        sums, last = fp32_sums(grads[:2]), grads[2]
        sums[2] = sums[2] * 2
        want = [total + grad.float() for total, grad in zip(sums, last, strict=True)]
        self.check(model, optimizer, batch, want, oracle)

    @pytest.mark.parametrize("own_dtype", [True, False])
    def test_case_26_another_tensor(self, backend_name, dtype, own_dtype):
        model, optimizer, batch, grads = self.start(backend_name, dtype)
        oracle = Oracle(model, "sgd")
        other = torch.randn(3, 13).to(dtype if own_dtype else torch.float32)
        model[2].weight.grad = other
        kept = other.clone()
        want = fp32_sums(grads)
        want[2] = other.float() + grads[2][2].float()
        self.check(model, optimizer, batch, want, oracle)
        assert torch.equal(other, kept)  # the user's tensor is not the accumulator

    def test_case_26_another_tensor_at_the_boundary(self, backend_name, dtype):
        model, optimizer, _, grads = self.start(backend_name, dtype)
        oracle = Oracle(model, "sgd")
        model[2].weight.grad = other = torch.randn(3, 13)
        want = fp32_sums(grads[:2])
        want[2] = other
        optimizer.step()
        assert optimizer.grad_norm.item() == pytest.approx(norm_of(want), rel=norm_rtol(32))
        oracle.step(want)
        oracle.assert_matches(optimizer)


def test_case_27_memory_does_not_grow_with_micro_batches(backend_name):
    """Gradients were kept until the step (accelerate 2035, gpt-neox 1123)."""
    model = mlp()
    optimizer = wrap(model, accumulation_steps=64, backend=backend_name)

    def live_bytes():
        return sum(slot_of(optimizer, p).arena.acc.untyped_storage().nbytes() for p in list(model.parameters())[:1])

    sizes = []
    for batch in inputs(6):
        run_window(model, optimizer, [batch])
        assert not any(bucket.grads for bucket in optimizer._capture._buckets.values())
        views = {param.grad.untyped_storage().data_ptr() for param in model.parameters()}
        sizes.append((live_bytes(), views))
    assert len(sizes[0][1]) == 1  # one flat buffer
    assert all(size == sizes[0] for size in sizes)
    optimizer.flush()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [1e20, 1e25, 1e37])
def test_case_31_huge_finite_gradients_are_clipped(backend_name, name, size):
    """The sum of squares overflows fp32: such windows were skipped, or their gradients zeroed."""
    model = mlp()
    oracle = Oracle(model, name)
    optimizer = wrap(model, name, max_grad_norm=1.0, backend=backend_name)
    batch = inputs(1)[0]
    grads = micro_grads(model, [batch])[0]
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = grad * size
    sums = [param.grad.clone() for param in model.parameters()]
    optimizer.step()
    assert optimizer.found_inf.item() == 0
    norm = norm_of(sums)
    assert optimizer.grad_norm.item() == pytest.approx(norm, rel=norm_rtol(32))
    oracle.step([total.double() / norm for total in sums])
    oracle.assert_matches(optimizer)


def test_case_31_from_the_backward(backend_name):
    """The same through the accumulate op, not the measure op."""
    param = nn.Parameter(torch.zeros(70000))
    optimizer = FusedAccumOptimizer(torch.optim.SGD([param], lr=1.0), max_grad_norm=1.0, backend=backend_name)
    (param * 1e20).sum().backward()
    optimizer.step()
    assert optimizer.found_inf.item() == 0
    # 1e20 * clip_coef * lr: three roundings of values that are exact to U32 each, and the norm's own error.
    want = torch.full((70000,), -(70000**-0.5))
    torch.testing.assert_close(param.detach(), want, rtol=norm_rtol(32) + 4 * U32, atol=0)
