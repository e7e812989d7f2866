"""The ways to end a window: norm, clip, update, and the copy to 16-bit parameters.

Bytes an element of the parts, as loads and stores of their passes: norm 4, clip 8, unscale and check 8, copy to 16 bits
6, the update itself 4 (gradient) + 8 for the parameter and each state where it is one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import ceilings, peers
from .measure import LESS, OURS, PEER, Provider
from .providers import (
    BETAS,
    EPS,
    LR,
    MAX_NORM,
    MOMENTUM,
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

# Two fp32 roundings of a value below 0.25, and lr times those of the quotient.
OUR_TOLERANCE = 3e-8
# lr / 500: torch sums squares in fp32, and a gradient near eps feels the error of the norm, which grows with the number
# of elements (1.1e-6 seen at 2^26).
TORCH_TOLERANCE = 2e-6
# An ulp of bfloat16 below 0.25. As large as lr: it only says that the update is of the right size.
BF16_TOLERANCE = 2.0**-10


def dtypes(given: Given) -> str:
    """Of the rows."""
    if given.dtype == torch.float32:
        return "fp32"
    return f"{SHORT[given.dtype]} param, fp32 acc, states, master"


def update_bytes(given: Given, fused: bool) -> int:
    """Bytes an element of torch's update of fp32 tensors. Not fused: AdamW decays (8), mixes its averages (12; 8 + 12),
    takes the root (8), divides (8), adds eps (8) and updates (16); SGD decays (12), mixes (8 + 12) and updates (12)."""
    if given.rule == "AdamW":
        return 28 if fused else 80
    return 20 if fused else 44


def torch_bytes(given: Given, fused: bool) -> int:
    """Clip, update and copy."""
    return (12 if given.clips else 0) + update_bytes(given, fused) + (6 if given.dtype != torch.float32 else 0)


# Ours ----------------------------------------------------------------------------------------------------------------


def _ours(given: Given, name: str, backend: str) -> Provider:
    """``step()`` of the wrapper. ``.grad`` stays, so that it can be run again and again."""
    check_present(backend, given)
    params = given.params()
    optimizer = given.wrapped(params, backend=backend)
    delivery = Delivery(given.grads, params)
    delivery.prepare()
    delivery.run()
    optimizer.step()
    masters = None
    if given.dtype != torch.float32:
        masters = [optimizer.state[param]["master_param"] for param in params]
    check_first_step(name, given, params, masters, OUR_TOLERANCE, EPS)
    return Provider(
        name,
        optimizer.step,
        dtypes=dtypes(given),
        bytes_an_element=ceilings.least_bytes("boundary", given),
        role=OURS if name == NAME else PEER,
        held=lambda: buffers_of(optimizer),
    )


# torch ---------------------------------------------------------------------------------------------------------------


class Shared:
    """Parameters, masters with their gradients, and states that torch's ways use in turn: a machine has no room for one
    set each."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.params: list[Parameter] = []
        self.masters: list[Parameter] = []
        self._state: dict[Tensor, dict[str, Any]] = {}

    def reset(self) -> None:
        """Everything as before the first update, but for the states, which each optimizer makes."""
        given = self.given
        fresh = given.params(torch.float32)
        if not self.masters:
            self.masters = fresh
            for master in self.masters:
                master.grad = torch.empty_like(master)
            self.params = given.params() if given.dtype != torch.float32 else self.masters
        with torch.no_grad():
            torch._foreach_copy_(self.masters, fresh)
            torch._foreach_copy_([master.grad for master in self.masters], given.grads)

    def share_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives ``optimizer``, which has made its first step, the states of the first one that did."""
        if not self._state:
            self._state = {master: optimizer.state[master] for master in self.masters}
        for master, state in self._state.items():
            optimizer.state[master] = state

    def copy(self) -> None:
        """Masters to parameters."""
        if self.params is not self.masters:
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.masters)

    def held(self) -> Iterable[Tensor]:
        """What such a way keeps."""
        for master in self.masters:
            if self.params is not self.masters:
                yield master
            yield master.grad
            yield from (value for value in self._state.get(master, {}).values() if isinstance(value, Tensor))


def _checked(name: str, shared: Shared, run: Callable[[], object], n_bytes: int, **options: Any) -> Provider:
    run()
    given = shared.given
    masters = None if shared.params is shared.masters else shared.masters
    check_first_step(name, given, shared.params, masters, TORCH_TOLERANCE, EPS)
    return Provider(name, run, dtypes=dtypes(given), bytes_an_element=n_bytes, held=shared.held, **options)


def _torch(name: str, shared: Shared, **how: Any) -> Provider:
    """``clip_grad_norm_``, torch's optimizer on fp32 masters, the copy back."""
    shared.reset()
    given = shared.given
    optimizer = given.optimizer(shared.masters, **how)

    def run() -> None:
        if given.clips:
            torch.nn.utils.clip_grad_norm_(shared.masters, MAX_NORM)
        optimizer.step()
        shared.copy()

    provider = _checked(name, shared, run, torch_bytes(given, how.get("fused", False)))
    shared.share_state(optimizer)
    return provider


def _with_scaler(name: str, shared: Shared) -> Provider:
    """The same, fused, under torch's ``GradScaler`` at a loss scale of 1."""
    shared.reset()
    given = shared.given
    optimizer = given.optimizer(shared.masters, fused=True)
    scaler = torch.amp.GradScaler(given.device.type, init_scale=1.0, growth_interval=2**30)
    scaler.scale(torch.zeros((), device=given.device))  # makes the scale

    def run() -> None:
        scaler.unscale_(optimizer)
        if given.clips:
            torch.nn.utils.clip_grad_norm_(shared.masters, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        shared.copy()

    provider = _checked(name, shared, run, torch_bytes(given, True) + 8)
    shared.share_state(optimizer)
    return provider


def _adamw_by_hand(
    param: Tensor | None,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    factor: Tensor,
    steps: Tensor,
) -> None:
    g = grad * factor
    exp_avg.lerp_(g, 1 - BETAS[0])
    exp_avg_sq.mul_(BETAS[1]).add_(g * g * (1 - BETAS[1]))
    root = (exp_avg_sq / (1 - BETAS[1] ** steps)).sqrt() + EPS
    master.mul_(1 - LR * WEIGHT_DECAY).sub_(LR / (1 - BETAS[0] ** steps) * exp_avg / root)
    if param is not None:
        param.copy_(master)


def _sgd_by_hand(
    param: Tensor | None,
    master: Tensor,
    buffer: Tensor,
    unused: None,
    grad: Tensor,
    factor: Tensor,
    steps: Tensor,
) -> None:
    g = grad * factor + master * WEIGHT_DECAY
    buffer.mul_(MOMENTUM).add_(g)
    master.sub_(LR * buffer)
    if param is not None:
        param.copy_(master)


def _compiled(name: str, shared: Shared) -> Provider:
    """The update written by hand and compiled for each parameter, the clip folded into it: what a careful user can have
    from torch. (Compiling ``optimizer.step`` itself keeps the separate clip.)"""
    shared.reset()
    given = shared.given
    is_adamw = given.rule == "AdamW"
    states = [(torch.zeros_like(m), torch.zeros_like(m) if is_adamw else None) for m in shared.masters]
    update = torch.compile(_adamw_by_hand if is_adamw else _sgd_by_hand, dynamic=True)
    square = torch.compile(lambda g: (g * g).sum(), dynamic=True)
    steps = torch.zeros((), device=given.device)
    # Two views of one tensor are refused: without masters there is only one.
    params = [None if param is master else param for param, master in zip(shared.params, shared.masters, strict=True)]
    flat = [
        tuple(None if t is None else t.detach().view(-1) for t in (param, master, *state, master.grad))
        for param, master, state in zip(params, shared.masters, states, strict=True)
    ]

    def run() -> None:
        steps.add_(1)
        factor = torch.ones((), device=given.device)
        if given.clips:
            norm = torch.stack([square(tensors[-1]) for tensors in flat]).sum().sqrt()
            factor = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
        for tensors in flat:
            update(*tensors, factor, steps)

    provider = _checked(name, shared, run, 0, compiled=True)
    provider.bytes_an_element = ceilings.least_bytes("boundary", given) + (4 if given.clips else 0)
    own = [state for pair in states for state in pair if state is not None]
    provider.held = lambda: [*[t for m in shared.masters for t in (m, m.grad)], *own]
    return provider


# Others --------------------------------------------------------------------------------------------------------------


def _optimi(name: str, given: Given) -> Provider:
    """torch-optimi's AdamW with Kahan sums on 16-bit parameters, no masters: approximate. Its eps is in the root's
    place that torch's is, its gradient is 16-bit, and it takes no fp32 one for such a parameter."""
    optimi = peers.module("optimi")
    params = given.params()
    optimizer = optimi.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY, eps=EPS, betas=BETAS)
    for param, grad in zip(params, given.grads, strict=True):
        param.grad = grad.clone()

    def run() -> None:
        # Its step uses the gradient as scratch, so it is laid out anew; that is not part of the 30 bytes.
        if given.clips:
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()

    run()
    check_first_step(name, given, params, None, BF16_TOLERANCE, EPS)

    def prepare() -> None:
        with torch.no_grad():
            torch._foreach_copy_([param.grad for param in params], given.grads)

    # 16-bit everything: clip 2 + 4; decay 4, averages 6 and 4 + 6, root 4, eps 4, update 8, Kahan 4 + 6 + 6 + 6.
    n_bytes = (6 if given.clips else 0) + 58
    held = lambda: [*(param.grad for param in params), *states_of(optimizer)]  # noqa: E731
    kinds = f"{SHORT[given.dtype]} param, grad, states, Kahan"
    return Provider(name, run, prepare, kinds, n_bytes, precision=LESS, held=held)


def _deepspeed(name: str, shared: Shared) -> Provider:
    """DeepSpeed's AdamW for the CPU on fp32 masters."""
    make = peers.deepspeed_adam(shared.given.wide)
    shared.reset()
    given = shared.given
    options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY, "adamw_mode": True}
    optimizer = make(shared.masters, **options)

    def run() -> None:
        if given.clips:
            torch.nn.utils.clip_grad_norm_(shared.masters, MAX_NORM)
        optimizer.step()
        shared.copy()

    provider = _checked(name, shared, run, torch_bytes(given, True))
    for master in shared.masters:  # its own states go, its kernel takes any fp32 ones
        kept = shared._state.get(master)
        if kept is not None:
            optimizer.state[master].update(exp_avg=kept["exp_avg"], exp_avg_sq=kept["exp_avg_sq"])
    return provider


def _apex(name: str, shared: Shared) -> Provider:
    """Apex's fused Adam on fp32 masters."""
    apex = peers.module("apex.optimizers", needs_gpu=True, device=shared.given.device)
    shared.reset()
    optimizer = apex.FusedAdam(shared.masters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    return _as_optimizer(name, shared, optimizer)


def _transformer_engine(name: str, shared: Shared) -> Provider:
    """Transformer Engine's fused Adam on fp32 masters."""
    module = peers.module("transformer_engine.pytorch.optimizers", needs_gpu=True, device=shared.given.device)
    shared.reset()
    optimizer = module.FusedAdam(shared.masters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    return _as_optimizer(name, shared, optimizer)


def _as_optimizer(name: str, shared: Shared, optimizer: Any) -> Provider:
    given = shared.given

    def run() -> None:
        if given.clips:
            torch.nn.utils.clip_grad_norm_(shared.masters, MAX_NORM)
        optimizer.step()
        shared.copy()

    return _checked(name, shared, run, torch_bytes(given, True))


def providers(given: Given) -> Makers:
    """Providers of a boundary."""
    shared = Shared(given)
    makers: Makers = {
        name: partial(_ours, given, name, backend)
        for name, backend in our_backends(given.device).items()
        if given.wide or name == NAME
    }
    makers["torch fused"] = partial(_torch, "torch fused", shared, fused=True)
    if given.wide:
        makers["torch fused + GradScaler"] = partial(_with_scaler, "torch fused + GradScaler", shared)
        makers["torch foreach"] = partial(_torch, "torch foreach", shared, foreach=True)
        makers["torch for-loop"] = partial(_torch, "torch for-loop", shared, foreach=False)
    makers["compiled"] = partial(_compiled, "compiled", shared)
    if given.rule == "AdamW" and given.wide:
        if given.dtype != torch.float32:
            makers["optimi, Kahan"] = partial(_optimi, "optimi, Kahan", given)
        makers["DeepSpeed CPU Adam"] = partial(_deepspeed, "DeepSpeed CPU Adam", shared)
        makers["Apex"] = partial(_apex, "Apex", shared)
        makers["Transformer Engine"] = partial(_transformer_engine, "Transformer Engine", shared)
    return {**makers, **ceilings.boundary(given)}
