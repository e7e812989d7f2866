"""No host waits for a device in accumulate, finalize or step, and nothing that a replay needs anew is baked in.

On the CPU nothing ever waits, so the contract is tested: no call that reads a tensor's value into Python happens, with
every feature on. tests/test_cuda_graph.py captures and replays a window on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import mlp, wrap
from torch.utils._python_dispatch import TorchDispatchMode

import fusedaccum
from fusedaccum import FusedAccumOptimizer, validate

READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__contains__")
# Ops whose result, or its size, the host must know.
SYNCS = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique", "_unique2",
    "repeat_interleave",
}  # fmt: skip
HARMLESS = {"detach", "view", "as_strided", "alias", "view_as", "_record_function_enter_new", "_record_function_exit"}


class _NoSync(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.ops.append(name)
        indices = args[1] if name.startswith(("index", "_index")) and len(args) > 1 else ()
        by_mask = isinstance(indices, (list, tuple)) and any(i is not None and i.dtype is torch.bool for i in indices)
        if name in SYNCS or by_mask:
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_sync(monkeypatch: pytest.MonkeyPatch) -> Iterator[_NoSync]:
    def refuse(name: str) -> Any:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"Tensor.{name} reads a value")

        return read

    with monkeypatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, refuse(name))
        patch.setattr(validate, "_is_readable", lambda tensor: False)  # a weight on a device is not
        with _NoSync() as mode:
            yield mode


def test_the_contract_catches_what_it_is_for(monkeypatch):
    """Each way of waiting, in the place of the real thing."""
    value = torch.ones(1)
    ways = (
        lambda: value.item(), lambda: float(value), lambda: bool(value), lambda: value.tolist(), lambda: value.cpu(),
        lambda: value.nonzero(), lambda: torch.equal(value, value), lambda: value[value > 0],
    )  # fmt: skip
    for way in ways:
        with pytest.raises((AssertionError, TypeError)), no_sync(monkeypatch):  # torch turns some into a TypeError
            way()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize(
    "feature", ["plain", "weights", "device weights", "loss scale", "skip_micro_batch", "GradScaler"]
)
@pytest.mark.usefixtures("native")
def test_no_window_waits(monkeypatch, feature, steps, name):
    """From the second window on: the first one makes the state. The reference backend reads tables, and does wait."""
    model = mlp(torch.bfloat16)
    options: dict[str, Any] = {
        "accumulation_steps": steps,
        "max_grad_norm": 0.1,
        "statistics": True,
        "backend": "native",
    }
    if feature == "loss scale":
        options["loss_scale"] = "dynamic"
    if feature == "skip_micro_batch":
        options["nonfinite"] = "skip_micro_batch"
    optimizer = wrap(model, name, **options)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01)  # as torch's capturable
    scaler = fusedaccum.GradScaler("cpu", init_scale=4.0) if feature == "GradScaler" else None
    batches = [torch.randn(5, 7, dtype=torch.bfloat16) for _ in range(3)]
    weights: list[Any] = [None] * 3
    if "weights" in feature:
        weights = [2, 3, 4] if feature == "weights" else [torch.tensor(float(w)) for w in (2, 3, 4)]

    def window() -> None:
        for batch, weight in zip(batches, weights, strict=True):
            loss = (model(batch) ** 2).mean()
            if scaler is not None:
                scaler.scale(loss).backward()
            else:
                optimizer.backward(loss, weight=weight)
            if steps:
                scaler.step(optimizer) if scaler is not None else optimizer.step()
                if scaler is not None:
                    scaler.update()
                optimizer.zero_grad()
        if not steps:
            scaler.step(optimizer) if scaler is not None else optimizer.step()
            if scaler is not None:
                scaler.update()
            optimizer.zero_grad()

    window()
    before = [p.detach().clone() for p in model.parameters()]
    with no_sync(monkeypatch) as mode:
        window()
        optimizer.stats(), optimizer.found_inf, optimizer.skipped, optimizer.grad_norm, optimizer.loss_scale
        optimizer.clip_grad_norm_(1.0)
    assert {"accumulate_", "finalize_"} <= set(mode.ops), "nothing was seen"
    assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.usefixtures("native")
def test_a_plain_window_makes_no_tensor(monkeypatch):
    """Steady state: our ops, and views; nothing that the allocator would see."""
    model = mlp(torch.bfloat16)
    optimizer = wrap(model, accumulation_steps=2, max_grad_norm=0.1, backend="native")

    def grads() -> list[torch.Tensor]:
        return [torch.randn_like(p) for p in model.parameters()]

    def micro_batch(values: list[torch.Tensor]) -> None:
        torch.autograd.backward(list(model.parameters()), values)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        micro_batch(grads())
    values = grads()
    with no_sync(monkeypatch) as mode:
        micro_batch(values)
        micro_batch(values)
    ours = {"accumulate_", "finalize_", "adam_step_"}
    assert ours <= set(mode.ops)
    assert set(mode.ops) - ours <= HARMLESS, sorted(set(mode.ops) - ours)


@pytest.mark.parametrize("backend", ["native"])
def test_a_learning_rate_on_the_device_is_read_there(native, backend):
    """Changed in place, without Python having a part in it, it counts at the next boundary."""
    param = torch.nn.Parameter(torch.zeros(3))
    lr = torch.tensor(1.0)
    optimizer = FusedAccumOptimizer(torch.optim.SGD([param], lr=lr), backend=backend)
    for value, expected in ((1.0, -1.0), (0.25, -1.25), (4.0, -5.25)):
        lr.fill_(value)
        param.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert param.tolist() == [expected] * 3
