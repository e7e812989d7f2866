"""One way of training in a process of its own, so that its peak memory is its own. It makes a step when told to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, nn

from fusedaccum import FusedAccumOptimizer

from .demo_tasks import MICRO_BATCHES, Task, floating_to, loss_of, tasks
from .shapes import THREADS

MAX_NORM = 1.0
WEIGHT_DECAY = 0.1
SEED = 1


class Way:
    """How a window's batch becomes an update.

    Attributes:
        optimizer: whose learning rate the schedule sets.
        n_micro_batches: parts in which the batch goes through the model.
        dtype: of the model.
    """

    n_micro_batches = 1
    dtype = torch.bfloat16
    optimizer: torch.optim.Optimizer

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.params = list(model.parameters())
        self.lr = lr

    def adamw(self, params: list[nn.Parameter]) -> torch.optim.AdamW:
        """The same for all."""
        return torch.optim.AdamW(params, lr=self.lr, weight_decay=WEIGHT_DECAY)

    def micro_batch(self, loss: Tensor) -> None:
        """What follows the forward of each micro-batch."""
        (loss / self.n_micro_batches).backward()

    def boundary(self) -> None:
        """What follows the last micro-batch."""
        torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        """What training continues from: masters where there are any."""
        return [param.detach() for param in self.params]

    def useful_steps(self) -> float | None:
        """The number of micro-batches beyond which more buy little; None where nobody counts."""
        return None


class LargeBatch(Way):
    """The whole batch at once; bf16 model, fp32 masters and states."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model, lr)
        self.masters = [nn.Parameter(param.detach().float()) for param in self.params]
        self.optimizer = self.adamw(self.masters)

    def boundary(self) -> None:
        for master, param in zip(self.masters, self.params, strict=True):
            master.grad = param.grad.float()
            param.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.masters)

    def weights(self) -> list[Tensor]:
        return [master.detach() for master in self.masters]


class Naive(Way):
    """Autograd adds the micro-batches' gradients in bf16, AdamW updates bf16 parameters."""

    n_micro_batches = MICRO_BATCHES

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model, lr)
        self.optimizer = self.adamw(self.params)


class Wrapped(Way):
    """The library."""

    n_micro_batches = MICRO_BATCHES

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model, lr)
        self.optimizer = FusedAccumOptimizer(
            self.adamw(self.params), accumulation_steps=MICRO_BATCHES, max_grad_norm=MAX_NORM, statistics=True
        )

    def micro_batch(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def boundary(self) -> None:
        """Was the last micro-batch's ``step``."""

    def weights(self) -> list[Tensor]:
        return [self.optimizer.state[param]["master_param"] for param in self.params]

    def useful_steps(self) -> float | None:
        return self.optimizer.stats()["useful_accumulation_steps"].item()


class Exact(Way):
    """The whole batch at once, everything in fp64."""

    dtype = torch.float64

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model, lr)
        self.optimizer = self.adamw(self.params)


WAYS: dict[str, type[Way]] = {"large batch": LargeBatch, "naive": Naive, "fusedaccum": Wrapped}


@dataclass(frozen=True)
class Step:
    """What a worker answers to "step"."""

    time_ms: float
    train_loss: float


@dataclass(frozen=True)
class End:
    """What a worker answers to "end". ``useful_steps``: the gradient noise scale in micro-batches, where known."""

    held_out_loss: float
    peak_bytes: int
    useful_steps: float | None


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel does not report {key}")


def _start_of_memory() -> int:
    """Resets the process's peak to what it uses now, and returns that."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _windows(task: Task, train: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches in an order that depends on the seed alone."""
    inputs, targets = train
    generator = torch.Generator().manual_seed(SEED)
    while True:
        order = torch.randperm(len(inputs), generator=generator)
        for start in range(0, len(order) - task.batch + 1, task.batch):
            chosen = order[start : start + task.batch]
            yield inputs[chosen], targets[chosen]


class Trainer:
    """A model on its way: ``step`` trains one window.

    Attributes:
        before: the initial weights.
    """

    def __init__(self, task: Task, way_class: type[Way], train: tuple[Tensor, Tensor]) -> None:
        torch.manual_seed(SEED)
        # By way of bf16, so that fp64 starts from the same values.
        self.model = task.build().to(torch.bfloat16).to(way_class.dtype)
        self.before = [param.detach().clone() for param in self.model.parameters()]
        self.way = way_class(self.model, task.lr)
        self._task = task
        self._windows = _windows(task, train)
        self._done = 0

    def step(self) -> Step:
        """The next window."""
        way, task = self.way, self._task
        inputs, targets = next(self._windows)
        inputs = floating_to(self.model, inputs)
        start = time.perf_counter()
        for group in way.optimizer.param_groups:
            group["lr"] = task.lr * (1 - self._done / task.n_steps)
        losses = []
        parts = (inputs.chunk(way.n_micro_batches), targets.chunk(way.n_micro_batches))
        for part in zip(*parts, strict=True):
            loss = loss_of(self.model, *part)
            way.micro_batch(loss)
            losses.append(loss.item())
            del loss  # or its graph would still be there while the next one is made
        way.boundary()
        self._done += 1
        return Step((time.perf_counter() - start) * 1e3, sum(losses) / len(losses))

    def held_out_loss(self, held_out: tuple[Tensor, Tensor]) -> float:
        """Over the whole held-out set."""
        inputs, targets = held_out
        with torch.no_grad():
            return float(loss_of(self.model, floating_to(self.model, inputs), targets))


def _rehearse(way_class: type[Way]) -> None:
    """A step of a tiny model, which loads what torch and the library load on first use: hundreds of megabytes of code
    that have nothing to do with the model."""
    model = nn.Linear(4, 4).to(torch.bfloat16)
    way = way_class(model, 1e-3)
    for _ in range(way.n_micro_batches):
        way.micro_batch(model(torch.ones(4, 4, dtype=torch.bfloat16)).float().sum())
    way.boundary()


def work(connection: Connection, task_name: str, quick: bool, way_name: str, weights_file: str) -> None:
    """Answers "step" with a ``Step`` and "end", the last word, with an ``End``.

    Args:
        weights_file: gets the weights after the first window.
    """
    torch.set_num_threads(THREADS)
    task = next(task for task in tasks(quick) if task.name == task_name)
    train, held_out = task.load()
    _rehearse(WAYS[way_name])
    start_bytes = _start_of_memory()
    trainer = Trainer(task, WAYS[way_name], train)
    is_first = True
    while connection.recv() == "step":
        connection.send(trainer.step())
        if is_first:
            torch.save([weight.clone() for weight in trainer.way.weights()], weights_file)
            is_first = False
    peak_bytes = _status_bytes("VmHWM") - start_bytes
    connection.send(End(trainer.held_out_loss(held_out), peak_bytes, trainer.way.useful_steps()))
