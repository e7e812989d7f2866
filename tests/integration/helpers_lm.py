"""Tiny language models made from configs, their data, and how far two runs of them are apart."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from types import ModuleType
from typing import Any

import torch
from models import U32
from torch import Tensor, nn

BF16 = torch.bfloat16
FP32 = torch.float32

# Adam makes a full step of a gradient that is nothing but rounding: those of attention's key biases, which are zero in
# exact arithmetic, come out as some 1e-9 of either sign. With eps far above that, and far below true gradients (1e-3
# here), they do not decide what is compared.
EPS = 1e-6


def sequences(n: int, length: int = 16) -> list[dict[str, Tensor]]:
    """``n`` pieces of Python's own help texts as bytes; the first labels of each are masked, in uneven numbers."""
    text = "".join(topics.values()).encode()
    found = []
    for i in range(n):
        ids = torch.tensor(list(text[i * length : (i + 1) * length]))
        labels = ids.clone()
        labels[: (7 * i) % (length - 2)] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def batches(n: int, size: int = 2) -> list[dict[str, Tensor]]:
    """``n`` micro-batches of ``sequences``."""
    rows = sequences(n * size)
    return [
        {name: torch.stack([row[name] for row in rows[at : at + size]]) for name in rows[0]}
        for at in range(0, len(rows), size)
    ]


def language_model(transformers: ModuleType, kind: str, dtype: torch.dtype = FP32, dropout: float = 0.0) -> nn.Module:
    """A causal language model of some 30,000 weights.

    Args:
        kind: "gpt2" (biases, LayerNorm, output tied to the embedding) or "llama" (none of these).
        dtype: of the parameters. The values are the same for all: they are representable in bfloat16.
        dropout: of GPT-2.
    """
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2,
            n_head=2,
            n_embd=32,
            n_positions=16,
            vocab_size=256,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
        model = transformers.GPT2LMHeadModel(config)
        # Its class is in none of transformers' patterns, which name the loss: without this, a warning.
        model.loss_type = "ForCausalLM"
    else:
        config = transformers.LlamaConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=48,
            vocab_size=256,
            max_position_embeddings=16,
        )
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for param in model.parameters():
            # One by one: model.to() would round the buffers too, rotary frequencies that from_pretrained keeps in fp32.
            param.data = param.to(BF16).to(dtype)
    return model


def as_mixed(model: nn.Module, dtype: torch.dtype = BF16) -> nn.Module:
    """Makes an fp32 model compute in ``dtype``, in plain torch: its forward runs on 16-bit copies of its weights.

    Autograd brings each micro-batch's gradient back to fp32 exactly and adds in fp32; a plain optimizer steps the fp32
    weights. That is by definition what the wrapper does to a 16-bit model.
    """
    plain = copy.copy(model)  # the same weights and submodules, without the forward below

    class Mixed(type(model)):
        @functools.wraps(type(model).forward)  # Trainer looks at its signature, and at the model's class
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            copies = {name: param.to(dtype) for name, param in self.named_parameters()}
            return torch.func.functional_call(plain, copies, args, kwargs, tie_weights=True)

    Mixed.__name__ = type(model).__name__
    model.__class__ = Mixed
    return model


def masters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of the fp32 weights: the masters where there are any, else the parameters."""
    return {
        name: optimizer.state.get(param, {}).get("master_param", param).detach().to(FP32, copy=True)
        for name, param in model.named_parameters()
    }


@dataclass
class Run:
    """What a training run left."""

    start: dict[str, Tensor]
    weights: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """The norm of the gradients before clipping, of each step, as the framework reports it."""

    @property
    def n_steps(self) -> int:
        return len(self.losses)


def distance(got: Run, want: Run, only: Sequence[str] | None = None) -> float:
    """How far the weights are apart, relative to the way that ``want`` has gone; of the tensors ``only``."""
    names = list(want.weights) if only is None else only
    off = sum(float((got.weights[name] - want.weights[name]).double().square().sum()) for name in names)
    way = sum(float((want.weights[name] - want.start[name]).double().square().sum()) for name in names)
    return (off / way) ** 0.5


# Tolerances ----------------------------------------------------------------------------------------------------------

LOSS_RTOL = 64 * U32
"""Of the loss of two runs whose weights agree to a few U32: a forward of two layers rounds some 60 times in a row."""

NORM_RTOL = 8192 * U32 / 2
"""Of a norm that torch took in fp32: it adds the squares of a tensor, 8192 in the largest, and the root halves the
error. 2^-12, so that a norm rounded to bfloat16 (2^-9) does not pass for right."""

MIXED_RTOL = 2.0**-9
"""Of ``distance`` to ``as_mixed``. The gradients are the same bits as long as the bfloat16 weights are (then 1e-6 comes
out). A master that differs by a few U32 lies across a rounding boundary in one case of 2^13: of 36,000 weights about
four a step, each by 2^-8 of itself, which is 2^-8 * sqrt(4 / 36,000) = 4e-5 of all weights together and so, in a well
conditioned model, of the activations. 4e-5 / 2^-9 = 1/50 of their roundings then go the other way, and the gradients
are off by sqrt(1/50) of what bfloat16 does to them, 1.2e-2 (``LOW_RTOL``): 1.7e-3."""

LOW_LOSS_ATOL = 4e-3
"""Of the loss in bfloat16 against fp32: the residual stream is rounded some 16 times, by 2^-9 of a logit of about 0.6;
the loss is the mean over at least 60 tokens. sqrt(16 / 60) * 2^-9 * 0.6 = 6e-4, and six times that."""

LOW_RTOL = 0.14
"""Of ``distance`` between bfloat16 and fp32 arithmetic. Forward and backward round some 40 times, which puts
d = sqrt(40) * 2^-9 = 1.2e-2 of noise on a gradient, relative to the tensor's typical one. Adam divides it by its
size: an element x times the typical one moves wrong by min(1, d / x) of a step, and with the x normally distributed the
mean square of that is 1.6 * d, its root 0.14. (Momentum averages over steps: 0.04 is what comes out.)"""


def assert_same_weights(got: Run, want: Run, n_steps: int) -> None:
    """That weights stepped in the same arithmetic differ by the rounding of the updates only.

    A step rounds a weight once or twice, U32 * |weight| each, and its update by a few U32, which Adam's quotient
    magnifies by at most 1 / sqrt(1 - beta2) = 32: 2^8 * U32 of the way gone (as in ``models.Oracle``). Errors add up
    over the steps. What they do to the next gradient is no more than what the order of a sum does.
    """
    for name, weight in want.weights.items():
        start = want.start[name]
        way = (weight - start).abs().max()
        bound = n_steps * U32 * (2 * torch.maximum(weight.abs(), start.abs()).max() + 2**8 * way)
        off = (got.weights[name] - weight).abs().max()
        assert off <= bound, name


def assert_same_run(got: Run, want: Run) -> None:
    """``assert_same_weights``, and the same losses and norms on the way."""
    assert got.n_steps == want.n_steps
    assert_same_weights(got, want, want.n_steps)
    torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(want.losses), rtol=LOSS_RTOL, atol=0)
    torch.testing.assert_close(torch.tensor(got.norms), torch.tensor(want.norms), rtol=NORM_RTOL, atol=0)


def assert_as_mixed(got: Run, want: Run) -> None:
    """That a 16-bit run follows ``as_mixed`` in plain torch. (In float16 every step of the bound is an eighth.)"""
    assert got.n_steps == want.n_steps
    off = distance(got, want)
    assert off <= MIXED_RTOL, off
    torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(want.losses), rtol=MIXED_RTOL, atol=0)
    torch.testing.assert_close(torch.tensor(got.norms), torch.tensor(want.norms), rtol=NORM_RTOL + MIXED_RTOL, atol=0)


def assert_near_fp32(got: Run, want: Run) -> None:
    """That a bfloat16 run is as near to fp32 as the arithmetic of its forward and backward allows."""
    assert got.n_steps == want.n_steps
    assert distance(got, want) <= LOW_RTOL
    # Around 1.0 a bfloat16 weight cannot move by less than 2^-8: without masters these would stand still.
    scales = [name for name in want.weights if name.endswith("weight") and ("ln_" in name or "norm" in name)]
    assert scales
    assert distance(got, want, scales) <= 2 * LOW_RTOL
    torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(want.losses), rtol=0, atol=LOW_LOSS_ATOL)
