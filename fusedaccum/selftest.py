"""A short check of a backend on this very machine: every op against the reference, bit by bit."""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor

from . import layout
from .backends import Backend, choose
from .scaling import LossScale
from .stats import new_window
from .validate import DTYPES

# One element, a vector and its neighbours, a chunk and a bit, and a slot with nothing in it.
_SIZES = (1, 16, 17, layout.LANES + 1, layout.CHUNK + 3, 0)


class _Buffers:
    """What the ops work on, filled from one seed."""

    def __init__(self, grad_dtype: torch.dtype, param_dtype: torch.dtype, rule: int) -> None:
        places = layout.Layout()
        for n_elems in _SIZES:
            placement = places.add(n_elems)
            places.add_extra(placement)
            if param_dtype != torch.float32:
                places.add_master(placement)
        random = torch.Generator().manual_seed(0)

        def noise(n: int) -> Tensor:
            return torch.randn(n, generator=random)

        self.rule = rule
        self.table = torch.tensor([placement.row(0) for placement in places.placements])
        self.grads = [noise(n).to(grad_dtype) for n in _SIZES]
        self.params = [noise(n).to(param_dtype) for n in _SIZES]
        self.master = noise(places.n_master_elems) if places.n_master_elems else None
        self.extra = noise(places.n_extra_elems).abs()
        self.acc = torch.full((places.n_elems,), math.nan)  # the first add must not read it
        self.first_moment = noise(places.n_elems)
        self.second_moment = noise(places.n_elems).abs()
        self.partials = torch.zeros(places.n_chunks, dtype=torch.float64)
        self.micro_partials = torch.zeros(places.n_chunks, dtype=torch.float64)
        self.factor = torch.full((1,), 0.3, dtype=torch.float64)
        self.control = torch.zeros(layout.CONTROL_SIZE, dtype=torch.float64)
        # A weight that only the device knows, a loss scale that grows after each window, averages that begin.
        self.window = new_window(LossScale(4.0, growth_interval=1))
        self.window[layout.WEIGHT], self.window[layout.WEIGHT_SQ] = 0.5, 0.25
        self.scalars = torch.zeros(len(_SIZES), layout.SCALAR_COLUMNS)
        self.steps = torch.zeros(len(_SIZES))
        self.active = torch.ones(len(_SIZES), dtype=torch.uint8)
        settings = [1e-3, 0.9, 0.999, 1e-8, 0.01, 1.0, 1.0, 1.0] if rule == layout.RULE_ADAM else [
            1e-1, 0.9, 0.1, 1.0, 0.01, 0.0, -1.0, 0.0
        ]  # fmt: skip
        self.hyper = torch.tensor([settings], dtype=torch.float64)

    def to(self, device: torch.device) -> _Buffers:
        """Moves everything to ``device``."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
            elif isinstance(value, list):
                setattr(self, name, [tensor.to(device) for tensor in value])
        return self

    def run(self, backend: Backend) -> list[Tensor]:
        """Two windows of two micro-batches, the second with statistics; returns everything written."""
        slots = list(range(len(_SIZES)))
        for micro_partials in (None, self.micro_partials):
            for micro_batch in range(2):
                first = [micro_batch == 0] * len(slots)
                factor = None if micro_batch == 0 else self.factor
                backend.accumulate_(
                    self.acc, self.partials, micro_partials, self.table, self.grads, slots, first, 1 / 3, factor
                )
            backend.measure_(self.partials, self.acc, self.table, slots, list(_SIZES))
            backend.finalize_(
                self.control, self.scalars, self.steps, self.window, self.partials, micro_partials, self.table,
                self.hyper, self.active, self.rule, 1.5, 2.0, 2.0, 1.0, None, True,
            )  # fmt: skip
            if self.rule == layout.RULE_ADAM:
                backend.adam_step_(
                    self.params, self.first_moment, self.second_moment, self.extra, self.master, self.acc,
                    self.table, self.scalars, self.control, slots,
                )  # fmt: skip
            else:
                backend.sgd_step_(
                    self.params, self.extra, self.master, self.acc, self.table, self.scalars, self.control, slots
                )
        used = [self.acc[row[0] : row[0] + row[1]] for row in self.table.tolist()]  # the gaps are never written
        master = [] if self.master is None else [self.master]
        kept = [self.partials, self.micro_partials, self.control, self.window, self.scalars, self.steps, self.extra]
        return [*used, *kept, *self.params, *master]


def check(backend: Backend, device: torch.device) -> str | None:
    """What is wrong with the backend on ``device``; None if its results are those of the CPU's reference, bit by bit.

    The reference itself is held against numbers known beforehand, by ``check_capture``.
    """
    reference = choose(torch.device("cpu"), "reference")
    for dtype, rule in product(DTYPES, (layout.RULE_ADAM, layout.RULE_SGD)):
        expected = _Buffers(dtype, dtype, rule).run(reference)
        found = _Buffers(dtype, dtype, rule).to(device).run(backend)
        for want, have in zip(expected, [tensor.cpu() for tensor in found], strict=True):
            if not torch.equal(want, have):
                worst = (want.double() - have.double()).abs().max().item()
                return (
                    f"{dtype} gradients and parameters, rule {rule}: "
                    f"a result differs from the reference by up to {worst:.3g}"
                )
    return None


def check_capture() -> str | None:
    """What is wrong with the interception of gradients on this torch; None if a small window comes out right."""
    from .optimizer import FusedAccumOptimizer

    param = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = FusedAccumOptimizer(torch.optim.SGD([param], lr=1.0), backend="reference")
    for _ in range(300):  # in bf16, 256 + 1 is 256
        (param * 1.0).sum().backward()
    grad = param.grad
    optimizer.remove()
    if grad is None or grad.dtype != torch.float32 or not torch.equal(grad, torch.full((3,), 300.0)):
        return f"300 bf16 gradients of 1.0 add up to {grad}, not to 300.0"
    return None
