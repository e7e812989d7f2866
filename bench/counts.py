"""What is counted rather than timed: calls of ops, and bytes alive."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedaccum import FusedAccumOptimizer
from fusedaccum.bucket import DEFAULT_BUCKET_BYTES

from .memory import allocations, op_calls, peak
from .providers import Delivery
from .shapes import gpt2_124m, gradients, n_elems, parameters


def _sizes(run: Callable[[], object]) -> list[int]:
    return [n_bytes for _, n_bytes in allocations(run)]


class Make(torch.autograd.Function):
    """A use of a parameter whose backward makes a new gradient, as a layer's does, and nothing else."""

    @staticmethod
    def forward(ctx: Any, before: Tensor, param: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = param.shape, param.dtype
        return before.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones(ctx.shape, dtype=ctx.dtype)


class Counts:
    """The counted figures of GPT-2 124M in bfloat16 under the default bucket.

    Attributes:
        micro_batch_calls, micro_batch_bound: op calls of a steady micro-batch, and gradient bytes / bucket + 1.
        boundary_calls: op calls of a boundary.
        acc_bytes_a_param: of the accumulator, padding between parameters included.
        backward_peak_bytes, backward_bound_bytes: gradients alive during a steady backward; a bucket + the largest.
        boundary_peak_bytes, partials_bytes: temporaries of a boundary, and what they may not exceed.
    """

    def __init__(self) -> None:
        shapes = gpt2_124m()
        params = parameters(shapes, torch.bfloat16)
        optimizer = FusedAccumOptimizer(torch.optim.AdamW(params, lr=1e-3), max_grad_norm=1.0)
        delivery = Delivery(gradients(shapes), params)
        delivery.prepare()
        # The first micro-batch allocates the accumulator, and next to it nothing of a parameter's size.
        first = _sizes(delivery.run)
        smallest = 4 * n_elems(shapes) // 2
        self.acc_bytes_a_param = sum(n_bytes for n_bytes in first if n_bytes > smallest) / n_elems(shapes)
        optimizer.step()

        delivery.prepare()
        self.micro_batch_calls = op_calls(delivery.run, "fusedaccum")
        self.micro_batch_bound = math.ceil(2 * n_elems(shapes) / DEFAULT_BUCKET_BYTES) + 1
        self.boundary_calls = op_calls(optimizer.step, "fusedaccum")

        loss = torch.zeros(())
        for param in params:
            loss = Make.apply(loss, param)
        self.backward_peak_bytes = peak(_sizes(loss.backward))
        self.backward_bound_bytes = DEFAULT_BUCKET_BYTES + max(2 * param.numel() for param in params)
        self.boundary_peak_bytes = peak(_sizes(optimizer.step))
        self.partials_bytes = sum(8 * math.ceil(param.numel() / 32768) for param in params)
