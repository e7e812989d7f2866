"""What only shows with accelerators, tried on the CPU: another current stream, and parameters on two devices."""

from __future__ import annotations

import math

import pytest
import torch
from models import inputs, mlp, run_window

from fusedaccum import FusedAccumOptimizer, registry
from fusedaccum.capture import accumulate_grad_node
from fusedaccum.registry import Registry
from fusedaccum.slot import Slot


def test_nodes_are_taken_anew_on_another_stream(backend_name, monkeypatch):
    """A node runs on the stream that was current when it was made; a held one breaks the capture of a CUDA graph."""
    stream = 1
    monkeypatch.setattr(registry, "stream_of", lambda device: stream)
    model = mlp()
    optimizer = FusedAccumOptimizer(torch.optim.AdamW(model.parameters()), backend=backend_name)
    # The numbers tell nodes apart only while the old ones are alive.
    old = [accumulate_grad_node(param) for param in model.parameters()]
    optimizer.zero_grad()
    assert all(accumulate_grad_node(param) is node for param, node in zip(model.parameters(), old, strict=True))
    del old
    marks = [accumulate_grad_node(param).metadata for param in model.parameters()]
    for mark in marks:
        mark["of stream"] = stream
    stream = 2
    optimizer.zero_grad()
    assert not any("of stream" in accumulate_grad_node(param).metadata for param in model.parameters())
    run_window(model, optimizer, inputs(2))
    assert all(param.grad.dtype is torch.float32 for param in model.parameters())


@pytest.mark.parametrize("max_norm", [None, 0.25])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_the_norm_is_over_all_devices(backend_name, monkeypatch, optimizer_class, max_norm):
    """Two arenas on the CPU stand for two devices: norm, clip and skip are common to both."""
    results = []
    for n_devices in (1, 2):
        with monkeypatch.context() as patch:
            if n_devices == 2:
                remember = Slot.remember_tensor

                def spread(slot: Slot, remember=remember) -> None:
                    remember(slot)
                    if slot.param.dim() == 1:
                        slot.device = torch.device("cpu", 0)  # another key than torch.device("cpu")

                patch.setattr(Slot, "remember_tensor", spread)
                patch.setattr(Registry, "refresh", lambda self, scale: None)  # would see that no parameter is there
            torch.manual_seed(0)
            model = mlp()
            inner = optimizer_class(model.parameters(), lr=0.1)
            optimizer = FusedAccumOptimizer(inner, max_grad_norm=max_norm, backend=backend_name)
            norms = []
            for seed in range(3):
                run_window(model, optimizer, inputs(2))
                if seed == 2:
                    next(reversed(list(model.parameters()))).grad[0] = math.inf
                optimizer.step()
                norms.append(optimizer.grad_norm)
                assert optimizer.found_inf.item() == (seed == 2)
                optimizer.zero_grad()
            assert len(optimizer._registry.arenas) == n_devices
            results.append((norms, [param.detach().clone() for param in model.parameters()]))
    (norms, params), (norms_of_two, params_of_two) = results
    # The two trees over chunks add the same fp64 partials in another order: a few roundings of 2^-53, far below the
    # fp32 in which norm and parameters are given.
    for have, want in zip(norms_of_two[:2] + params_of_two, norms[:2] + params, strict=True):
        assert torch.allclose(have, want, rtol=2.0**-22, atol=0)
