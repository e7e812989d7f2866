"""Runs of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fusedaccum import FusedAccumOptimizer

from .helpers_lm import EPS, Run, masters, sequences

LR = 1e-4


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Plain AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)


def wrapped(model: nn.Module, **options: Any) -> FusedAccumOptimizer:
    """The same, wrapped."""
    return FusedAccumOptimizer(adamw(model), **options)


def new_trainer(
    transformers: ModuleType,
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    n_sequences: int = 44,
    n_eval_sequences: int = 0,
    base: type | None = None,
    callbacks: Any = None,
    **arguments: Any,
) -> Any:
    """A Trainer whose learning rate falls from step to step and that logs every step."""
    scheduler = None
    if optimizer is not None:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    defaults = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 2,
        "dataloader_pin_memory": False,
    }
    trainer = (base or transformers.Trainer)(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(folder), **{**defaults, **arguments}),
        train_dataset=sequences(n_sequences),
        eval_dataset=sequences(n_eval_sequences) or None,
        optimizers=(optimizer, scheduler),
        callbacks=callbacks,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def logged(trainer: Any, name: str) -> list[float]:
    """What Trainer logged under ``name``, of each step."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def train(
    transformers: ModuleType,
    folder: Path,
    model: nn.Module,
    new_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    **arguments: Any,
) -> Run:
    """Trains and tells what came of it."""
    optimizer = new_optimizer(model)
    run = Run(start=masters(model, optimizer))
    trainer = new_trainer(transformers, folder, model, optimizer, **arguments)
    trainer.train()
    run.weights = masters(model, optimizer)
    run.losses, run.norms = logged(trainer, "loss"), logged(trainer, "grad_norm")
    assert run.n_steps == trainer.state.global_step > 0
    return run
