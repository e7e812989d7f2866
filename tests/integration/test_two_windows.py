"""``accumulation_steps`` in the optimizer and in the framework too: said once, with both counts (shared case 32)."""

from __future__ import annotations

import warnings

import pytest
import torch

from .helpers_lm import batches, language_model
from .helpers_trainer import new_trainer, wrapped

STEPS = 4


def said(caught) -> list[str]:
    """What the optimizer had to say of two windows."""
    return [str(w.message) for w in caught if "accumulation_steps" in str(w.message)]


def check(caught) -> None:
    """Once, though there were several windows, and with the count of either side."""
    messages = said(caught)
    assert len(messages) == 1, messages
    assert f"{STEPS} backward calls" in messages[0]
    assert f"accumulation_steps is {STEPS}" in messages[0]


def record():
    """All warnings, none an error."""
    return warnings.catch_warnings(record=True)


def test_trainer(transformers, tmp_path):
    model = language_model(transformers, "gpt2")
    optimizer = wrapped(model, accumulation_steps=STEPS)
    trainer = new_trainer(transformers, tmp_path, model, optimizer, n_sequences=64, num_train_epochs=1)
    with record() as caught:
        warnings.simplefilter("always")
        trainer.train()
    check(caught)


def test_accelerate(transformers, accelerate):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    model = language_model(transformers, "gpt2")
    model, optimizer = accelerator.prepare(model, wrapped(model, accumulation_steps=STEPS))
    with record() as caught:
        warnings.simplefilter("always")
        for batch in batches(2 * STEPS * STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
    check(caught)


@pytest.mark.filterwarnings("ignore")
def test_lightning(transformers, lightning, tmp_path):
    class Task(lightning.pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = language_model(transformers, "gpt2")

        def configure_optimizers(self):
            return wrapped(self.model, accumulation_steps=STEPS)

        def training_step(self, batch, batch_idx):
            return self.model(**batch).loss

    trainer = lightning.pytorch.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    loader = torch.utils.data.DataLoader(batches(2 * STEPS * STEPS), batch_size=None)
    with record() as caught:
        warnings.simplefilter("always")
        trainer.fit(Task(), loader)
    check(caught)
