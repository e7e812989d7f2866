"""What capture and boundary cost: calls, allocations, gradients alive, and what is freed at the end."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref

import pytest
import torch
from models import OPTIMIZERS, inputs, loss_of, mlp, run_window, slot_of, wrap
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fusedaccum import FusedAccumOptimizer, ops


def _count_calls(optimizer, param):
    """Replaces the arena's backend by one that writes down the names of the ops called."""
    calls = []
    arena = slot_of(optimizer, param).arena

    def counted(name, op):
        return lambda *args: (calls.append(name), op(*args))[1]

    arena.backend = dataclasses.replace(
        arena.backend, **{name: counted(name, getattr(arena.backend, name)) for name in ops.SCHEMAS}
    )
    return calls


@pytest.mark.parametrize("bucket_bytes", [1, 4096, 40000, 2**30])
def test_op_calls(backend_name, bucket_bytes):
    """No more calls a micro-batch than buckets and one, and two a boundary, clipped or not."""
    model = nn.Sequential(*(nn.Linear(33, 33) for _ in range(40)))
    optimizer = wrap(model, max_grad_norm=1.0, bucket_bytes=bucket_bytes, backend=backend_name)
    batches = inputs(3, n_features=33)
    run_window(model, optimizer, batches[:1])
    optimizer.step()
    optimizer.zero_grad()
    calls = _count_calls(optimizer, model[0].weight)
    n_bytes = sum(param.numel() * 4 for param in model.parameters())
    for batch in batches:
        run_window(model, optimizer, [batch])
        assert set(calls) == {"accumulate_"}
        assert len(calls) <= min(math.ceil(n_bytes / bucket_bytes) + 1, 80)
        calls.clear()
    optimizer.step()
    assert calls == ["finalize_", "adam_step_"]
    optimizer.zero_grad()
    assert len(calls) == 2


def test_op_calls_of_two_groups(backend_name):
    """One update for all groups, whatever their settings."""
    model = mlp()
    inner = torch.optim.SGD([{"params": [param], "lr": 0.1 * i} for i, param in enumerate(model.parameters())])
    optimizer = FusedAccumOptimizer(inner, backend=backend_name)
    run_window(model, optimizer, inputs(1))
    calls = _count_calls(optimizer, model[0].weight)
    optimizer.step()
    assert calls == ["finalize_", "sgd_step_"]


def test_a_write_by_others_costs_one_pass(backend_name):
    model = mlp()
    optimizer = wrap(model, backend=backend_name)
    run_window(model, optimizer, inputs(1))
    calls = _count_calls(optimizer, model[0].weight)
    for _ in range(2):
        model[0].weight.grad.mul_(2)
        optimizer.clip_grad_norm_(1.0)
        optimizer.clip_grad_norm_(1.0)
    assert calls == ["measure_", "finalize_", "finalize_"] * 2


class Seen(TorchDispatchMode):
    """Writes down every op."""

    def __init__(self, names):
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "profiler":  # torch's own record_function around step and zero_grad
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_allocated_in_steady_state(native, name, dtype):
    """Neither a micro-batch nor a boundary runs any op but ours, which have no outputs."""
    model = mlp(dtype)
    optimizer = wrap(model, name, accumulation_steps=2, max_grad_norm=1.0, backend=native.name)
    seen = []
    sink = optimizer._capture.sink

    def watched(*args):
        with Seen(seen):
            sink(*args)

    optimizer._capture.sink = watched
    for window in range(3):
        for batch in inputs(2, dtype):
            loss_of(model, batch).backward()
            with Seen(seen):
                optimizer.step()
                optimizer.zero_grad()
        if window < 2:
            assert f"fusedaccum.{'adam' if name == 'adamw' else name}_step_.default" in seen
            seen.clear()
    step = f"fusedaccum.{'adam' if name == 'adamw' else name}_step_.default"
    assert seen == ["fusedaccum.accumulate_.default"] * 2 + ["fusedaccum.finalize_.default", step]


def test_the_ops_themselves_allocate_nothing(native):
    """Not inside of their kernels either, where no dispatch mode sees it."""
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)).bfloat16()
    optimizer = wrap(model, max_grad_norm=1.0, backend=native.name)
    batches = inputs(3, torch.bfloat16, n_features=300)
    run_window(model, optimizer, batches[:1])
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run_window(model, optimizer, batches[1:])
        optimizer.step()
    ours = {event.key: event for event in profile.key_averages() if event.key.startswith("fusedaccum::")}
    assert ours.keys() == {"fusedaccum::accumulate_", "fusedaccum::finalize_", "fusedaccum::adam_step_"}
    for event in ours.values():
        assert event.cpu_memory_usage == 0, event.key
    assert any(event.cpu_memory_usage > 0 for event in profile.key_averages())  # the profiler does see allocations


class Watched(torch.autograd.Function):
    """``x @ weight``; writes down how many bytes of weight gradients are alive, its own included."""

    @staticmethod
    def forward(ctx, x, weight, alive, peaks):
        ctx.save_for_backward(x, weight)
        ctx.alive, ctx.peaks = alive, peaks
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        by_weight = x.t() @ grad
        ctx.alive.append((weakref.ref(by_weight), by_weight.nbytes))
        ctx.peaks.append(sum(n_bytes for ref, n_bytes in ctx.alive if ref() is not None))
        return grad @ weight.t(), by_weight, None, None


@pytest.mark.parametrize("bucket_bytes", [1, 1000, 3000, 2**30])
def test_gradients_alive_in_a_backward(backend_name, bucket_bytes):
    """No more than a bucket and the largest, in every micro-batch alike."""
    weights = [nn.Parameter(torch.randn(8, 8)) for _ in range(20)]
    optimizer = FusedAccumOptimizer(torch.optim.SGD(weights, lr=0.1), bucket_bytes=bucket_bytes, backend=backend_name)
    for _ in range(3):
        alive, peaks = [], []
        x = torch.randn(2, 8)
        for weight in weights:
            x = torch.tanh(Watched.apply(x, weight, alive, peaks))
        x.square().mean().backward()
        largest = weights[0].nbytes
        # A full bucket is handed over before the next gradient is made: it has at most bucket_bytes - 1 by then.
        assert max(peaks) <= bucket_bytes + largest
        assert max(peaks) >= min(bucket_bytes, 20 * largest)  # else weak references see nothing
        del x
        assert not any(ref() is not None for ref, _ in alive)
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_deletion_frees_everything(backend_name, name):
    """No cycle through autograd's C++ side keeps optimizer, buffers or model, where no garbage collector would see it;
    and none through Python either, for which memory would have to wait."""
    model = mlp(torch.bfloat16)
    optimizer = wrap(model, name, backend=backend_name)
    run_window(model, optimizer, inputs(2, torch.bfloat16))
    optimizer.step()
    refs = [
        weakref.ref(each)
        for each in (optimizer, optimizer._registry, optimizer._capture, optimizer.inner, model, model[0].weight)
    ]
    refs += [weakref.ref(arena) for arena in optimizer._registry.arenas.values()]
    gc.disable()
    try:
        del optimizer, model
        assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()


def test_deletion_of_the_optimizer_alone(backend_name):
    """The states go; the accumulator stays as long as a ``.grad`` shows it."""
    model = mlp(torch.bfloat16)
    optimizer = wrap(model, backend=backend_name)
    run_window(model, optimizer, inputs(1, torch.bfloat16))
    optimizer.step()
    registry = weakref.ref(optimizer._registry)
    kept = model[0].weight.grad.clone()
    del optimizer
    gc.collect()
    assert registry() is None
    assert torch.equal(model[0].weight.grad, kept)
    run_window(model, wrap(model, backend=backend_name), inputs(1, torch.bfloat16))
    assert model[0].weight.grad.dtype is torch.float32
