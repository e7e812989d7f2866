"""``python -m bench.window_cost``: what weights, a dynamic loss scale and statistics cost, and what a GradScaler costs.

All ways take turns in one run. The parameters are four blocks of GPT-2 124M, far larger than any cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fusedaccum
from fusedaccum import FusedAccumOptimizer

from .measure import Provider, Samples, environment, take_turns
from .providers import LR, MAX_NORM, WEIGHT_DECAY, Delivery
from .shapes import THREADS, gpt2_124m, gradients, parameters

K = 4
SHAPES = gpt2_124m()[2:50]
RESULTS = Path(__file__).parent / "results"
# name -> constructor options, and a micro-batch's weight.
WAYS: dict[str, tuple[dict[str, Any], float | Tensor | None]] = {
    "plain": ({}, None),
    "statistics": ({"statistics": True}, None),
    "weights": ({}, 3.0),
    "device weights": ({}, torch.tensor(3.0)),
    "dynamic scale": ({"loss_scale": "dynamic"}, None),
    "all": ({"statistics": True, "loss_scale": "dynamic"}, torch.tensor(3.0)),
}


class Way:
    """An optimizer with some features on, in the middle of a window."""

    def __init__(self, grads: list[Tensor], options: dict[str, Any], weight: float | Tensor | None) -> None:
        params = parameters(SHAPES, torch.bfloat16)
        adamw = torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY)
        self.optimizer = FusedAccumOptimizer(adamw, accumulation_steps=K, max_grad_norm=MAX_NORM, **options)
        self._weight = weight
        self._delivery = Delivery(grads, params)
        self.prepare()
        self.micro_batch()
        self.optimizer.step()
        self.optimizer.flush()  # the states are made here

    def prepare(self) -> None:
        """Builds the graph of one micro-batch."""
        self._delivery.prepare()

    def micro_batch(self) -> None:
        """Its backward: into a buffer that holds something, since nobody zeroes it."""
        loss = self._delivery._loss
        if self._weight is None and self.optimizer._options["loss_scale"] is None:
            loss.backward()
            return
        self.optimizer._window.is_spent = False  # the buffer is not zeroed on purpose
        self.optimizer.backward(loss, weight=self._weight)

    def fill(self) -> None:
        """K micro-batches but the last ``step``."""
        for _ in range(K):
            self.prepare()
            self.micro_batch()
            if self.optimizer._window.position < K - 1:
                self.optimizer.step()


def accumulate_providers(grads: list[Tensor]) -> list[Provider]:
    """One steady micro-batch in each way."""
    ways = {name: Way(grads, *how) for name, how in WAYS.items()}

    def run_of(way: Way) -> Callable[[], None]:
        return way.micro_batch

    def prepare_of(way: Way) -> Callable[[], None]:
        def prepare() -> None:
            way.optimizer._window.micro = type(way.optimizer._window.micro)()
            way.prepare()

        return prepare

    return [Provider(name, run_of(way), prepare_of(way), bytes_an_element=10) for name, way in ways.items()]


def boundary_providers(grads: list[Tensor]) -> list[Provider]:
    """The K-th ``step`` in each way."""
    ways = {name: Way(grads, *how) for name, how in WAYS.items()}
    return [Provider(name, way.optimizer.step, way.fill, bytes_an_element=30) for name, way in ways.items()]


def scaler_providers(grads: list[Tensor]) -> list[Provider]:
    """``scaler.step`` and ``update`` with no scaler, ours and torch's, without accumulation_steps."""
    providers = []
    scalers: dict[str, torch.amp.GradScaler | None] = {
        "no scaler": None,
        "fusedaccum.GradScaler": fusedaccum.GradScaler("cpu", init_scale=4.0),
        "torch.amp.GradScaler": torch.amp.GradScaler("cpu", init_scale=4.0),
    }
    for name, scaler in scalers.items():
        params = parameters(SHAPES, torch.bfloat16)
        adamw = torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY)
        optimizer = FusedAccumOptimizer(adamw, max_grad_norm=MAX_NORM)
        delivery = Delivery(grads, params)

        def prepare(
            delivery: Delivery = delivery, optimizer: FusedAccumOptimizer = optimizer, scaler: Any = scaler
        ) -> None:
            optimizer.zero_grad()
            delivery.prepare()
            loss = delivery._loss
            (loss if scaler is None else scaler.scale(loss)).backward()

        def run(optimizer: FusedAccumOptimizer = optimizer, scaler: Any = scaler) -> None:
            if scaler is None:
                optimizer.step()
                return
            scaler.step(optimizer)
            scaler.update()

        prepare()
        run()
        providers.append(Provider(name, run, prepare, bytes_an_element=30))
    return providers


def shares(samples: Samples) -> dict[str, tuple[float, float, float]]:
    """Each way's median over that of the first, with p20 and p80 of the same within rounds."""
    first = next(iter(samples.times_ms))
    return {name: samples.ratio(name, first) for name in samples.times_ms}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.window_cost", description=__doc__)
    parser.add_argument("--seconds", type=float, default=25.0, help="for each of the three comparisons")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    console = Console(width=110)
    grads = gradients(SHAPES)
    table = Table("op", "way", "median ms", "over the first", "p20 - p80")
    report: dict[str, Any] = {**environment(), "rows": []}
    for op, make in (
        ("accumulate", accumulate_providers),
        ("boundary", boundary_providers),
        ("scaler", scaler_providers),
    ):
        providers = make(grads)
        samples = take_turns(providers, arguments.seconds)
        for name, (ratio, low, high) in shares(samples).items():
            median = samples.median_ms(name)
            table.add_row(op, name, f"{median:.2f}", f"{ratio:.3f}", f"{low:.3f} - {high:.3f}")
            row = {"op": op, "way": name, "median_ms": median, "ratio": ratio, "low": low, "high": high}
            report["rows"].append({**row, "rounds": len(samples.times_ms[name]), "disturbed": samples.disturbed})
        table.add_section()
        del providers
    console.print(table)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "window_cost.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
