"""transformers' Trainer: save and resume, also from and to plain AdamW."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import assert_same_bits

from .helpers_lm import BF16, FP32, Run, assert_same_run, language_model, masters
from .helpers_trainer import adamw, logged, new_trainer, wrapped

# 22 micro-batches an epoch, windows of 4: a checkpoint after the second step lies inside the first epoch, one after the
# sixth at its end.
N_STEPS = 12


def train(transformers, folder, new_optimizer, dtype, checkpoint=None, kind="gpt2", dropout=0.1, **arguments):
    """A Trainer that has trained, and what it left."""
    model = language_model(transformers, kind, dtype, dropout)
    if checkpoint is not None:
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.5)  # whatever counts comes from the checkpoint
    optimizer = new_optimizer(model)
    start = masters(model, optimizer)
    trainer = new_trainer(transformers, folder, model, optimizer, **arguments)
    trainer.train(resume_from_checkpoint=checkpoint)
    losses, norms = logged(trainer, "loss"), logged(trainer, "grad_norm")
    return trainer, Run(start, masters(model, optimizer), losses, norms)


def states(optimizer):
    """The state of every parameter, by place."""
    return [optimizer.state[param] for group in optimizer.param_groups for param in group["params"]]


@pytest.mark.parametrize("saved_at", [2, 6])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("clip", ["trainer", "wrapper"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(transformers, tmp_path, clip, dtype, saved_at):
    """Weights, masters, averages, step counts, losses, norms and learning rates, with dropout."""
    new = partial(wrapped, max_grad_norm=0.5 if clip == "wrapper" else None)
    options = {"max_grad_norm": 0.0 if clip == "wrapper" else 0.5, "save_strategy": "steps", "save_steps": saved_at}
    whole, want = train(transformers, tmp_path / "whole", new, dtype, **options)
    assert want.n_steps == N_STEPS
    checkpoint = tmp_path / "whole" / f"checkpoint-{saved_at}"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing is left out of the checkpoint
        resumed, got = train(transformers, tmp_path / "resumed", new, dtype, str(checkpoint), **options)
    assert got.losses == want.losses
    assert got.norms == want.norms
    assert logged(resumed, "learning_rate") == logged(whole, "learning_rate")
    for name, weight in want.weights.items():
        assert_same_bits(got.weights[name], weight, name)
    for (name, ours), theirs in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert_same_bits(ours.detach(), theirs.detach(), name)
    for ours, theirs in zip(states(resumed.optimizer), states(whole.optimizer), strict=True):
        assert ours.keys() == theirs.keys()
        assert ("master_param" in ours) is (dtype is BF16)
        for name, value in theirs.items():
            assert value.dtype is FP32
            assert_same_bits(ours[name], value, name)


def test_a_checkpoint_without_masters_would_show(transformers, tmp_path):
    """What the bits of the test above hang on."""
    options = {"save_strategy": "steps", "save_steps": 2}
    _, want = train(transformers, tmp_path / "whole", wrapped, BF16, **options)
    path = tmp_path / "whole" / "checkpoint-2"
    saved = torch.load(path / "optimizer.pt", weights_only=True)
    for held in saved["state"].values():
        del held["master_param"]
    torch.save(saved, path / "optimizer.pt")
    _, got = train(transformers, tmp_path / "resumed", wrapped, BF16, str(path), **options)
    assert any(not torch.equal(got.weights[name], weight) for name, weight in want.weights.items())


@pytest.mark.parametrize(("first", "then"), [(adamw, wrapped), (wrapped, adamw)])
def test_a_run_changes_over_at_a_checkpoint(transformers, tmp_path: Path, first, then):
    """Half of the run with plain AdamW, half wrapped, either way round: as AdamW throughout."""
    options = {"save_strategy": "steps", "save_steps": 6, "kind": "llama", "dropout": 0.0}
    _, want = train(transformers, tmp_path / "plain", adamw, FP32, **options)
    train(transformers, tmp_path / "first", first, FP32, **options)
    _, got = train(transformers, tmp_path / "then", then, FP32, str(tmp_path / "first" / "checkpoint-6"), **options)
    got.start = want.start
    assert_same_run(got, want)
