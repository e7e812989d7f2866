"""``python -m bench.trainer_overhead``: a step of transformers' Trainer with the wrapper and with plain AdamW.

A tiny GPT-2 made from a config, 4 micro-batches a step, max_grad_norm=1. Every provider is a Trainer in a thread of its
own, and they take turns: one step each, of which only one runs at any time, so that a busy neighbour slows all alike.
What is timed is a whole step of Trainer's, from one ``on_step_end`` to the next: on one torch thread in that thread's
CPU time, in which other programs do not count, else by the clock on the wall. Needs the extra ``integration``.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from fusedaccum import FusedAccumOptimizer

from .measure import Run, Samples, environment, gathered

MICRO_BATCHES = 4
BATCH_SIZE = 4
LENGTH = 32
WARM_UP = 5
OURS = "wrapped"
OURS_FUSED = "wrapped, _clip_grad_norm overridden"

Wrap = Callable[[nn.Module], torch.optim.Optimizer]


class Turns:
    """Lets one of ``n`` threads run at a time, in a fixed order."""

    def __init__(self, n: int) -> None:
        self._alive = list(range(n))
        self._turn = 0
        self._changed = threading.Condition()

    def pass_on(self, who: int) -> None:
        """Lets the next one run, and waits for the turn of ``who``."""
        with self._changed:
            self._next(who)
            self.wait_for(who)

    def wait_for(self, who: int) -> None:
        """Waits for the turn of ``who``."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn == who)

    def leave(self, who: int) -> None:
        """``who`` has done all its steps."""
        with self._changed:
            self._next(who)
            self._alive.remove(who)

    def _next(self, who: int) -> None:
        self._turn = self._alive[(self._alive.index(who) + 1) % len(self._alive)]
        self._changed.notify_all()


@dataclass
class Provider:
    """A Trainer and its steps."""

    name: str
    trainer: Any
    steps: list[Run] = field(default_factory=list)

    def train(self, turns: Turns, who: int, n_threads: int) -> None:
        """All steps; runs in a thread."""
        torch.set_num_threads(n_threads)
        turns.wait_for(who)
        try:
            self.trainer.train()
        finally:
            turns.leave(who)

    def losses(self) -> list[float]:
        """Of all steps, to see that they train the same."""
        return [entry["loss"] for entry in self.trainer.state.log_history if "loss" in entry]


def _stepping(transformers: Any, provider: Provider, turns: Turns, who: int, n_threads: int) -> Any:
    """The callback that times a step and hands over."""

    # The backward of CPU tensors runs in the thread that called it.
    clock = time.thread_time if n_threads == 1 else time.perf_counter

    class Stepping(transformers.TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            time_ms = (clock() - self.start) * 1e3
            switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - self.switches
            preempted = n_threads > 1 and switches > 1 + time_ms / 20  # as measure.run_once
            provider.steps.append(Run(time_ms, preempted))
            turns.pass_on(who)
            self.begin()

        def begin(self) -> None:
            self.switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            self.start = clock()

    return Stepping()


def _model(transformers: Any, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=64,
        n_positions=LENGTH,
        vocab_size=256,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model.to(dtype)


def _trainer(transformers: Any, dtype: torch.dtype, new: Wrap, fused_clip: bool, n_steps: int) -> Any:
    class FusedClip(transformers.Trainer):
        def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
            return self.optimizer.optimizer.clip_grad_norm_(self.args.max_grad_norm)

    model = _model(transformers, dtype)
    optimizer = new(model)
    text = "".join(topics.values()).encode()
    text = text[: len(text) // LENGTH * LENGTH]
    rows = [{"input_ids": row, "labels": row} for row in torch.tensor(list(text)).view(-1, LENGTH)]
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=10,
        max_steps=n_steps,
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=MICRO_BATCHES,
        max_grad_norm=1.0,
        dataloader_pin_memory=False,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = (FusedClip if fused_clip else transformers.Trainer)(
        model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, scheduler)
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def measure(transformers: Any, dtype: torch.dtype, n_steps: int, n_threads: int) -> Samples:
    """Trains all providers side by side and checks that they found the same losses."""

    def plain(**options: Any) -> Wrap:
        return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, **options)

    def ours(model: nn.Module) -> torch.optim.Optimizer:
        return FusedAccumOptimizer(plain()(model))

    ways = {
        OURS: (ours, False),
        OURS_FUSED: (ours, True),
        "AdamW": (plain(), False),
        "AdamW(fused=True)": (plain(fused=True), False),
    }
    everyone = [Provider(name, _trainer(transformers, dtype, *way, n_steps)) for name, way in ways.items()]
    turns = Turns(len(everyone))
    threads = []
    for who, provider in enumerate(everyone):
        provider.trainer.add_callback(_stepping(transformers, provider, turns, who, n_threads))
        threads.append(threading.Thread(target=provider.train, args=(turns, who, n_threads)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Before bf16 without masters goes its own way. Of a loss of 5.
    losses = [provider.losses()[:2] for provider in everyone]
    if len(losses[0]) < 2 or max(max(at) - min(at) for at in zip(*losses, strict=True)) > 0.05:
        raise RuntimeError(f"the providers do not train the same model: {losses}")
    return gathered([{p.name: p.steps[i] for p in everyone} for i in range(WARM_UP, n_steps)])


def table(dtype: torch.dtype, samples: Samples) -> Table:
    """Medians, and what ours adds to plain AdamW's step."""
    disturbed = " (disturbed)" if samples.disturbed else ""
    n = len(samples.times_ms[OURS])
    result = Table(title=f"{str(dtype).removeprefix('torch.')} parameters, medians of {n} steps{disturbed}")
    for name in ("optimizer", "ms a step", "wrapped adds ms", "ratio", "p20 - p80"):
        result.add_column(name, justify="left" if name == "optimizer" else "right")
    for name in samples.times_ms:
        added = samples.median_ms(OURS) - samples.median_ms(name)
        ratio, low, high = samples.ratio(OURS, name)
        result.add_row(
            name, f"{samples.median_ms(name):.2f}", f"{added:+.2f}", f"{ratio:.3f}", f"{low:.3f} - {high:.3f}"
        )
    return result


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true", TRANSFORMERS_VERBOSITY="error")
    logging.disable(logging.WARNING)
    import transformers  # after the environment

    torch.set_num_threads(options.threads)
    console = Console(width=120)
    for dtype in (torch.float32, torch.bfloat16):
        console.print(table(dtype, measure(transformers, dtype, options.steps, options.threads)))
    console.print(", ".join([*environment().values(), f"transformers {transformers.__version__}"]))


if __name__ == "__main__":
    main()
