"""The figures that the library promises on a CPU: which providers are compared, and what is wanted of the ratios."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from . import providers
from .counts import Counts
from .measure import Provider, Row, Samples, rows
from .shapes import Shape, gpt2_124m, gradients, many_small, n_elems

OURS = providers.OURS


@dataclass(frozen=True)
class Figure:
    """A number, and the bound it is held against.

    Attributes:
        low, high: p20 and p80 of the number within rounds; None where it is counted.
        at_least: whether ``target`` is a lower bound.
    """

    name: str
    value: float
    target: float
    at_least: bool
    unit: str
    low: float | None = None
    high: float | None = None

    @property
    def met(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target


@dataclass(frozen=True)
class Wanted:
    """A bound on a ratio of times. ``ours_on_top``: our time over the rival's, at most; else the rival's over ours,
    at least."""

    rival: str
    target: float
    ours_on_top: bool = False

    def figure(self, op: str, samples: Samples) -> Figure:
        """The figure that came out."""
        if self.ours_on_top:
            name, ratio = f"{op}: time of {OURS} over {self.rival}", samples.ratio(OURS, self.rival)
        else:
            name, ratio = f"{op}: speed of {OURS} over {self.rival}", samples.ratio(self.rival, OURS)
        value, low, high = ratio
        return Figure(name, value, self.target, not self.ours_on_top, "x", low, high)


@dataclass(frozen=True)
class Op:
    """Providers that take turns. ``make``: builds and checks them, ours first; seconds and gigabytes."""

    name: str
    shapes: Sequence[Shape]
    make: Callable[[], list[Provider]]
    wanted: Sequence[Wanted]
    budget_s: float

    def results(self, providers: Sequence[Provider], samples: Samples) -> tuple[list[Row], list[Figure]]:
        """What goes into the report."""
        figures = [wanted.figure(self.name, samples) for wanted in self.wanted]
        return rows(self.name, providers, n_elems(self.shapes), samples), figures


def _on_gpt2(*makers: Callable[[list[torch.Tensor]], Provider]) -> list[Provider]:
    grads = gradients(gpt2_124m())
    return [make(grads) for make in makers]


def _on_small(*makers: Callable[[list[Shape]], Provider]) -> list[Provider]:
    return [make(many_small()) for make in makers]


def _small_backward(collect_garbage: bool) -> list[Provider]:
    makers = (providers.small_backward_fusedaccum, providers.small_backward_torch)
    return _on_small(*(partial(make, collect_garbage=collect_garbage) for make in makers))


OPS = [
    Op(
        "accumulate",
        gpt2_124m(),
        partial(
            _on_gpt2,
            providers.accumulate_fusedaccum,
            providers.accumulate_naive,
            providers.accumulate_foreach,
            providers.accumulate_grad_dtype,
            providers.accumulate_compiled,
            providers.accumulate_native_bf16,
            providers.accumulate_probe,
        ),
        [
            Wanted("naive", 8.0),
            Wanted("foreach", 3.0),
            Wanted("grad_dtype", 3.0),
            Wanted("compiled", 0.95),
            Wanted("native bf16", 0.9),
            Wanted("probe", 0.85),
        ],
        budget_s=25,
    ),
    Op(
        "first accumulate",
        gpt2_124m(),
        partial(_on_gpt2, providers.first_fusedaccum, providers.first_probe),
        [Wanted("probe", 0.85)],
        budget_s=5,
    ),
    Op(
        "boundary",
        gpt2_124m(),
        partial(_on_gpt2, providers.boundary_fusedaccum, providers.boundary_torch, providers.boundary_probe),
        [Wanted("torch", 1.5), Wanted("probe", 0.8)],
        budget_s=15,
    ),
    Op(
        "1000 small: backward",
        many_small(),
        partial(_small_backward, collect_garbage=False),
        [Wanted("torch", 1.3, ours_on_top=True)],
        budget_s=6,
    ),
    Op(
        "1000 small: backward, gc on",
        many_small(),
        partial(_small_backward, collect_garbage=True),
        [Wanted("torch", 1.3, ours_on_top=True)],
        budget_s=6,
    ),
    Op(
        "1000 small: step",
        many_small(),
        partial(_on_small, providers.small_step_fusedaccum, providers.small_step_torch),
        [Wanted("torch", 1.0)],
        budget_s=4,
    ),
]


def counted() -> list[Figure]:
    """The figures that no clock decides."""
    counts = Counts()
    mb = 2**20
    return [
        Figure("op calls a micro-batch", counts.micro_batch_calls, counts.micro_batch_bound, False, "calls"),
        Figure("op calls a boundary", counts.boundary_calls, 2, False, "calls"),
        # A hundredth for the padding that puts every parameter on a boundary of 64 elements.
        Figure("accumulator a parameter", counts.acc_bytes_a_param, 4.01, False, "bytes"),
        Figure(
            "gradients alive in a backward",
            counts.backward_peak_bytes / mb,
            counts.backward_bound_bytes / mb,
            False,
            "MiB",
        ),
        Figure(
            "temporaries of a boundary", counts.boundary_peak_bytes / 1024, counts.partials_bytes / 1024, False, "KiB"
        ),
    ]
