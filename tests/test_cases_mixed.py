"""What users reported of mixed precision, skips and options (shared cases 9, 16, 21, 22, 23)."""

from __future__ import annotations

import copy
import itertools
import re

import pytest
import torch
from helpers import assert_same_bits
from models import (
    DTYPES,
    OPTIMIZERS,
    Oracle,
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


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_case_09_inf_in_the_second_of_four(backend_name, name, dtype, bad):
    """The window is skipped as a whole: nothing moves, the next one starts afresh (espnet 3283, accelerate 4242)."""
    model = mlp(dtype)
    oracle = Oracle(model, name)
    optimizer = wrap(model, name, accumulation_steps=4, max_grad_norm=1.0, backend=backend_name)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(oracle.optimizer, 1, gamma=0.5)
    for window in range(4):
        before = snapshot(optimizer)
        batches = inputs(4, dtype)
        sums = fp32_sums(micro_grads(model, batches), scale=0.25)
        skip = window in (0, 2)  # before there is any state, and after
        for i, batch in enumerate(batches):
            weight = bad if skip and i == 1 else 1.0
            run_window(model, optimizer, [batch], weight)
        assert optimizer.stepped
        assert optimizer.found_inf.item() == float(skip)
        if optimizer.stepped and not optimizer.found_inf:
            scheduler.step()
        if skip:
            after = snapshot(optimizer)
            if window == 2:
                assert_unmoved(before, after)
            for was, now in zip(before[0], after[0], strict=True):
                assert torch.equal(was, now)
            counts = [state["step"].item() for state in optimizer.state.values() if "step" in state]
            assert counts == [window // 2] * len(counts)
        else:
            oracle.step(sums, max_norm=1.0)
            schedule.step()
        optimizer.zero_grad()
    oracle.assert_matches(optimizer)
    assert optimizer.param_groups[0]["lr"] == oracle.optimizer.param_groups[0]["lr"] == 0.25e-2


def test_case_09_one_bad_element_anywhere(backend_name):
    """At the head, the tail and a chunk's border of a large parameter."""
    n = 70001
    param = nn.Parameter(torch.ones(n))
    optimizer = FusedAccumOptimizer(torch.optim.SGD([param], lr=1.0), backend=backend_name)
    for at in (0, 1, 32767, 32768, n - 1):
        weight = torch.ones(n)
        weight[at] = float("inf")
        (param * weight).sum().backward()
        optimizer.step()
        assert optimizer.found_inf.item() == 1
        assert torch.equal(param, torch.ones(n))
        optimizer.zero_grad()
    param.sum().backward()
    optimizer.step()
    assert torch.equal(param, torch.zeros(n))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.AdamW([p], differentiable=True), "param_groups[0] has differentiable=True"),
        (lambda p: torch.optim.RMSprop([p], differentiable=True), "param_groups[0] has differentiable=True"),
        (lambda p: torch.optim.LBFGS([p]), "LBFGS"),
        (lambda p: torch.optim.SparseAdam([p]), "SparseAdam"),
    ],
)
def test_case_16_an_option_that_cannot_be_honoured(backend_name, make, message):
    """An option was accepted and ignored (apex 1728)."""
    param = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=re.escape(message)):
        FusedAccumOptimizer(make(param), backend=backend_name)
    param.sum().backward()  # nothing was left behind
    assert torch.equal(param.grad, torch.ones(3))


def test_case_16_an_option_that_the_rule_does_not_know(backend_name):
    """A later torch's new option, which the fused rule would ignore."""
    inner = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    inner.defaults["cautious"] = inner.param_groups[0]["cautious"] = True
    with pytest.raises(ValueError, match=r"param_groups\[0\] has the option 'cautious'"):
        FusedAccumOptimizer(inner, backend=backend_name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_case_16_masters_of_an_odd_dtype(backend_name, dtype):
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(3, dtype=dtype))})
    inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
    with pytest.raises(TypeError, match=f"'?w'?.* has dtype {str(dtype)[6:]}; accepted: float32, float16, bfloat16"):
        FusedAccumOptimizer(inner, backend=backend_name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cls", ["AdamW", "SGD", "RMSprop", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "Rprop"])
def test_case_16_without_masters_parameters_are_updated_in_fp32(backend_name, cls, dtype):
    """``master_weights=False`` on the optimizer's own step ran it in 16 bits, or failed inside of torch."""
    model = mlp(dtype)
    make = lambda params: getattr(torch.optim, cls)(params, lr=0.01)  # noqa: E731
    plain = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    reference = make(plain)
    optimizer = FusedAccumOptimizer(make(model.parameters()), master_weights=False, backend=backend_name)
    for _ in range(3):
        batches = inputs(2, dtype)
        sums = fp32_sums(micro_grads(model, batches))
        run_window(model, optimizer, batches)
        for param, mine, total in zip(model.parameters(), plain, sums, strict=True):
            mine.data.copy_(param.detach())
            mine.grad = total
        reference.step()
        optimizer.step()
        optimizer.zero_grad()
        for param, mine in zip(model.parameters(), plain, strict=True):
            # Between the two lie the roundings of the two fp32 updates (see Oracle.assert_matches), and a tie that
            # they may break: one ulp of the parameter's dtype.
            ulp = torch.finfo(dtype).eps
            torch.testing.assert_close(param.float(), mine.detach(), rtol=ulp, atol=2**-15 * 0.05)
    for state in optimizer.state.values():
        assert "master_param" not in state
        assert all(value.dtype is torch.float32 for value in state.values() if torch.is_tensor(value))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_case_16_state_made_by_the_constructor_becomes_fp32(backend_name, dtype):
    """Adagrad makes its sums before it is wrapped, in the parameter's dtype: 1 + 2^-9 stayed 1 there."""
    model = mlp(dtype)
    make = lambda params: torch.optim.Adagrad(params, lr=0.01, initial_accumulator_value=1.0)  # noqa: E731
    oracle = Oracle(model, make)
    optimizer = FusedAccumOptimizer(make(model.parameters()), backend=backend_name)
    for _ in range(4):
        batches = inputs(2, dtype)
        sums = fp32_sums(micro_grads(model, batches))
        run_window(model, optimizer, batches)
        optimizer.step()
        optimizer.zero_grad()
        oracle.step(sums)
    oracle.assert_matches(optimizer)
    for param, want in zip(model.parameters(), oracle.params, strict=True):
        got = optimizer.state[param]["sum"]
        assert got.dtype is torch.float32
        # 4 adds of a square to a sum of at least 1.
        torch.testing.assert_close(got.double(), oracle.optimizer.state[want]["sum"], rtol=2**-21, atol=0)


# Case 21: strides ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["transposed", "expanded", "sliced", "negated", "permuted", "one row"])
def test_case_21_gradients_of_other_strides(backend_name, kind, dtype):
    """A gradient's memory was read in the parameter's order (pytorch 106951, bitsandbytes 1185)."""
    shape = (1, 6) if kind == "one row" else (5, 6, 3) if kind == "permuted" else (5, 6)
    param = nn.Parameter(torch.randn(shape).to(dtype))
    given = {
        "transposed": torch.randn(6, 5).to(dtype).t(),
        "expanded": torch.randn(5, 1).to(dtype).expand(5, 6),
        "sliced": torch.randn(10, 12).to(dtype)[::2, ::2],
        "negated": torch._neg_view(torch.randn(5, 6).to(dtype)),
        "permuted": torch.randn(3, 5, 6).to(dtype).permute(1, 2, 0),
        "one row": torch.randn(6, 4).to(dtype).t()[:1],
    }[kind]

    class Give(torch.autograd.Function):
        @staticmethod
        def forward(ctx, p):
            return p.sum()

        @staticmethod
        def backward(ctx, grad):
            return given

    optimizer = FusedAccumOptimizer(torch.optim.SGD([param], lr=1.0), backend=backend_name)
    oracle = Oracle(nn.ParameterList([param]), lambda params: torch.optim.SGD(params, lr=1.0))
    values = given.resolve_neg().contiguous()
    for n in (1, 2):
        Give.apply(param).backward()
        assert_same_bits(param.grad, values.float() * n)
    optimizer.step()
    oracle.step([values.float() * 2])
    oracle.assert_matches(optimizer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("which", ["parameter", "input", "parameter, later", "back, later"])
def test_case_21_channels_last(backend_name, name, dtype, which):
    """A convolution whose weight, or only whose gradient, is channels-last. With the model converted after the first
    step the update used to be made in the old memory order: right values at the wrong places."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, (2, 1))).to(dtype)
    if which in ("parameter", "back, later"):
        model.to(memory_format=torch.channels_last)
    oracle = Oracle(model, name)
    optimizer = wrap(model, name, backend=backend_name)
    for step in range(3):
        batches = inputs(2, dtype, n_features=3 * 64)
        batches = [batch.view(5, 3, 8, 8) for batch in batches]
        if which == "input":
            batches = [batch.contiguous(memory_format=torch.channels_last) for batch in batches]
        sums = fp32_sums(micro_grads(model, batches))
        run_window(model, optimizer, batches)
        for param, want in zip(model.parameters(), sums, strict=True):
            torch.testing.assert_close(param.grad, want, rtol=0, atol=0, check_stride=False)
        if step == 1 and which.endswith("later"):  # with gradients and states there
            order = torch.channels_last if which == "parameter, later" else torch.contiguous_format
            model.to(memory_format=order)
        norm = optimizer.clip_grad_norm_(1e9)
        assert norm.item() == pytest.approx(norm_of(sums), rel=norm_rtol(32))
        optimizer.step()
        optimizer.zero_grad()
        oracle.step(sums)
        oracle.assert_matches(optimizer)
    saved = optimizer.state_dict()["state"]
    for i, want in enumerate(oracle.params):
        for key, value in oracle.optimizer.state[want].items():
            torch.testing.assert_close(saved[i][key].double(), value.double(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_21_a_contiguous_gradient_of_a_parameter_that_was_turned(backend_name, dtype):
    """The hook had looked at the parameter's order once, when it was made."""
    weight = nn.Parameter(torch.randn(4, 6).to(dtype))
    oracle = Oracle(nn.ParameterList([weight]), "sgd")
    optimizer = FusedAccumOptimizer(OPTIMIZERS["sgd"]([weight]), backend=backend_name)
    for window in range(3):
        if window == 1:
            weight.data = weight.data.t().contiguous().t()
        grad = torch.randn(4, 6).to(dtype)
        handle = weight.register_hook(lambda _, grad=grad: grad)
        weight.sum().backward()
        handle.remove()
        assert grad.is_contiguous()
        torch.testing.assert_close(weight.grad, grad.float(), rtol=0, atol=0, check_stride=False)
        optimizer.step()
        optimizer.zero_grad()
        oracle.step([grad.float()])
    oracle.assert_matches(optimizer)


# Case 22: odd shapes ------------------------------------------------------------------------------------------------

_SHAPES = [(0,), (), (4, 5), (3, 0, 2), (1,), (65,)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0), (0,), (3, 0), (1,), (0, 1, 3, 2, 4, 5, 0), (1, 4, 0)])
def test_case_22_empty_and_0_dim_parameters(backend_name, name, dtype, order):
    """Empty tensors first, last and alone corrupted the chunk table (TE 3202, pytorch 100811)."""
    model = nn.ParameterList([nn.Parameter(torch.randn(_SHAPES[i]).to(dtype)) for i in order])
    oracle = Oracle(model, name)
    optimizer = wrap(model, name, accumulation_steps=2, max_grad_norm=0.1, backend=backend_name)
    for _ in range(2):
        weights = [[torch.randn(param.shape).to(dtype) for param in model] for _ in range(2)]
        for each in weights:
            sum((param * weight).sum() for param, weight in zip(model, each, strict=True)).backward()
            optimizer.step()
        sums = fp32_sums(weights, scale=0.5)
        norm = oracle.step(sums, max_norm=0.1)
        assert optimizer.grad_norm.item() == pytest.approx(norm, rel=norm_rtol(32))
        assert optimizer.found_inf.item() == 0
        for param in model:
            assert param.grad.shape == param.shape
        optimizer.zero_grad()
        oracle.assert_matches(optimizer)


# Case 23: edited groups ---------------------------------------------------------------------------------------------

_EDITS = {
    "adamw": {"lr": 3e-2, "weight_decay": 0.5, "betas": (0.5, 0.9), "eps": 1e-2, "maximize": True},
    "sgd": {"lr": 3e-2, "weight_decay": 0.5, "momentum": 0.5, "dampening": 0.5, "nesterov": True, "maximize": True},
    "rmsprop": {"lr": 3e-2, "alpha": 0.5, "eps": 1e-2, "momentum": 0.1},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "key"), [(name, key) for name, edits in _EDITS.items() for key in edits])
def test_case_23_groups_edited_in_place(backend_name, name, key, dtype):
    """The next step uses what ``param_groups`` says (apex 978, torchao 730), on the group it is said of only."""
    model = mlp(dtype)

    def make(params):
        params = list(params)
        inner = OPTIMIZERS[name](params[:2])
        inner.add_param_group({"params": params[2:]})
        return inner

    oracle = Oracle(model, make)
    optimizer = FusedAccumOptimizer(make(model.parameters()), backend=backend_name)
    for step in range(4):
        if step == 2:
            for groups in (oracle.optimizer.param_groups, optimizer.param_groups):
                groups[1][key] = _EDITS[name][key]
        batch = inputs(1, dtype)
        sums = fp32_sums(micro_grads(model, batch))
        run_window(model, optimizer, batch)
        optimizer.step()
        optimizer.zero_grad()
        oracle.step(sums)
        oracle.assert_matches(optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("on_inner", [True, False])
@pytest.mark.parametrize("tensor_lr", [True, False])
def test_case_23_a_scheduler(backend_name, name, on_inner, tensor_lr):
    model = mlp()

    def make(params):
        inner = OPTIMIZERS[name](params)
        if tensor_lr:
            inner.param_groups[0]["lr"] = torch.tensor(1e-2)
        return inner

    oracle = Oracle(model, make)
    optimizer = FusedAccumOptimizer(make(model.parameters()), backend=backend_name)
    new = lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 1.0 / (1 + epoch))  # noqa: E731
    scheduler, schedule = new(optimizer.inner if on_inner else optimizer), new(oracle.optimizer)
    for _ in range(4):
        batch = inputs(1)
        sums = fp32_sums(micro_grads(model, batch))
        run_window(model, optimizer, batch)
        optimizer.step()
        scheduler.step()
        oracle.step(sums)
        schedule.step()
        optimizer.zero_grad()
    oracle.assert_matches(optimizer)


def test_case_23_momentum_switched_off_and_on(backend_name):
    """With momentum 0 torch keeps the buffer as it is, for later."""
    model = mlp()
    plain = copy.deepcopy(model)
    optimizer = wrap(model, "sgd", backend=backend_name)
    reference = OPTIMIZERS["sgd"](plain.parameters())
    for momentum in itertools.chain([0.9, 0.9, 0.0, 0.9, 0.0, 0.0, 0.9]):
        batch = inputs(1)[0]
        for each, opt in ((model, optimizer), (plain, reference)):
            opt.param_groups[0]["momentum"] = momentum
            loss_of(each, batch).backward()
            opt.step()
            opt.zero_grad()
    for param, want in zip(model.parameters(), plain.parameters(), strict=True):
        # 7 updates of a few roundings each, of values below 1.
        torch.testing.assert_close(param, want, rtol=0, atol=7 * 8 * 2**-24)


def test_case_23_amsgrad_switched_on_later(backend_name):
    """Plain torch fails with a KeyError; here the maximum starts at zero."""
    model = mlp()
    optimizer = wrap(model, backend=backend_name)
    largest = [torch.zeros_like(param) for param in model.parameters()]
    for step in range(4):
        optimizer.param_groups[0]["amsgrad"] = step > 0
        run_window(model, optimizer, [batch / (step + 1) for batch in inputs(1)])
        optimizer.step()
        optimizer.zero_grad()
        for param, most in zip(model.parameters(), largest, strict=True):
            state = optimizer.state[param]
            if step > 0:
                most.copy_(torch.maximum(most, state["exp_avg_sq"]))
                assert torch.equal(state["max_exp_avg_sq"], most)
            else:
                assert "max_exp_avg_sq" not in state
