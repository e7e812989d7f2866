"""The ways to train one window: K micro-batches, whose gradients autograd delivers, and the boundary.

Building the graphs, which stands for the forward, is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from . import boundary, ceilings, peers
from .accumulate import compiled_loop
from .measure import LESS, OURS, PEER, Provider
from .providers import (
    BETAS,
    EPS,
    LR,
    MAX_NORM,
    NAME,
    SHORT,
    WEIGHT_DECAY,
    Delivery,
    Given,
    Makers,
    buffers_of,
    check_first_step,
    check_present,
    our_backends,
    states_of,
)


class _Losses:
    """The graphs of a window's micro-batches.

    Args:
        scale: what the loss is multiplied by.
        n_fresh: of how many micro-batches the gradients are copies, since whoever gets them writes to them.
    """

    def __init__(self, given: Given, params: Sequence[nn.Parameter], scale: float = 1.0, n_fresh: int = 0) -> None:
        self._given, self._params, self._n_fresh = given, list(params), n_fresh
        dtype = self._params[0].dtype
        is_same = scale == 1.0 and dtype == given.dtype
        self._grads = given.grads if is_same else [(grad.float() * scale).to(dtype) for grad in given.grads]
        self._left: list[Tensor] = []

    def prepare(self) -> None:
        """Builds them."""
        n, fresh = self._given.micro_batches, self._n_fresh
        # Popped from the end.
        self._left = [self._loss(is_fresh=i >= n - fresh) for i in range(n)]

    def _loss(self, is_fresh: bool) -> Tensor:
        grads = [grad.clone() for grad in self._grads] if is_fresh else self._grads
        return Delivery(grads, self._params).loss()

    def next(self) -> Tensor:
        """The next micro-batch's."""
        return self._left.pop()


def _window_bytes(given: Given, first: int, later: int, end: int) -> int:
    return first + later * (given.micro_batches - 1) + end


def _ours(given: Given, name: str, backend: str) -> Provider:
    """The wrapper."""
    check_present(backend, given)
    params = given.params()
    optimizer = given.wrapped(params, accumulation_steps=given.micro_batches, backend=backend)
    losses = _Losses(given, params)

    def run() -> None:
        for _ in range(given.micro_batches):
            losses.next().backward()
            optimizer.step()
            optimizer.zero_grad()

    losses.prepare()
    run()
    masters = None
    if given.dtype != torch.float32:
        masters = [optimizer.state[param]["master_param"] for param in params]
    check_first_step(name, given, params, masters, boundary.OUR_TOLERANCE, EPS)
    return Provider(
        name,
        run,
        losses.prepare,
        boundary.dtypes(given),
        ceilings.least_bytes("window", given),
        role=OURS if name == NAME else PEER,
        held=lambda: buffers_of(optimizer),
    )


Add = Callable[[list[Tensor], list[Tensor]], object]


def _by_hand(name: str, given: Given, add: Add, bytes_an_add: int, compiled: bool = False) -> Provider:
    """16-bit gradients added to fp32 ones by ``add``, then clip, torch's fused optimizer on masters, copy."""
    shared = boundary.Shared(given)
    shared.reset()
    params, masters = given.params(), shared.masters
    shared.params = params  # autograd's gradients must not be the masters'
    optimizer = given.optimizer(masters, fused=True)
    accs = [master.grad for master in masters]
    losses = _Losses(given, params)

    def run() -> None:
        torch._foreach_zero_(accs)
        for _ in range(given.micro_batches):
            losses.next().backward()
            add(accs, [param.grad for param in params])
            for param in params:
                param.grad = None
        if given.clips:
            torch.nn.utils.clip_grad_norm_(masters, MAX_NORM)
        optimizer.step()
        shared.copy()

    losses.prepare()
    run()
    check_first_step(name, given, params, masters, boundary.TORCH_TOLERANCE, EPS)
    end = boundary.torch_bytes(given, True)
    n_bytes = _window_bytes(given, 4 + bytes_an_add, bytes_an_add, end)
    held = lambda: [*masters, *accs, *states_of(optimizer)]  # noqa: E731
    return Provider(name, run, losses.prepare, boundary.dtypes(given), n_bytes, held=held, compiled=compiled)


def _naive(given: Given) -> Add:
    def add(accs: list[Tensor], grads: list[Tensor]) -> None:
        for acc, grad in zip(accs, grads, strict=True):
            acc += grad.float() * (1 / given.micro_batches)

    return add


def _foreach(given: Given) -> Add:
    return lambda accs, grads: torch._foreach_add_(accs, grads, alpha=1 / given.micro_batches)


def _grad_dtype(name: str, given: Given) -> Provider:
    """Autograd adds in fp32, the loss is scaled; then as by hand."""
    shared = boundary.Shared(given)
    shared.reset()
    params, masters = given.params(), shared.masters
    shared.params = params
    for param in params:
        param.grad_dtype = torch.float32
    for master in masters:
        master.grad = None
    optimizer = given.optimizer(masters, fused=True)
    losses = _Losses(given, params, scale=1 / given.micro_batches)

    def run() -> None:
        for _ in range(given.micro_batches):
            losses.next().backward()
        for param, master in zip(params, masters, strict=True):
            master.grad, param.grad = param.grad, None
        if given.clips:
            torch.nn.utils.clip_grad_norm_(masters, MAX_NORM)
        optimizer.step()
        shared.copy()

    losses.prepare()
    run()
    check_first_step(name, given, params, masters, boundary.TORCH_TOLERANCE, EPS)
    b = given.grad_bytes
    n_bytes = _window_bytes(given, b + 4, b + 16, boundary.torch_bytes(given, True))
    held = lambda: [*masters, *(master.grad for master in masters), *states_of(optimizer)]  # noqa: E731
    return Provider(name, run, losses.prepare, boundary.dtypes(given), n_bytes, held=held)


def _native(name: str, given: Given) -> Provider:
    """All in 16 bits: autograd's sums, clip, and AdamW on the parameters themselves."""
    params = given.params()
    optimizer = given.optimizer(params, fused=True)
    losses = _Losses(given, params, scale=1 / given.micro_batches, n_fresh=1)

    def run() -> None:
        for _ in range(given.micro_batches):
            losses.next().backward()
        if given.clips:
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    losses.prepare()
    run()
    check_first_step(name, given, params, None, boundary.BF16_TOLERANCE, EPS)
    end = (6 if given.clips else 0) + (14 if given.rule == "AdamW" else 10)
    n_bytes = _window_bytes(given, 0, 6, end)
    kinds = f"{SHORT[given.dtype]} param, grad, states"
    return Provider(
        name, run, losses.prepare, kinds, n_bytes, precision=LESS, held=lambda: [*states_of(optimizer), *params]
    )


class _Model(nn.Module):
    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)


def _accelerate(name: str, given: Given) -> Provider:
    """Accelerate's own loop; its mixed precision keeps parameters and gradients in fp32."""
    accelerate = peers.module("accelerate")
    accelerator = accelerate.Accelerator(
        cpu=given.device.type == "cpu", gradient_accumulation_steps=given.micro_batches
    )
    params = given.params(torch.float32)
    model, optimizer = accelerator.prepare(_Model(params), given.optimizer(params, fused=True))
    losses = _Losses(given, params, scale=1 / given.micro_batches, n_fresh=1)

    def run() -> None:
        for _ in range(given.micro_batches):
            with accelerator.accumulate(model):
                accelerator.backward(losses.next())
                if given.clips and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(params, MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()

    losses.prepare()
    run()
    check_first_step(name, given, params, None, boundary.TORCH_TOLERANCE, EPS)
    # Autograd keeps the first gradient, which nobody else wants, and adds the later ones.
    end = (12 if given.clips else 0) + boundary.update_bytes(given, True)
    n_bytes = _window_bytes(given, 0, 12, end)
    grads = lambda: [torch.empty(4 * given.n, dtype=torch.uint8)]  # noqa: E731  # fp32 gradients, gone after a window
    return Provider(
        name, run, losses.prepare, "fp32", n_bytes, held=lambda: [*states_of(optimizer.optimizer), *grads()]
    )


def _optimi(name: str, given: Given) -> Provider:
    """torch-optimi's gradient release: every micro-batch goes into AdamW's averages as its gradient comes and is gone
    then. Approximate: the second average sums squares of micro-batches and not of their sum, and nothing is clipped."""
    optimi = peers.module("optimi")
    params = given.params()
    model = _Model(params)
    options = {"lr": LR, "weight_decay": WEIGHT_DECAY, "eps": EPS, "betas": BETAS}
    optimizer = optimi.AdamW(params, gradient_release=True, **options)
    optimi.prepare_for_gradient_release(model, optimizer)
    losses = _Losses(given, params, scale=1 / given.micro_batches, n_fresh=given.micro_batches)

    def run() -> None:
        for i in range(given.micro_batches):
            optimizer.optimizer_accumulation = i + 1 < given.micro_batches
            losses.next().backward()

    losses.prepare()
    run()
    # The first average sees 1/K of the gradient K times, the second its square: the update is up to K / sqrt(K) too
    # large, in 16 bits.
    tolerance = LR * given.micro_batches**0.5 + boundary.BF16_TOLERANCE
    check_first_step(name, given, params, None, tolerance, EPS)
    # 16-bit: averages 6 and 4 + 6 a micro-batch; at the last one decay 4, root 4, eps 4, update 8, Kahan 22.
    n_bytes = _window_bytes(given, 16, 16, 42)
    kinds = f"{SHORT[given.dtype]} param, grad, states, Kahan"
    held = lambda: states_of(optimizer)  # noqa: E731
    return Provider(name, run, losses.prepare, kinds, n_bytes, precision=LESS, held=held)


def providers(given: Given) -> Makers:
    """Providers of a window."""
    b = given.grad_bytes
    makers: Makers = {
        name: partial(_ours, given, name, backend)
        for name, backend in our_backends(given.device).items()
        if given.wide or name == NAME
    }
    makers["naive fp32"] = lambda: _by_hand("naive fp32", given, _naive(given), b + 24)
    makers["foreach"] = lambda: _by_hand("foreach", given, _foreach(given), b + 8)
    makers["compiled"] = lambda: _by_hand(
        "compiled", given, compiled_loop(1 / given.micro_batches), b + 8, compiled=True
    )
    makers["grad_dtype"] = partial(_grad_dtype, "grad_dtype", given)
    name = f"native {SHORT[given.dtype]}"
    makers[name] = partial(_native, name, given)
    makers["accelerate"] = partial(_accelerate, "accelerate", given)
    if given.rule == "AdamW":
        makers["optimi, release"] = partial(_optimi, "optimi, release", given)
    return {**makers, **ceilings.window(given)}
