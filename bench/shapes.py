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


def llama_blocks(n_blocks: int) -> list[Shape]:
    """Blocks of a Llama-style model of 1.1B parameters (22 such blocks; 4 key-value heads of 64): 9 parameters and 44
    million elements each."""
    width, inner, key_value = 2048, 5632, 256
    attention: list[Shape] = [(width, width), (key_value, width), (key_value, width), (width, width)]
    return [*attention, (inner, width), (inner, width), (width, inner), (width,), (width,)] * n_blocks


def resnet50() -> list[Shape]:
    """The 161 parameters of ResNet-50 with 1,000 classes, 25.6 million elements."""

    def conv(out: int, into: int, size: int) -> list[Shape]:
        return [(out, into, size, size), (out,), (out,)]  # and its batch norm

    shapes = conv(64, 3, 7)
    into = 64
    for width, n_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(n_blocks):
            shapes += conv(width, into, 1) + conv(width, width, 3) + conv(4 * width, width, 1)
            if i == 0:
                shapes += conv(4 * width, into, 1)
            into = 4 * width
    return [*shapes, (1000, into), (1000,)]


def vit_b() -> list[Shape]:
    """The 152 parameters of ViT-B/16 at 224 pixels with 1,000 classes, 86.6 million elements."""
    width = 768
    norm: list[Shape] = [(width,), (width,)]
    block: list[Shape] = [*norm, (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [*norm, (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(1, 1, width), (1, 197, width), (width, 3, 16, 16), (width,), *block * 12, *norm, (1000, width), (1000,)]


def many_small() -> list[Shape]:
    """1,000 parameters of 16 elements: nothing but host overhead."""
    return [(16,)] * 1000


def many_groups() -> list[Shape]:
    """100 parameters of 65,536 elements, for a param_group each."""
    return [(256, 256)] * 100


def n_elems(shapes: Sequence[Shape]) -> int:
    """Elements of all shapes together."""
    return sum(math.prod(shape) for shape in shapes)


def gradients(shapes: Sequence[Shape], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Normal values, rounded to bfloat16 and then to ``dtype``; the same at every call."""
    return [value.to(torch.bfloat16).to(dtype) for value in _normal(shapes, seed=1)]


def parameters(shapes: Sequence[Shape], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Parameters of 0.02 times normal values, rounded to bfloat16 and then to ``dtype``; the same at every call."""
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
