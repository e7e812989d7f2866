"""``torch.compile``: the wrapper adds neither graph breaks nor recompilations, and stays out of compiled loops.

Dynamo looks at neither kernels nor devices, so that one backend serves for most of this.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo
from helpers import assert_same_bits
from models import OPTIMIZERS, Oracle, assert_unmoved, fp32_sums, inputs, loss_of, mlp, run_window, snapshot, wrap
from torch import nn
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """Every test compiles by itself, and leaves nothing behind."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def _counted():
    """What Dynamo has counted since last time: graphs (a recompilation makes one more), frames, breaks by reason."""
    seen = {
        "graphs": counters["stats"]["unique_graphs"],
        "frames": dict(counters["frames"]),
        "breaks": dict(counters["graph_break"]),
        "recompiles": dict(counters["recompiles"]),
    }
    torch._dynamo.reset()
    counters.clear()
    return seen


def _sums(model, batches, compiled_like):
    """What autograd gives through a compiled copy; the copy is compiled anew, with neither gradients nor hooks."""
    twin = copy.deepcopy(model)
    compiled = compiled_like(twin)
    return fp32_sums([torch.autograd.grad(loss_of(compiled, batch), list(twin.parameters())) for batch in batches])


class Broken(nn.Module):
    """Two graph breaks of its own."""

    def __init__(self, dtype):
        super().__init__()
        self.layers = mlp(dtype)

    def forward(self, x):
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        x = self.layers[1](x)
        torch._dynamo.graph_break()
        return self.layers[2](x)


@pytest.mark.parametrize(
    ("name", "compiler", "broken", "dtype"),
    [
        ("adamw", "eager", True, torch.float32),
        ("adamw", "eager", True, torch.bfloat16),
        ("adamw", "aot_eager", False, torch.bfloat16),
        ("adamw", "aot_eager", True, torch.bfloat16),
        ("sgd", "aot_eager", False, torch.float16),
        ("rmsprop", "aot_eager", False, torch.bfloat16),
    ],
)
def test_a_compiled_model(name, compiler, broken, dtype):
    """Three windows of two micro-batches: as many graphs, breaks and recompilations as with the plain optimizer, the
    sums bit for bit those of the compiled model, and the right update."""
    model = Broken(dtype) if broken else mlp(dtype)
    batches = inputs(6, dtype)
    plain = copy.deepcopy(model)
    compiled, optimizer = torch.compile(plain, backend=compiler), OPTIMIZERS[name](plain.parameters())
    for batch in batches:
        loss_of(compiled, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    want = _counted()
    assert want["graphs"] == (3 if broken else 1)
    assert len(want["breaks"]) == (1 if broken else 0)  # one reason, however often

    oracle = Oracle(model, name)
    compile_it = lambda some: torch.compile(some, backend=compiler)  # noqa: E731
    compiled, optimizer = compile_it(model), wrap(model, name)
    states = []
    for at in range(0, 6, 2):
        states.append(copy.deepcopy(model.state_dict()))
        run_window(compiled, optimizer, batches[at : at + 2])
        grads = [param.grad.clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        oracle.step(grads)
        oracle.assert_matches(optimizer)
        states[-1] = states[-1], grads
    assert _counted() == want
    for at, (state, grads) in enumerate(states):
        plain.load_state_dict(state)
        for grad, total in zip(grads, _sums(plain, batches[2 * at : 2 * at + 2], compile_it), strict=True):
            assert_same_bits(grad, total)


@pytest.mark.parametrize("dynamic", [False, None, True])
def test_shapes_that_change(dynamic):
    """fp32, in mid-window: recompiled as often as with the plain optimizer."""
    seen = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = mlp()
        optimizer = wrap(model) if wrapped else OPTIMIZERS["adamw"](model.parameters())
        compiled = torch.compile(model, backend="eager", dynamic=dynamic)
        for n in (5, 6, 7, 5, 8, 6):
            loss_of(compiled, torch.randn(n, 7)).backward()
        optimizer.step()
        seen.append(_counted())
    assert seen[0] == seen[1]
    assert seen[0]["graphs"] == {False: 4, None: 2, True: 1}[dynamic]
    assert not seen[0]["breaks"]


def test_shapes_that_change_in_16_bits():
    """Between windows all is well. In mid-window torch (2.13) does not compile a 16-bit parameter that has an fp32
    ``.grad``, whoever put it there: the model runs uncompiled for the new shape, with the right gradients."""

    def run(wrapped, between):
        torch.manual_seed(0)
        model = mlp(torch.bfloat16)
        optimizer = wrap(model) if wrapped else OPTIMIZERS["sgd"](model.parameters())
        if not wrapped:
            for param in model.parameters():
                param.grad_dtype = torch.float32  # torch's own way of accumulating in fp32
        compiled = torch.compile(model, backend="eager", dynamic=False)
        for n in (5, 6):
            loss_of(compiled, torch.randn(n, 7, dtype=torch.bfloat16)).backward()
            if between:
                optimizer.zero_grad()
        return _counted(), [param.grad for param in model.parameters()]

    counted, _ = run(wrapped=True, between=True)
    assert counted["graphs"] == 2
    assert not counted["breaks"]
    counted, grads = run(wrapped=True, between=False)
    torchs, wants = run(wrapped=False, between=False)
    assert counted == torchs
    assert [reason.splitlines()[0] for reason in counted["breaks"]] == [
        "dtype mismatch between tensor and its gradient"
    ]
    for grad, want in zip(grads, wants, strict=True):
        assert_same_bits(grad, want)


@pytest.mark.parametrize(
    ("name", "what", "dtype"),
    [
        ("adamw", "step", torch.float32),
        ("adamw", "step", torch.bfloat16),
        ("sgd", "the whole step", torch.float32),
        ("adamw", "the whole step", torch.bfloat16),
    ],
)
def test_a_compiled_training_step(backend_name, name, what, dtype):
    """Backward and ``step`` inside of what is compiled: Dynamo traced the hooks and the optimizer, and failed on the
    fp32 ``.grad``. They run as they are, once a call, and the results are the same bits."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = mlp(dtype)
        optimizer = wrap(model, name, accumulation_steps=2, max_grad_norm=0.05, backend=backend_name)
        compile_it = (lambda some: torch.compile(some, backend="eager")) if compiled else lambda some: some
        step = compile_it(optimizer.step) if what == "step" else optimizer.step

        def train(batch, model=model, optimizer=optimizer, step=step):
            loss = (model(batch).float() ** 2).mean()
            loss.backward()
            step()
            optimizer.zero_grad()
            return loss.detach()

        if what != "step":
            train = compile_it(train)
        losses, stepped = [], []
        for batch in inputs(6, dtype):
            losses.append(train(batch))
            stepped.append(optimizer.stepped)
        assert stepped == [False, True] * 3
        results.append((losses, snapshot(optimizer)))
    assert results[0][0] == results[1][0]
    assert_unmoved(results[0][1], results[1][1])
    traced = " ".join(counters["graph_break"])
    assert "FusedAccumOptimizer.step" in traced
    assert "queue_callback" not in traced


def test_an_unfused_step_may_be_compiled():
    """torch compiles its own optimizers, and rounds differently then: ours follows it, bit for bit."""
    results = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = mlp()
        optimizer = wrap(model, "rmsprop") if wrapped else OPTIMIZERS["rmsprop"](model.parameters())
        step = torch.compile(optimizer.step, backend="eager")
        for batch in inputs(4):
            loss_of(model, batch).backward()
            step()
            optimizer.zero_grad()
        results.append([param.detach().clone() for param in model.parameters()])
    for ours, plain in zip(results[1], results[0], strict=True):
        assert_same_bits(ours, plain)


@pytest.mark.usefixtures("inductor")
def test_inductor():
    """The compiler that users have: bf16, the same gradients as without the wrapper, nothing compiled twice."""
    model = mlp(torch.bfloat16)
    batches = inputs(4, torch.bfloat16)
    sums = _sums(model, batches, torch.compile)
    want = _counted()
    compiled, optimizer = torch.compile(model), wrap(model, accumulation_steps=8)
    run_window(compiled, optimizer, batches)
    for param, total in zip(model.parameters(), sums, strict=True):
        assert_same_bits(param.grad * 8, total)  # each times 1/8, which is exact
    optimizer.flush()
    assert _counted() == want
    assert want["graphs"] == 1
