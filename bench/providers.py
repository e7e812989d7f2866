"""The ways to do each op, ours first. Each function checks its provider's result before it hands it out.

Gradients are normal values in bfloat16 and the scale is a power of two, so that three additions are exact in fp32 and
rounded once in bfloat16: results are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedaccum import FusedAccumOptimizer

from . import probe
from .measure import Provider
from .shapes import Shape, gradients, parameters

SCALE = 0.25
LR, WEIGHT_DECAY, MAX_NORM = 1e-3, 0.1, 1.0
OURS = "fusedaccum"


class _Deliver(torch.autograd.Function):
    """Hands prepared gradients to autograd: a backward that costs nothing but what becomes of its gradients."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *params: Parameter) -> Tensor:
        ctx.grads = grads
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        # A gradient that somebody keeps may be written to, so the capture adds it at once, outside of any bucket.
        grads, ctx.grads = ctx.grads, None
        return (None, *grads)


class Delivery:
    """``prepare`` builds the graph, ``run`` is its backward."""

    def __init__(self, grads: list[Tensor], params: list[Parameter]) -> None:
        self._grads, self._params = grads, params

    def prepare(self) -> None:
        # New tensors over the same memory, which only the engine will hold.
        self._loss = _Deliver.apply([grad.detach() for grad in self._grads], *self._params)

    def run(self) -> None:
        self._loss.backward()


def _check_three_adds(
    provider: Provider, result: Callable[[], Sequence[Tensor]], grads: list[Tensor], scale: float = SCALE
) -> Provider:
    """Runs the provider, fresh, three times; ``result`` must then give three times the scaled gradients."""
    for _ in range(3):
        provider.prepare()
        provider.run()
    for i, (got, grad) in enumerate(zip(result(), grads, strict=True)):
        expected = (grad.float() * (3 * scale)).to(got.dtype)
        if not torch.equal(got, expected):
            raise AssertionError(f"{provider.name}: gradient {i} is wrong after three micro-batches")
    return provider


# A steady micro-batch ------------------------------------------------------------------------------------------------


def _wrapped(params: list[Parameter]) -> FusedAccumOptimizer:
    adamw = torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY)
    return FusedAccumOptimizer(adamw, accumulation_steps=round(1 / SCALE), max_grad_norm=MAX_NORM)


def _check_norm(optimizer: FusedAccumOptimizer, params: list[Parameter]) -> None:
    """The partials give the norm; 1e-6: fp32 squares in lanes of at most 32 each, then fp64."""
    expected = sum(float(p.grad.double().square().sum()) for p in params) ** 0.5
    got = float(optimizer.clip_grad_norm_(MAX_NORM))
    if abs(got - expected) > 1e-6 * expected:
        raise AssertionError(f"{OURS}: norm {got}, expected {expected}")


def accumulate_fusedaccum(grads: list[Tensor]) -> Provider:
    """The wrapper's capture, bucket and kernel, partials included."""
    params = parameters([grad.shape for grad in grads], torch.bfloat16)
    optimizer = _wrapped(params)
    delivery = Delivery(grads, params)
    delivery.optimizer = optimizer  # the capture holds it weakly
    provider = Provider(OURS, delivery.run, delivery.prepare, bytes_an_element=10)
    _check_three_adds(provider, lambda: [p.grad for p in params], grads)
    _check_norm(optimizer, params)
    return provider


def first_fusedaccum(grads: list[Tensor]) -> Provider:
    """The first micro-batch of a window: stores instead of adding."""
    params = parameters([grad.shape for grad in grads], torch.bfloat16)
    optimizer = _wrapped(params)
    delivery = Delivery(grads, params)

    def prepare() -> None:
        optimizer.zero_grad()
        delivery.prepare()

    provider = Provider(OURS, delivery.run, prepare, bytes_an_element=6)
    _check_three_adds(provider, lambda: [p.grad for p in params], grads, SCALE / 3)
    return provider


def _accumulators(grads: list[Tensor]) -> list[Tensor]:
    return [torch.zeros(grad.shape) for grad in grads]


def accumulate_naive(grads: list[Tensor]) -> Provider:
    """What people write: two fp32 temporaries a parameter."""
    acc = _accumulators(grads)

    def run() -> None:
        for a, g in zip(acc, grads, strict=True):
            a += g.float() * SCALE

    return _check_three_adds(Provider("naive", run, bytes_an_element=26), lambda: acc, grads)


def accumulate_foreach(grads: list[Tensor]) -> Provider:
    """torch's multi-tensor add."""
    acc = _accumulators(grads)

    def run() -> None:
        torch._foreach_add_(acc, grads, alpha=SCALE)

    return _check_three_adds(Provider("foreach", run, bytes_an_element=10), lambda: acc, grads)


def accumulate_compiled(grads: list[Tensor]) -> Provider:
    """The naive loop under ``torch.compile``; keeps no norm."""
    acc = _accumulators(grads)

    @torch.compile(dynamic=False)
    def loop(acc: list[Tensor], grads: list[Tensor]) -> None:
        for a, g in zip(acc, grads, strict=True):
            a += g.float() * SCALE

    def run() -> None:
        loop(acc, grads)

    return _check_three_adds(Provider("compiled", run, bytes_an_element=10), lambda: acc, grads)


def _by_autograd(name: str, grads: list[Tensor], grad_dtype: torch.dtype, n_bytes: int) -> Provider:
    params = parameters([grad.shape for grad in grads], torch.bfloat16)
    for param in params:
        param.grad_dtype = grad_dtype
        # Where there is no .grad torch would make the prepared gradient the accumulator.
        param.grad = torch.zeros_like(param, dtype=grad_dtype)
    delivery = Delivery(grads, params)
    dtypes = "bf16 -> fp32" if grad_dtype == torch.float32 else "bf16 -> bf16"
    provider = Provider(name, delivery.run, delivery.prepare, dtypes, n_bytes)
    # Scaling is the loss's business here, and free.
    return _check_three_adds(provider, lambda: [p.grad for p in params], grads, scale=1.0)


def accumulate_grad_dtype(grads: list[Tensor]) -> Provider:
    """Autograd's own accumulation with ``grad_dtype = torch.float32``: a cast, then an add."""
    return _by_autograd("grad_dtype", grads, torch.float32, 18)


def accumulate_native_bf16(grads: list[Tensor]) -> Provider:
    """Autograd's own accumulation in bfloat16: fewest bytes, wrong sums."""
    return _by_autograd("native bf16", grads, torch.bfloat16, 6)


def accumulate_probe(grads: list[Tensor]) -> Provider:
    """The bytes of ``accumulate``, and no arithmetic."""
    grad = torch.cat([grad.reshape(-1) for grad in grads])
    acc = torch.zeros(grad.numel())
    provider = Provider("probe", lambda: probe.accumulate(acc, grad), bytes_an_element=10)
    provider.run()
    _check_probe(provider, acc.view(torch.int32), grad.view(torch.int16).int() & 0xFFFF)
    return provider


def first_probe(grads: list[Tensor]) -> Provider:
    """The bytes of a first micro-batch."""
    grad = torch.cat([grad.reshape(-1) for grad in grads])
    acc = torch.zeros(grad.numel())
    provider = Provider("probe", lambda: probe.first(acc, grad), bytes_an_element=6)
    provider.run()
    _check_probe(provider, acc.view(torch.int32), grad.view(torch.int16).int() & 0xFFFF)
    return provider


def _check_probe(provider: Provider, got: Tensor, expected: Tensor) -> None:
    if not torch.equal(got, expected):
        raise AssertionError(f"{provider.name}: wrong bits")


# The boundary --------------------------------------------------------------------------------------------------------

BOUNDARY_DTYPES = "bf16 param, fp32 acc, states, master"


def _check_first_adamw(
    name: str, params: list[Parameter], masters: Sequence[Tensor], grads: list[Tensor], tolerance: float
) -> None:
    """The first step against fp64, on the head of every parameter.

    From zero states, AdamW moves by lr * g / (|g| + eps), g clipped.
    """
    norm = sum(float(grad.double().square().sum()) for grad in grads) ** 0.5
    factor = min(1.0, MAX_NORM / (norm + 1e-6))
    for param, master, before, grad in zip(
        params, masters, parameters([grad.shape for grad in grads], torch.float32), grads, strict=True
    ):
        head = slice(0, 4096)
        start = before.detach().reshape(-1)[head].double()
        g = grad.reshape(-1)[head].double() * factor
        expected = start * (1 - LR * WEIGHT_DECAY) - LR * g / (g.abs() + 1e-8)
        got = master.detach().reshape(-1)[head].double()
        if not torch.allclose(got, expected, rtol=0, atol=tolerance):
            raise AssertionError(f"{name}: a master is off by {float((got - expected).abs().max())}")
        if not torch.equal(param.detach(), master.to(param.dtype)):
            raise AssertionError(f"{name}: a parameter is not its rounded master")


def boundary_fusedaccum(grads: list[Tensor]) -> Provider:
    """``step()`` of the wrapper. ``.grad`` stays, so that it can be run again and again."""
    params = parameters([grad.shape for grad in grads], torch.bfloat16)
    adamw = torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY)
    optimizer = FusedAccumOptimizer(adamw, max_grad_norm=MAX_NORM)
    delivery = Delivery(grads, params)
    delivery.prepare()
    delivery.run()
    optimizer.step()
    masters = [optimizer.state[param]["master_param"] for param in params]
    # Two fp32 roundings of a value below 0.25, and lr times those of the quotient.
    _check_first_adamw(OURS, params, masters, grads, tolerance=3e-8)
    return Provider(OURS, optimizer.step, dtypes=BOUNDARY_DTYPES, bytes_an_element=30)


def boundary_torch(grads: list[Tensor]) -> Provider:
    """Clip, torch's fused AdamW on fp32 masters, and the copy back to bfloat16."""
    shapes = [grad.shape for grad in grads]
    params, masters = parameters(shapes, torch.bfloat16), parameters(shapes, torch.float32)
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    for master, grad in zip(masters, grads, strict=True):
        master.grad = grad.float()

    def run() -> None:
        torch.nn.utils.clip_grad_norm_(masters, MAX_NORM)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)

    run()
    # lr / 1000: torch sums squares in fp32, and a gradient near eps feels the error of the norm.
    _check_first_adamw("torch", params, masters, grads, tolerance=1e-6)
    # Norm 4, clip 8, AdamW 28, copy 6.
    return Provider("torch", run, dtypes=BOUNDARY_DTYPES, bytes_an_element=46)


def boundary_probe(grads: list[Tensor]) -> Provider:
    """The bytes of the boundary, and no arithmetic."""
    n = sum(grad.numel() for grad in grads)
    param = torch.zeros(n, dtype=torch.bfloat16)
    master, exp_avg, exp_avg_sq = (torch.zeros(n) for _ in range(3))
    acc = torch.ones(n)
    provider = Provider(
        "probe",
        lambda: probe.boundary(param, master, exp_avg, exp_avg_sq, acc),
        dtypes=BOUNDARY_DTYPES,
        bytes_an_element=30,
    )
    provider.run()
    for buffer in (master, exp_avg, exp_avg_sq, param):
        _check_probe(provider, buffer, torch.ones_like(buffer))
    return provider


# Host overhead -------------------------------------------------------------------------------------------------------


class _ManySmall:
    """A loss over many small parameters, each used once: ``prepare`` builds the graph, ``run`` is its backward."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.params = parameters(shapes, torch.bfloat16)
        self._factor = torch.full(shapes[0], 0.5, dtype=torch.bfloat16)

    def prepare(self) -> None:
        self._loss = torch.stack([param * self._factor for param in self.params]).sum()

    def run(self) -> None:
        self._loss.backward()

    def check(self, name: str, expected: float) -> None:
        if not all(torch.equal(p.grad, torch.full_like(p.grad, expected)) for p in self.params):
            raise AssertionError(f"{name}: wrong gradients")


def small_backward_fusedaccum(shapes: Sequence[Shape], collect_garbage: bool) -> Provider:
    """Backward with the capture, in the steady state."""
    model = _ManySmall(shapes)
    model.optimizer = _wrapped(model.params)
    for _ in range(2):
        model.prepare()
        model.run()
    model.check(OURS, 2 * 0.5 * SCALE)
    return Provider(OURS, model.run, model.prepare, collect_garbage=collect_garbage)


def small_backward_torch(shapes: Sequence[Shape], collect_garbage: bool) -> Provider:
    """Plain autograd adding in bfloat16."""
    model = _ManySmall(shapes)
    for _ in range(2):
        model.prepare()
        model.run()
    model.check("torch", 2 * 0.5)
    return Provider("torch", model.run, model.prepare, "bf16 -> bf16", collect_garbage=collect_garbage)


def small_step_fusedaccum(shapes: Sequence[Shape]) -> Provider:
    """The boundary, clip and masters included."""
    provider = boundary_fusedaccum(gradients(shapes))
    provider.bytes_an_element = 0
    return provider


def small_step_torch(shapes: Sequence[Shape]) -> Provider:
    """Only the step of torch's fused AdamW on fp32 parameters: no clip, no masters."""
    params = parameters(shapes, torch.float32)
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    for param, grad in zip(params, gradients(shapes), strict=True):
        param.grad = grad.float()
    optimizer.step()
    # Only the direction of a first step is known without the clip: each element moves by lr towards -grad.
    for param, before in zip(params, parameters(shapes, torch.float32), strict=True):
        moved = param.detach() - before.detach() * (1 - LR * WEIGHT_DECAY)
        if not torch.allclose(moved, -LR * param.grad.sign(), atol=1e-6):
            raise AssertionError("torch: wrong step")
    return Provider("torch", optimizer.step, dtypes="fp32")
