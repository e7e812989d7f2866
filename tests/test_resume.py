"""Checkpoints inside of a window: the same bits as no interruption."""

from __future__ import annotations

import copy
import io
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from models import DTYPES, OPTIMIZERS, inputs, mlp, wrap
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from fusedaccum import FusedAccumOptimizer

WORKER = Path(__file__).parent / "resume_worker.py"


def saved_and_loaded(held: object) -> object:
    file = io.BytesIO()
    torch.save(held, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(model: nn.Module, optimizer: FusedAccumOptimizer, batches: list[Tensor], weights: list[int] | None) -> None:
    for i, batch in enumerate(batches):
        loss = (model(batch).float() ** 2).mean()
        optimizer.backward(loss, weight=None if weights is None else weights[i])
        optimizer.step()
        optimizer.zero_grad()


def assert_same_run(one: tuple[nn.Module, FusedAccumOptimizer], other: tuple[nn.Module, FusedAccumOptimizer]) -> None:
    """Parameters, states, masters and statistics, bit by bit."""
    for p, q in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(p, q)
        assert one[1].state[p].keys() == other[1].state[q].keys()
        for name, value in one[1].state[p].items():
            same = (
                torch.equal(value, other[1].state[q][name])
                if isinstance(value, Tensor)
                else value == other[1].state[q][name]
            )
            assert same, name
    for name, value in one[1].stats().items():
        assert torch.equal(value.nan_to_num(-1.0), other[1].stats()[name].nan_to_num(-1.0)), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("weights", [None, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])
def test_case_14_saved_after_every_micro_batch(backend_name, weights, name, dtype):
    """Save anywhere, also after micro-batch 2 of 4, and go on elsewhere (OneTrainer 1465)."""
    model = mlp(dtype)
    batches = inputs(12, dtype)
    start = copy.deepcopy(model)
    options = {
        "accumulation_steps": 4,
        "max_grad_norm": 0.05,
        "loss_scale": "dynamic",
        "statistics": True,
        "backend": backend_name,
    }
    whole = wrap(model, name, **options)
    train(model, whole, batches, weights)
    for stop in range(1, 12):
        first = copy.deepcopy(start)
        optimizer = wrap(first, name, **options)
        train(first, optimizer, batches[:stop], weights)
        held = saved_and_loaded({"model": first.state_dict(), "optimizer": optimizer.state_dict()})
        second = copy.deepcopy(start)
        resumed = wrap(second, name, **options)
        second.load_state_dict(held["model"])
        resumed.load_state_dict(held["optimizer"])
        for p, q in zip(first.parameters(), second.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)
        train(second, resumed, batches[stop:], None if weights is None else weights[stop:])
        assert_same_run((model, whole), (second, resumed))
        optimizer.zero_grad()
        optimizer._window.close()  # that it was left behind is the test's doing


def test_between_backward_and_step(backend_name):
    """Also without accumulation_steps: what is accumulated goes on, by backward calls that are yet to come."""
    model = mlp()
    twin = copy.deepcopy(model)
    first, second = inputs(2)
    optimizer = wrap(model, statistics=True, backend=backend_name)
    for batch in (first, second):
        (model(batch) ** 2).mean().backward()
    other = copy.deepcopy(twin)
    halfway = wrap(other, statistics=True, backend=backend_name)
    (other(first) ** 2).mean().backward()
    resumed = wrap(twin, statistics=True, backend=backend_name)
    resumed.load_state_dict(saved_and_loaded(halfway.state_dict()))
    (twin(second) ** 2).mean().backward()
    optimizer.step()
    resumed.step()
    assert_same_run((model, optimizer), (twin, resumed))
    assert resumed.stats()["noise_scale"].item() == optimizer.stats()["noise_scale"].item()


def test_after_the_step_nothing_is_open(backend_name):
    """.grad is still there, as in torch, but no checkpoint has use for it."""
    model = mlp()
    optimizer = wrap(model, backend=backend_name)
    (model(inputs(1)[0]) ** 2).mean().backward()
    assert optimizer.state_dict()["fusedaccum"]["open"] is not None
    optimizer.step()
    assert optimizer.state_dict()["fusedaccum"]["open"] is None


def test_only_what_was_written_is_open(backend_name):
    """A parameter without a gradient before has none after."""
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    optimizer = wrap(model, accumulation_steps=2, backend=backend_name)
    model[1](torch.ones(3)).sum().backward()
    optimizer.step()
    twin = copy.deepcopy(model)
    resumed = wrap(twin, accumulation_steps=2, backend=backend_name)
    resumed.load_state_dict(optimizer.state_dict())
    assert [p.grad is None for p in twin.parameters()] == [True, True, False, False]
    assert resumed.flush()
    assert optimizer.flush()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_other_accumulation_steps_are_refused(backend_name):
    model = mlp()
    optimizer = wrap(model, accumulation_steps=4, backend=backend_name)
    train(model, optimizer, inputs(6), None)
    held = saved_and_loaded(optimizer.state_dict())
    twin = copy.deepcopy(model)
    other = wrap(twin, accumulation_steps=3, backend=backend_name)
    train(twin, other, inputs(1), None)
    grads = [p.grad.clone() for p in twin.parameters()]
    with pytest.raises(
        ValueError, match=r"accumulation_steps=4 \(micro-batch 2\), the optimizer has accumulation_steps=3"
    ):
        other.load_state_dict(held)
    assert all(torch.equal(p.grad, g) for p, g in zip(twin.parameters(), grads, strict=True))
    assert not other.state
    with pytest.raises(ValueError, match="open_window is 'keep'; accepted: 'restore', 'drop'"):
        other.load_state_dict(held, open_window="keep")
    with pytest.warns(UserWarning, match="window of 1 of 3 micro-batches was dropped by load_state_dict"):
        other.load_state_dict(held, open_window="drop")
    assert all(p.grad is None for p in twin.parameters())
    train(twin, other, inputs(2), None)
    assert not other.stepped
    train(twin, other, inputs(1), None)
    assert other.stepped
    optimizer.flush()


def test_a_gradient_of_another_shape_is_refused(backend_name):
    model = mlp()
    optimizer = wrap(model, accumulation_steps=4, backend=backend_name)
    train(model, optimizer, inputs(2), None)
    held = saved_and_loaded(optimizer.state_dict())
    held["fusedaccum"]["open"]["grads"][0] = torch.zeros(13, 8)
    with pytest.raises(ValueError, match=r"accumulated gradient of shape \(13, 8\) for parameter 0"):
        optimizer.load_state_dict(held)
    held["fusedaccum"]["version"] = 2
    with pytest.raises(ValueError, match="a window of version 2; accepted: 1"):
        optimizer.load_state_dict(held)
    optimizer.flush()


def test_a_plain_checkpoint_leaves_the_window_alone(backend_name):
    """As torch: load_state_dict does not touch gradients."""
    model = mlp()
    optimizer = wrap(model, accumulation_steps=4, backend=backend_name)
    train(model, optimizer, inputs(6), None)
    grads = [p.grad.clone() for p in model.parameters()]
    plain = optimizer.state_dict()
    del plain["fusedaccum"]
    optimizer.load_state_dict(saved_and_loaded(plain))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert optimizer.flush()


def test_the_plain_optimizer_loads_ours(backend_name):
    """What torch does not know, it passes over."""
    model = mlp()
    optimizer = wrap(model, accumulation_steps=4, backend=backend_name)
    train(model, optimizer, inputs(6), None)
    plain = OPTIMIZERS["adamw"](copy.deepcopy(model).parameters())
    plain.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert plain.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    optimizer.flush()


def test_its_own_state_changes_nothing(backend_name):
    """case 15, inside of a window: load_state_dict(state_dict()) is a no-op."""
    model = mlp()
    twin = copy.deepcopy(model)
    runs = []
    for m, reloads in ((model, True), (twin, False)):
        torch.manual_seed(1)
        optimizer = wrap(m, accumulation_steps=4, loss_scale="dynamic", statistics=True, backend=backend_name)
        for batch in inputs(8):
            train(m, optimizer, [batch], [3])
            if reloads:
                optimizer.load_state_dict(optimizer.state_dict())
        runs.append((m, optimizer))
    assert_same_run(*runs)


def test_a_distributed_checkpoint_says_that_it_drops_the_window(backend_name):
    """It keeps what torch knows; never in silence."""
    model = mlp()
    optimizer = wrap(model, accumulation_steps=4, backend=backend_name)
    train(model, optimizer, inputs(4), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_optimizer_state_dict(model, optimizer)
    train(model, optimizer, inputs(2), None)
    with pytest.warns(UserWarning, match=r"window of 2 of 4 micro-batches is not part of what torch.distributed"):
        get_optimizer_state_dict(model, optimizer)
    assert optimizer.flush()


def test_a_distributed_checkpoint_says_so_in_a_users_own_loop_too(backend_name):
    """Without accumulation_steps there is no window to name, but gradients that are lost all the same."""
    model = mlp()
    optimizer = wrap(model, backend=backend_name)
    train(model, optimizer, inputs(1), None)
    for batch in inputs(2):
        (model(batch) ** 2).mean().backward()
    with pytest.warns(UserWarning, match=r"what 2 backward calls have accumulated without a step\(\) is not part of"):
        get_optimizer_state_dict(model, optimizer)


# Another process ------------------------------------------------------------------------------------------------------


def start(folder: Path, backend: str, name: str, n: int) -> subprocess.Popen[str]:
    words = [sys.executable, str(WORKER), str(folder), backend, name, str(n)]
    environment = {**os.environ, "PYTHONPATH": str(WORKER.parent)}
    return subprocess.Popen(words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str]) -> None:
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said


def final(folder: Path) -> list[Tensor]:
    return torch.load(folder / "final.pt", weights_only=True)


@pytest.mark.parametrize("name", ["adamw"])
def test_case_14_in_a_fresh_process_and_after_sigkill(native, tmp_path, name):
    """Killed where chance has it, again and again, a run ends with the bits of one that nobody disturbed."""
    n = 22
    whole, halves, killed = (tmp_path / part for part in ("whole", "halves", "killed"))
    for folder in (whole, halves, killed):
        folder.mkdir()
    finish(start(whole, "native", name, n))
    # Two processes, the first of which ends after micro-batch 2 of 4: its flush at the end is not in the checkpoint.
    finish(start(halves, "native", name, 10))
    (halves / "final.pt").unlink()
    finish(start(halves, "native", name, n))
    for one, other in zip(final(whole), final(halves), strict=True):
        assert torch.equal(one, other)

    chance = random.Random(7)
    kills = 0
    while not (killed / "final.pt").exists():
        process = start(killed, "native", name, n)
        assert process.stdout is not None
        if kills < 3:
            for _ in range(chance.randrange(2, 6)):
                process.stdout.readline()
            time.sleep(chance.random() * 0.01)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            assert process.returncode == -signal.SIGKILL
            kills += 1
        else:
            finish(process)
    assert kills == 3
    for one, other in zip(final(whole), final(killed), strict=True):
        assert torch.equal(one, other)
