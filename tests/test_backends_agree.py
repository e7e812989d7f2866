"""All backends that are here, against each other: op by op, and through whole training windows.

With a GPU these are four; without one, the compiled CPU library, reference and the interpreted Triton kernels. Every
bit has to be the same.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_cases import GROUPS, any_bits, every_param, normal, ready_to_step, step
from helpers import DTYPES, Buffers, accumulate, assert_same_bits, assert_same_buffers, finalize
from torch import Tensor, nn

from bench.on_device import on_device
from fusedaccum import FusedAccumOptimizer, backends, layout, ops
from fusedaccum.backends import Backend
from fusedaccum.layout import CHUNK, RULE_ADAM, RULE_SGD

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
SIZES = (0, 1, 17, 1025, CHUNK - 1, CHUNK + 9)
K = 3


@pytest.fixture(scope="module")
def present(native: Backend, reference: Backend, interpreted_triton: Backend) -> dict[str, Backend]:
    """Every backend that runs here, for CPU tensors."""
    found = {"native": native, "reference": reference, "triton-interpreted": interpreted_triton}
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        for name in ("cuda", "triton"):
            if backends.why_not(name, device) is None:
                found[name] = on_device(backends.choose(device, name), device)
    return found


def agree(results: dict[str, Buffers]) -> None:
    (first, expected), *others = results.items()
    for name, found in others:
        try:
            assert_same_buffers(found, expected)
        except AssertionError as error:
            raise AssertionError(f"{name} against {first}: {error}") from error


@pytest.mark.parametrize("make", [normal, any_bits])
@pytest.mark.parametrize("factor", [None, 0.7, 0.0])
def test_accumulate_and_measure(present: dict[str, Backend], make: object, factor: float | None) -> None:
    results = {}
    for name, backend in present.items():
        generator = torch.Generator().manual_seed(1)
        buffers = Buffers(SIZES * 3, shift=1)
        slots = list(range(len(SIZES) * 3))
        for micro_batch in range(2):
            grads = [make(n, DTYPES[s // len(SIZES)], generator) for s, n in zip(slots, SIZES * 3, strict=True)]
            accumulate(backend, buffers, grads, [micro_batch == 0] * len(slots), scale=0.3, factor=factor, micro=True)
        kept = buffers.partials.clone()
        buffers.partials.fill_(-1.0)
        backend.measure_(buffers.partials, buffers.acc, buffers.table, slots, list(SIZES * 3))
        assert_same_bits(buffers.partials, kept, f"{name}: measured against kept")
        results[name] = buffers
    agree(results)


@pytest.mark.parametrize("rule", [RULE_ADAM, RULE_SGD], ids=["adam", "sgd"])
def test_boundaries_and_steps(present: dict[str, Backend], rule: int) -> None:
    """Windows with every kind of parameter and group, one of them skipped, one without weight."""
    results = {}
    for name, backend in present.items():
        params = every_param(rule, (5, 1033))
        buffers = ready_to_step(rule, params, 0, normal, 0.0)
        buffers.micro_partials.fill_(0.25)
        slots = list(range(1, len(params) + 1))
        for window, (weight, spoilt) in enumerate([(2.0, None), (3.0, torch.inf), (0.0, None), (1.5, None)]):
            buffers.partials.fill_(0.5 + window)
            if spoilt is not None:
                buffers.partials[3] = spoilt
            options = {"numerator": 0.5, "weight": weight, "weight_sq": 0.4 * weight, "max_norm": 1.0, "micro": True}
            finalize(backend, buffers, GROUPS[rule], rule, active=slots, **options)
            assert buffers.control[layout.SKIPPED] == float(window in (1, 2))
            step(backend, buffers, rule, slots)
        results[name] = buffers
    agree(results)


class Tiny(nn.Module):
    """Parameters in bfloat16 and float32, a tied one, one of more than a chunk, and one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 700).to(torch.bfloat16)
        self.hidden = nn.Linear(700, 8, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.hidden(self.embed(tokens)).float()) * self.scale
        return (hidden @ self.hidden.weight.float()).square().mean()


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adam, amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd, nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
}


def trained(backend: Backend, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Everything after three windows of K micro-batches, the second with an infinite gradient in it."""
    torch.manual_seed(0)
    model = Tiny()
    # Whichever backend serves CPU tensors to this test, the optimizer asks for one as it always does.
    with monkeypatch.context() as patch:
        patch.setattr("fusedaccum.optimizer.choose", lambda device, requested="auto": backend)
        wrapped = FusedAccumOptimizer(
            OPTIMIZERS[optimizer](model.parameters()), accumulation_steps=K, max_grad_norm=1.0
        )
        for window in range(3):
            for micro_batch in range(K):
                loss = model(torch.randint(0, 50, (4, 6)))
                if (window, micro_batch) == (1, 1):
                    loss = loss * torch.inf
                loss.backward()
                wrapped.step()
            wrapped.zero_grad()
    state = {f"{i}.{k}": v for i, p in enumerate(model.parameters()) for k, v in wrapped.state[p].items()}
    found = {k: v.detach().clone() for k, v in {**model.state_dict(), **state}.items() if isinstance(v, Tensor)}
    found |= {"norm": wrapped.grad_norm.clone(), "found_inf": wrapped.found_inf.clone()}
    wrapped.remove()
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_whole_windows(present: dict[str, Backend], monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    calls: list[str] = []
    results = {}
    for name, backend in present.items():
        calls.clear()
        results[name] = trained(_counted(backend, calls), optimizer, monkeypatch)
        assert calls.count("finalize_") == 3
        assert "accumulate_" in calls
    expected = results.pop("native")
    assert expected["found_inf"] == 0.0
    assert len(expected) > 6
    for name, found in results.items():
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert_same_bits(value, expected[key], f"{name} against native: {key}")


def _counted(backend: Backend, calls: list[str]) -> Backend:
    """The backend, and a note of what it was asked for: that the optimizer really used it."""

    def counted(op: str) -> object:
        def call(*arguments: object) -> None:
            calls.append(op)
            getattr(backend, op)(*arguments)

        return call

    return replace(backend, **{op: counted(op) for op in ops.SCHEMAS})
