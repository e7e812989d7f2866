"""What users reported of windows, weights and clip (shared cases 2-5, 7, 10, 12, 25)."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from helpers import assert_same_bits
from models import (
    DTYPES,
    OPTIMIZERS,
    U32,
    Oracle,
    Usage,
    assert_unmoved,
    fp32_sums,
    inputs,
    loss_of,
    micro_grads,
    mlp,
    norm_of,
    norm_rtol,
    run_window,
    snapshot,
    wrap,
)
from torch import nn

from fusedaccum import FusedAccumOptimizer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_case_02_the_last_short_window_divides_by_its_own_count(backend_name, name, dtype):
    """5 micro-batches, windows of 4: the second step divided by 4 (Lightning 19987)."""
    model = mlp(dtype)
    oracle = Oracle(model, name)
    optimizer = wrap(model, name, accumulation_steps=4, backend=backend_name)
    batches = inputs(5, dtype)
    for window in (batches[:4], batches[4:]):
        grads = micro_grads(model, window)
        run_window(model, optimizer, window)
        if len(window) < 4:
            assert not optimizer.stepped
            assert optimizer.flush()
        assert optimizer.stepped
        # 1/4 is exact, so that sum(grad / 4) * (4 / n) is sum(grad) / n.
        oracle.step(fp32_sums(grads), divisor=len(window))
        oracle.assert_matches(optimizer)
        optimizer.zero_grad()
    assert not optimizer.flush()
    assert not optimizer.stepped


def test_case_02_a_tail_never_leaks_into_the_next_epoch(backend_name):
    """63 micro-batches, windows of 8: the tail of 7 was added to the next epoch's first window (torchtune 2745)."""
    model = mlp()
    oracle = Oracle(model)
    optimizer = wrap(model, accumulation_steps=8, backend=backend_name)
    for _ in range(2):
        batches = inputs(63)
        for at in range(0, 63, 8):
            window = batches[at : at + 8]
            grads = micro_grads(model, window)
            run_window(model, optimizer, window)
            if len(window) == 7:
                optimizer.flush()
            oracle.step(fp32_sums(grads), divisor=len(window))
            optimizer.zero_grad()
    oracle.assert_matches(optimizer)


@pytest.mark.parametrize("end", ["reset", "deletion", "remove", "deepcopy"])
def test_case_02_a_dropped_tail_is_said(backend_name, end):
    """An epoch that ended inside a window lost its gradients without a word (pet 36)."""
    model = mlp()
    optimizer = wrap(model, accumulation_steps=4, backend=backend_name)
    run_window(model, optimizer, inputs(3))
    held = [optimizer]
    del optimizer
    ends = {"deletion": held.clear, "deepcopy": lambda: copy.deepcopy(held[0])}
    act = ends.get(end) or getattr(held[0], end)
    with pytest.warns(UserWarning, match="window of 3 of 4 micro-batches"):
        act()
    if end == "deepcopy":  # it goes on
        assert held[0].flush()
    if end == "reset":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            held[0].reset()  # the window is closed: nothing is lost any more


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_case_03_decay_bias_correction_and_clip_once_a_window(backend_name, name):
    """Weight decay and the step count moved with every micro-batch (Keras 19990)."""
    model = mlp()
    oracle = Oracle(model, name)
    optimizer = wrap(model, name, accumulation_steps=4, max_grad_norm=0.05, backend=backend_name)
    for n_windows in range(1, 4):
        batches = inputs(4)
        sums = fp32_sums(micro_grads(model, batches), scale=0.25)
        run_window(model, optimizer, batches)
        norm = oracle.step(sums, max_norm=0.05)
        assert norm > 0.05  # else the clip does nothing here
        assert optimizer.grad_norm.item() == pytest.approx(norm, rel=norm_rtol(32))
        if name == "adamw":
            assert all(state["step"].item() == n_windows for state in optimizer.state.values())
        optimizer.zero_grad()
    oracle.assert_matches(optimizer)


@pytest.mark.parametrize("inner", [True, False])
def test_case_03_scheduler_and_ema_move_once_a_window(backend_name, inner):
    """A scheduler and an EMA moved with every micro-batch (accelerate 963, F5-TTS 631)."""
    model = mlp()
    optimizer = wrap(model, accumulation_steps=4, backend=backend_name)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.inner if inner else optimizer, step_size=1, gamma=0.5)
    ema = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()" would be wrong
        for batch in inputs(12):
            run_window(model, optimizer, [batch])
            if optimizer.stepped:
                scheduler.step()
                ema += 1
            optimizer.zero_grad()
    assert ema == 3
    assert optimizer.param_groups[0]["lr"] == 1e-2 / 2**3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_micro_batches", [1, 2, 3, 8])
@pytest.mark.parametrize("in_window", [True, False])
def test_case_04_the_accumulator_is_the_plain_sum(backend_name, n_micro_batches, dtype, in_window):
    """Got 2^K times the gradient (Megatron 6660), only the last (DeepSpeed 545), only the first (Fast-LLM 550)."""
    model = mlp(dtype)
    steps = n_micro_batches + 1 if in_window else None  # a window that is still open
    optimizer = wrap(model, accumulation_steps=steps, backend=backend_name)
    batches = inputs(n_micro_batches, dtype)
    run_window(model, optimizer, batches)
    sums = fp32_sums(micro_grads(model, batches), scale=1.0 if steps is None else 1.0 / steps)
    for param, want in zip(model.parameters(), sums, strict=True):
        assert_same_bits(param.grad, want)
    if in_window:
        optimizer.flush()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_case_04_any_order_of_arrival(backend_name, order):
    """Parameters that arrive in another order than they were made in, and in another one each micro-batch."""
    model = Usage(3)
    optimizer = wrap(model, backend=backend_name, bucket_bytes=300)  # a bucket holds a weight and a bias, not two
    grads = []
    for used in (order, order[::-1], (0, 1, 2)):
        model.used = used
        batch = inputs(1)[0]
        grads += micro_grads(model, [batch])
        loss_of(model, batch).backward()
    for param, want in zip(model.parameters(), fp32_sums(grads), strict=True):
        assert_same_bits(param.grad, want)
    assert optimizer.clip_grad_norm_(1.0).item() == pytest.approx(norm_of(fp32_sums(grads)), rel=norm_rtol(32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_case_05_used_only_in_the_third_micro_batch(backend_name, name, dtype):
    """A first add that added to the last window's contents (Megatron 6279); an unused parameter that decayed
    (pytorch 83769)."""
    model = Usage(3, dtype)
    oracle = Oracle(model, name)
    optimizer = wrap(model, name, accumulation_steps=4, backend=backend_name, max_grad_norm=0.01)
    untouched = [param.detach().clone() for param in model.layers[2].parameters()]
    for n_windows in range(1, 4):
        grads = []
        for i, batch in enumerate(inputs(4, dtype)):
            # The second layer now and then, the third never.
            model.used = (0, 1) if i == 2 and n_windows != 2 else (0,)
            grads += micro_grads(model, [batch])
            run_window(model, optimizer, [batch])
        sums = fp32_sums(grads, scale=0.25)
        for param, want in zip(model.parameters(), sums, strict=True):
            assert param.grad is None if want is None else torch.equal(param.grad, want) or name == "rmsprop"
        norm = oracle.step(sums, max_norm=0.01)
        assert optimizer.grad_norm.item() == pytest.approx(norm, rel=norm_rtol(32))
        optimizer.zero_grad()
        oracle.assert_matches(optimizer)
        if name == "adamw":  # a parameter unused in a window does not age
            counts = [optimizer.state[layer.weight].get("step") for layer in model.layers[:2]]
            assert counts == [n_windows, n_windows - (n_windows > 1)]
    for param, was in zip(model.layers[2].parameters(), untouched, strict=True):
        assert torch.equal(param, was)
        assert param not in optimizer.state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("through_torch", [True, False])
def test_case_07_clip_of_the_sum(backend_name, name, dtype, through_torch):
    """``clip_grad_norm_``, then ``step()`` without max_grad_norm: the step saw unclipped values (transformers 1563)."""
    model = mlp(dtype)
    oracle = Oracle(model, name)
    optimizer = wrap(model, name, backend=backend_name)
    for _ in range(3):
        batches = inputs(3, dtype)
        sums = fp32_sums(micro_grads(model, batches))
        run_window(model, optimizer, batches)
        if through_torch:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        else:
            norm = optimizer.clip_grad_norm_(0.05)
        want = oracle.step(sums, max_norm=0.05)
        assert norm.dtype is torch.float32
        # torch's own norm of norms sums n squares in fp32, in an order of its own.
        n_elems = sum(param.numel() for param in model.parameters())
        assert norm.item() == pytest.approx(want, rel=n_elems * U32)
        optimizer.step()
        oracle.assert_matches(optimizer)
        optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [None, 2])
def test_case_10_all_gradients_none(backend_name, name, steps):
    """``step()`` without any gradient is a no-op as in torch (transformers 24003)."""
    model = mlp()
    optimizer = wrap(model, name, accumulation_steps=steps, backend=backend_name, max_grad_norm=1.0)
    before = snapshot(optimizer)
    optimizer.step()
    optimizer.step()
    assert_unmoved(before, snapshot(optimizer))
    assert all(param.grad is None for param in model.parameters())
    assert optimizer.found_inf.item() == 0
    # And after a window that had some.
    run_window(model, optimizer, inputs(2))
    if steps is None:
        optimizer.step()
    optimizer.zero_grad()
    before = snapshot(optimizer)
    optimizer.step()
    optimizer.step()
    assert_unmoved(before, snapshot(optimizer))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_case_12_many_equal_gradients_add_up(backend_name, dtype):
    """1024 gradients of 1.0 added up to 256 in bf16 (DeepSpeed 1800)."""
    param = nn.Parameter(torch.zeros(5, dtype=dtype))
    optimizer = FusedAccumOptimizer(torch.optim.SGD([param], lr=1.0), backend=backend_name)
    loss = param.sum()
    for _ in range(1024):
        loss.backward(retain_graph=True)
    assert torch.equal(param.grad, torch.full((5,), 1024.0))
    optimizer.step()
    assert torch.equal(param, torch.full((5,), -1024.0, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_case_12_small_gradients_after_a_large_one(backend_name, dtype):
    """1e-3 added 4096 times to 1.0 stayed 1.0 (DeepSpeed 2768)."""
    param = nn.Parameter(torch.zeros(5, dtype=dtype))
    optimizer = FusedAccumOptimizer(torch.optim.SGD([param], lr=1.0), backend=backend_name)
    param.sum().backward()
    small = torch.tensor(1e-3, dtype=dtype)
    loss = (param * small).sum()
    for _ in range(4096):
        loss.backward(retain_graph=True)
    # Every add rounds once, and no sum on the way exceeds the last, 5.1.
    want = 1.0 + 4096 * small.double().item()
    torch.testing.assert_close(param.grad.double(), torch.full((5,), want).double(), rtol=4096 * U32, atol=0)
    assert optimizer.clip_grad_norm_(1.0).item() == pytest.approx(want * 5**0.5, rel=4098 * U32)


def test_case_25_step_in_a_post_accumulate_hook(backend_name):
    """An optimizer-in-backward loop: two backwards before one step made two updates (pytorch 124523)."""
    model = mlp()
    want = copy.deepcopy(model)
    optimizers = {
        param: FusedAccumOptimizer(torch.optim.SGD([param], lr=0.1), accumulation_steps=2, backend=backend_name)
        for param in model.parameters()
    }

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    batches = inputs(2)
    start = copy.deepcopy(model)
    for batch in batches:
        loss_of(model, batch).backward()
        if batch is batches[0]:
            for param, was in zip(model.parameters(), start.parameters(), strict=True):
                assert torch.equal(param, was)
    for param, was, grad in zip(
        model.parameters(), want.parameters(), fp32_sums(micro_grads(start, batches), 0.5), strict=True
    ):
        assert torch.equal(param, was - 0.1 * grad)
        assert param.grad is None


def test_case_25_two_backwards_before_one_step(backend_name):
    """One update, of the sum."""
    model = mlp()
    oracle = Oracle(model)
    optimizer = wrap(model, backend=backend_name)
    batches = inputs(2)
    run_window(model, optimizer, batches)
    optimizer.step()
    oracle.step(fp32_sums(micro_grads_of_start(oracle, batches)))
    oracle.assert_matches(optimizer)
    assert {state["step"].item() for state in optimizer.state.values()} == {1.0}


def micro_grads_of_start(oracle, batches):
    """The micro-batches' gradients at the parameters that the oracle started from."""
    model = mlp()
    with torch.no_grad():
        for param, start in zip(model.parameters(), oracle._start, strict=True):
            param.copy_(start)
    return micro_grads(model, batches)
