"""What the demo trains: real data that is already on the machine, and models large enough to feel a batch of four."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MICRO_BATCHES = 4


@dataclass(frozen=True)
class Task:
    """A model, its data, and a schedule.

    Attributes:
        batch: samples of a window; a micro-batch is a quarter.
        load: the data: training (inputs, targets) and held-out (inputs, targets).
        build: a model with random weights.
    """

    name: str
    unit: str
    lr: float
    batch: int
    n_steps: int
    load: Callable[[], tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]
    build: Callable[[], nn.Module]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, of logits in at least fp32."""
    logits = model(inputs)
    if logits.dtype != torch.float64:
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def floating_to(model: nn.Module, inputs: Tensor) -> Tensor:
    """Images in the model's dtype; bytes stay integers."""
    return inputs.to(next(model.parameters()).dtype) if inputs.is_floating_point() else inputs


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm."""

    def __init__(self, width: int, n_heads: int, is_causal: bool) -> None:
        super().__init__()
        self.n_heads, self.is_causal = n_heads, is_causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(), is_causal=self.is_causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


# Images --------------------------------------------------------------------------------------------------------------


def load_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """scikit-learn's 1,797 handwritten digits, enlarged from 8 x 8 to 32 x 32; the last 360 are held out."""
    from sklearn.datasets import load_digits as bundled

    digits = bundled()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None]
    images = F.interpolate((images - images.mean()) / images.std(), size=(32, 32), mode="bilinear")
    labels = torch.tensor(digits.target)
    return (images[:-360], labels[:-360]), (images[-360:], labels[-360:])


class DigitViT(nn.Module):
    """A vision transformer over patches of 8 x 8. LayerNorm only: batch statistics would make a micro-batch another
    function than its part of a large batch."""

    def __init__(self, width: int = 128, n_blocks: int = 2, n_heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(64, width)
        self.place = nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, n_heads, is_causal=False) for _ in range(n_blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = F.unfold(images, kernel_size=8, stride=8).transpose(1, 2)
        return self.head(self.norm(self.blocks(self.embed(patches) + self.place)).mean(1))


# Text ----------------------------------------------------------------------------------------------------------------

CONTEXT = 256


def load_text() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The help texts of the Python language, as bytes, in pieces of the context; the last tenth is held out."""
    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    n_pieces = (data.numel() - 1) // CONTEXT
    inputs = data[: n_pieces * CONTEXT].view(n_pieces, CONTEXT)
    targets = data[1 : n_pieces * CONTEXT + 1].view(n_pieces, CONTEXT)
    n_train = n_pieces * 9 // 10
    held_out = slice(n_train, n_train + 64)
    return (inputs[:n_train], targets[:n_train]), (inputs[held_out], targets[held_out])


class ByteGPT(nn.Module):
    """A GPT over bytes, the head tied to the embedding."""

    def __init__(self, width: int = 192, n_blocks: int = 3, n_heads: int = 6) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, n_heads, is_causal=True) for _ in range(n_blocks)))
        self.norm = nn.LayerNorm(width)
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.embed(tokens) + self.place.weight[: tokens.shape[1]])
        return F.linear(self.norm(x), self.embed.weight)


def tasks(quick: bool) -> list[Task]:
    """Both tasks; ``quick`` ones only show that everything runs."""
    digits = Task("digits", "images", 2e-3, 64 if quick else 256, 3 if quick else 80, load_digits, DigitViT)
    text = Task("bytes", "sequences", 2e-3, 8 if quick else 32, 3 if quick else 40, load_text, ByteGPT)
    return [digits, text]
