"""Whatever the shapes, strides, dtypes, order and number of micro-batches: the sum, and its norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import DTYPES, U32, norm_rtol
from torch import Tensor, nn

from fusedaccum import FusedAccumOptimizer
from fusedaccum.layout import CHUNK

# The backend is of session scope, and the same for all examples of a test.
SETTINGS = settings(
    max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

shapes = st.one_of(
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.sampled_from([(CHUNK,), (CHUNK - 1,), (3, CHUNK // 2), (1025,), (65,)]),
)


@dataclass
class Case:
    """Parameters, and for each micro-batch which of them get which gradient, in which order."""

    params: list[nn.Parameter]
    micro_batches: list[list[tuple[int, Tensor, float]]]
    accumulation_steps: int | None
    bucket_bytes: int


class Give(torch.autograd.Function):
    """Hands the parameter the gradient that the test says."""

    @staticmethod
    def forward(ctx, param: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return param.new_zeros(())

    @staticmethod
    def backward(ctx, factor: Tensor) -> tuple[Tensor, None]:
        return ctx.grad, None


def _laid_out(values: Tensor, kind: str) -> Tensor:
    """The same values in another memory order; a parameter or gradient may have any."""
    if kind == "reversed":
        dims = tuple(reversed(range(values.dim())))
        return values.permute(dims).contiguous().permute(dims)
    if kind == "channels last" and values.dim() == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if kind == "sliced" and values.dim() > 0:
        wide = values.new_zeros((*values.shape[:-1], values.shape[-1] * 2))
        wide[..., ::2] = values
        return wide[..., ::2]
    if kind == "negated":
        return torch._neg_view(-values)
    return values


@st.composite
def cases(draw) -> Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    params, dtypes = [], []
    for _ in range(draw(st.integers(1, 5))):
        dtypes.append(draw(st.sampled_from(DTYPES)))
        order = draw(st.sampled_from(["plain", "reversed", "channels last"]))
        params.append(nn.Parameter(_laid_out(random(draw(shapes), dtypes[-1]), order)))
    micro_batches = []
    for _ in range(draw(st.integers(1, 6))):
        used = draw(st.permutations(range(len(params))))[: draw(st.integers(0, len(params)))]
        batch = []
        for i in used:
            # Autograd hands a gradient over in the dtype that it was made in.
            grad_dtype = draw(st.sampled_from([dtypes[i], torch.float32]))
            kind = draw(st.sampled_from(["plain", "reversed", "channels last", "sliced", "negated"]))
            factor = draw(st.sampled_from([1.0, -3.0, 1e-3, 100.0]))
            batch.append((i, _laid_out(random(tuple(params[i].shape), grad_dtype) * factor, kind), factor))
        micro_batches.append(batch)
    steps = draw(st.sampled_from([None, 7, 12]))  # more than there are micro-batches: the window stays open
    return Case(params, micro_batches, steps, draw(st.sampled_from([1, 64, 4096, 2**25])))


@SETTINGS
@given(case=cases())
def test_grad_is_the_sum_and_grad_norm_its_norm(backend_name: str, case: Case) -> None:
    inner = torch.optim.SGD(case.params, lr=1.0)
    optimizer = FusedAccumOptimizer(
        inner,
        accumulation_steps=case.accumulation_steps,
        bucket_bytes=case.bucket_bytes,
        backend=backend_name,
    )
    scale = 1.0 / (case.accumulation_steps or 1)
    sums: list[Tensor | None] = [None] * len(case.params)
    sizes = [torch.zeros(param.shape, dtype=torch.float64) for param in case.params]
    for batch in case.micro_batches:
        loss = sum((Give.apply(case.params[i], grad) for i, grad, _ in batch), torch.zeros((), requires_grad=True))
        loss.float().backward()
        for i, grad, _ in batch:
            exact = grad.resolve_neg().double() * scale
            sums[i] = exact if sums[i] is None else sums[i] + exact
            sizes[i] += exact.abs()
        if case.accumulation_steps is not None:
            optimizer.step()
    n_batches = len(case.micro_batches)
    for param, total, size in zip(case.params, sums, sizes, strict=True):
        if total is None:
            assert param.grad is None
            continue
        assert param.grad.dtype is torch.float32
        assert param.grad.shape == param.shape
        # A product (and the scale itself) and a sum for each micro-batch, each rounded once; no partial sum exceeds
        # the sum of magnitudes.
        bound = (n_batches + 2) * U32 * size * (1 + 2**-20)
        assert bool(((param.grad.double() - total).abs() <= bound).all())

    held = [param.grad for param in case.params if param.grad is not None]
    want = sum(float(grad.double().square().sum()) for grad in held) ** 0.5
    largest = max((grad.numel() for grad in held), default=0)
    norm = optimizer.clip_grad_norm_(1e30).item()
    assert abs(norm - want) <= norm_rtol(largest) * want

    # And the step uses it, with the divisor of the micro-batches that there were.
    divisor = n_batches * scale if case.accumulation_steps else 1.0
    before = [param.detach().clone() for param in case.params]
    grads = [None if param.grad is None else param.grad.clone() for param in case.params]
    if case.accumulation_steps is None:
        optimizer.step()
    else:
        assert optimizer.flush()
    for param, was, grad in zip(case.params, before, grads, strict=True):
        if grad is None:
            assert torch.equal(param, was)
            continue
        exact = was.double() - grad.double() / divisor
        master = optimizer.state[param].get("master_param") if param in optimizer.state else None
        stepped = param.detach() if master is None else master
        # The multiplier, the product and the difference are rounded once each.
        bound = 3 * U32 * (was.double().abs() + (grad.double() / divisor).abs()) * (1 + 2**-20)
        assert bool(((stepped.double() - exact).abs() <= bound).all())
        assert torch.equal(param.detach(), stepped.to(param.dtype))


@SETTINGS
@given(case=cases())
def test_neither_buckets_nor_mode_change_a_bit(backend_name: str, case: Case) -> None:
    """Any bucket size, and both ways of interception."""
    from fusedaccum import capture

    results = []
    through = capture.node_skips_undefined
    for bucket_bytes, skips in ((1, True), (case.bucket_bytes, True), (2**30, False)):
        params = [nn.Parameter(param.detach().clone()) for param in case.params]
        try:
            capture.node_skips_undefined = lambda skips=skips: skips
            optimizer = FusedAccumOptimizer(
                torch.optim.SGD(params, lr=1.0), bucket_bytes=bucket_bytes, backend=backend_name
            )
        finally:
            capture.node_skips_undefined = through
        for batch in case.micro_batches:
            loss = sum((Give.apply(params[i], grad) for i, grad, _ in batch), torch.zeros((), requires_grad=True))
            loss.float().backward()
        norm = optimizer.clip_grad_norm_(1.0)
        results.append([norm, *(param.grad for param in params)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
