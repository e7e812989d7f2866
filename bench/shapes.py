"""Parameter shapes of the models that are measured, and tensors of those shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Shape = tuple[int, ...]

THREADS = 2
"""Of torch and of the probe."""


def gpt2_124m() -> list[Shape]:
    """The 148 parameters of GPT-2 124M, the output head tied to ``wte``, linear weights as (out, in)."""
    width, n_blocks = 768, 12
    norm: list[Shape] = [(width,), (width,)]
    block: list[Shape] = [*norm]
    block += [(3 * width, width), (3 * width,), (width, width), (width,)]
    block += [*norm]
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(50257, width), (1024, width), *block * n_blocks, *norm]


def many_small() -> list[Shape]:
    """1,000 parameters of 16 elements: nothing but host overhead."""
    return [(16,)] * 1000


def n_elems(shapes: Sequence[Shape]) -> int:
    """Elements of all shapes together."""
    return sum(math.prod(shape) for shape in shapes)


def gradients(shapes: Sequence[Shape]) -> list[Tensor]:
    """bfloat16 normal values, the same at every call."""
    return [value.to(torch.bfloat16) for value in _normal(shapes, seed=1)]


def parameters(shapes: Sequence[Shape], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Parameters of 0.02 times normal values, exact in bfloat16, the same at every call."""
    return [torch.nn.Parameter((value * 0.02).to(torch.bfloat16).to(dtype)) for value in _normal(shapes, seed=2)]


def _normal(shapes: Sequence[Shape], seed: int) -> Iterator[Tensor]:
    """Pieces of one sequence of normal values that repeats after a prime number of elements: 124 million would take
    seconds, and where each goes would show no less."""
    values = torch.randn(1_000_003, generator=torch.Generator().manual_seed(seed))
    start = 0
    for shape in shapes:
        n = math.prod(shape)
        repeats = -(-(start + n) // values.numel())
        run = values if repeats == 1 else values.repeat(repeats)
        yield run[start : start + n].view(shape)
        start = (start + n) % values.numel()
