"""Whether the CUDA backend, or Triton's, computes on a GPU what the compiled library computes on the CPU, bit by bit.

Each check is a function of (device, scale) that returns what is wrong, or None. On a CPU device the checks run against
the CPU's own library, carried through the same code: that proves the checks, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedaccum import FusedAccumOptimizer, LossScale, layout, selftest
from fusedaccum.backends import Backend, choose

from .on_device import on_device
from .shapes import Shape, gpt2_124m, n_elems

TESTS = Path(__file__).parent.parent / "tests"
CPU = torch.device("cpu")
K = 3  # micro-batches a window


@dataclass(frozen=True)
class Check:
    """How a check went: ``problem`` is None where nothing was wrong."""

    name: str
    problem: str | None
    time_s: float


_of_a_gpu = "cuda"


@contextmanager
def gpu_backend(name: str) -> Iterator[None]:
    """Everything here, and the timing, takes another backend than ``cuda`` on a GPU."""
    global _of_a_gpu
    before, _of_a_gpu = _of_a_gpu, name
    try:
        yield
    finally:
        _of_a_gpu = before


def kind_of(device: torch.device) -> str:
    """The name of the backend that is looked at."""
    return _of_a_gpu if device.type == "cuda" else "native"


def backend_of(device: torch.device) -> Backend:
    """The backend that is looked at on ``device``, never a fallback."""
    return choose(device, kind_of(device))


def first_difference(what: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """Where two lists of tensors differ in a bit; NaNs count as equal."""
    for i, (have, want) in enumerate(zip(found, expected, strict=True)):
        have, want = have.detach().cpu().reshape(-1), want.detach().cpu().reshape(-1)
        differs = (have != want) & ~(have.isnan() & want.isnan())
        if differs.any():
            at = int(differs.nonzero()[0])
            n = int(differs.sum())
            return f"{what}[{i}]: {n} of {have.numel()} differ, [{at}] is {have[at].item()!r}, not {want[at].item()!r}"
    return None


def self_test(device: torch.device, scale: int) -> str | None:
    """The package's own, which ``doctor`` runs."""
    return selftest.check(backend_of(device), device)


def every_op(device: torch.device, scale: int) -> str | None:
    """Every op over parameters of every kind, at odd sizes, off their alignment, with sums that overflow."""
    sys.path.insert(0, str(TESTS))
    try:
        import helpers
        import isa_workload
    finally:
        sys.path.remove(str(TESTS))
    carried = on_device(backend_of(device), device)
    for rule in isa_workload.RULES:
        expected = isa_workload.windows(choose(CPU, "native"), rule)
        try:
            helpers.assert_same_buffers(isa_workload.windows(carried, rule), expected)
        except AssertionError as error:
            return f"rule {rule}: {error}"
    return None


def many_tensors(device: torch.device, scale: int) -> str | None:
    """More tensors than one launch takes, and a tensor of many chunks, with awkward values among them."""
    sizes = [7] * (5 * scale + 1) + [layout.CHUNK * scale // 4 + 5, 0, 1]
    places = layout.Layout()
    rows = torch.tensor([places.add(n).row(0) for n in sizes])
    random = torch.Generator().manual_seed(0)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    grads = [torch.randn(n, generator=random).to(dtypes[i % 3]) for i, n in enumerate(sizes)]
    grads[3][:3] = torch.tensor([torch.inf, 1e-41, -0.0]).to(grads[3].dtype)
    slots = list(range(len(sizes)))
    results = []
    for backend, where in ((backend_of(device), device), (choose(CPU, "native"), CPU)):
        acc = torch.zeros(places.n_elems, device=where)
        partials, micro_partials = (torch.zeros(places.n_chunks, dtype=torch.float64, device=where) for _ in range(2))
        factor = torch.full((1,), 0.7, dtype=torch.float64, device=where)
        table, there = rows.to(where), [grad.to(where) for grad in grads]
        for first, micro in ((1, micro_partials), (0, micro_partials), (0, None)):
            backend.accumulate_(acc, partials, micro, table, there, slots, [first] * len(slots), 0.3, factor)
        kept = partials.clone()
        backend.measure_(partials, acc, table, slots, sizes)
        results.append([acc, kept, partials, micro_partials])
    return first_difference("(acc, partials, measured, micro_partials)", *results)


OPTIMIZERS: dict[str, Callable[[list[Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adam, amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "sgd, nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
}


class Training:
    """Windows over parameters whose gradients are exactly what the inputs hold, on any device.

    Args:
        dtype: of the parameters and gradients.
        loss_scale: where given, micro-batches are weighted too, by a number that only the device knows.
    """

    def __init__(
        self,
        name: str,
        shapes: Sequence[Shape],
        dtype: torch.dtype,
        device: torch.device,
        loss_scale: LossScale | None = None,
    ) -> None:
        random = torch.Generator().manual_seed(1)
        values = [torch.randn(shape, generator=random) for shape in shapes]
        self.params = [Parameter(value.to(device, dtype)) for value in values]
        self.inputs = [torch.zeros_like(param, requires_grad=False) for param in self.params]
        inner = OPTIMIZERS[name](self.params)
        kind = kind_of(device)
        self.optimizer = FusedAccumOptimizer(
            inner, accumulation_steps=K, max_grad_norm=1.0, backend=kind, loss_scale=loss_scale
        )
        self.weight = None if loss_scale is None else torch.ones((), device=device)

    def feed(self, seed: int) -> None:
        """New inputs, from the CPU's generator, written in place."""
        random = torch.Generator().manual_seed(seed)
        for held in self.inputs:
            held.copy_(torch.randn(held.shape, generator=random))
        if self.weight is not None:
            self.weight.fill_(2.0 ** (seed % 3))

    def window(self) -> None:
        """K micro-batches and their boundary; the k-th gradient is the input times 2^k, which is exact."""
        for k in range(K):
            # Each product's gradient is its input: no sum of values takes part, whose order a device might choose.
            loss = torch.stack([(p * (x * 2.0**k)).sum() for p, x in zip(self.params, self.inputs, strict=True)]).sum()
            self.optimizer.backward(loss, weight=self.weight)
            self.optimizer.step()
        self.optimizer.zero_grad()

    def results(self) -> list[Tensor]:
        """Parameters, all state, and the norm."""
        state = [self.optimizer.state[param] for param in self.params]
        held = [value for entry in state for _, value in sorted(entry.items()) if isinstance(value, Tensor)]
        said = [self.optimizer.grad_norm, self.optimizer.found_inf, self.optimizer.loss_scale]
        return [*self.params, *held, *said]


def training(device: torch.device, scale: int, name: str, dtype: torch.dtype) -> str | None:
    """The wrapper end to end: three windows, one of them with an infinity, which must be skipped."""
    shapes: list[Shape] = [(3, 5), (layout.CHUNK + 1,), (), (16, scale), *[(7,)] * (3 * scale)]
    results = []
    for where in (device, CPU):
        run = Training(name, shapes, dtype, where)
        for seed in range(3):
            run.feed(seed)
            if seed == 1:
                run.inputs[1][5] = torch.inf
            run.window()
        results.append(run.results())
    return first_difference("(parameters, states, norm, found_inf)", *results)


def model_sized(device: torch.device, scale: int) -> str | None:
    """One window at the shapes of GPT-2 124M."""
    shapes = gpt2_124m() if n_elems(gpt2_124m()) <= scale * 10**6 else [(scale, 48), (48,)]
    results = []
    for where in (device, CPU):
        run = Training("adamw", shapes, torch.bfloat16, where)
        run.feed(7)
        run.window()
        results.append([value.detach().cpu() for value in run.results()])
    return first_difference("(parameters, states, norm, found_inf)", *results)


def captured_window(device: torch.device, scale: int) -> str | None:
    """K micro-batches and the boundary in one CUDA graph, with a dynamic loss scale and weights that only the device
    knows, replayed with other gradients and weights: as without the graph.

    The wrapper is made on the default stream, warmed up on a side stream, and captured. On a CPU device there is no
    graph, and the window is run in its place.
    """
    shapes: list[Shape] = [(33, 5), (layout.CHUNK + 1,), *[(7,)] * scale]
    loss_scale = LossScale(2.0**4, growth_interval=2)
    captured, plain = (Training("adamw", shapes, torch.bfloat16, device, loss_scale) for _ in range(2))
    # (seed, whether an infinity is put in): the device alone decides to skip, and moves the scale.
    warm_up, replayed = [(0, False), (1, False), (2, False)], [(3, False), (4, True), (4, False), (5, False)]
    replay: Callable[[], Any] = captured.window
    if device.type == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for seed, _ in warm_up:
                captured.feed(seed)
                captured.window()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # recorded, not run
            captured.window()
        replay = graph.replay
    else:
        for seed, _ in warm_up:
            captured.feed(seed)
            captured.window()
    for seed, _ in warm_up:
        plain.feed(seed)
        plain.window()
    for seed, is_spoilt in replayed:
        for training_run, run_window in ((captured, replay), (plain, plain.window)):
            training_run.feed(seed)
            if is_spoilt:
                training_run.inputs[0][0] = torch.inf
            kept = [param.detach().clone() for param in training_run.params]
            run_window()
            problem = (
                first_difference("a skipped window's parameters", training_run.params, kept) if is_spoilt else None
            )
            if problem is not None:
                return problem
        problem = first_difference("(parameters, states, norm, found_inf, scale)", captured.results(), plain.results())
        if problem is not None:
            return problem
    return None


CHECKS: dict[str, Callable[[torch.device, int], str | None]] = {
    "self-test": self_test,
    "every op": every_op,
    "many tensors": many_tensors,
    **{
        f"training, {name}, {str(dtype).removeprefix('torch.')}": partial(training, name=name, dtype=dtype)
        for name in OPTIMIZERS
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    },
    "captured window": captured_window,
    "GPT-2 124M": model_sized,
}


def run(device: torch.device, scale: int, report: Callable[[Check], object]) -> list[Check]:
    """All checks. ``scale``: 1,000 on a GPU (5,001 tensors in a call); small where it only has to run."""
    done = []
    for name, check in CHECKS.items():
        start = time.perf_counter()
        try:
            problem = check(device, scale)
        except Exception as error:  # the other checks are still worth their time
            problem = f"{type(error).__name__}: {error}"
        done.append(Check(name, problem, time.perf_counter() - start))
        report(done[-1])
        gc.collect()
    return done


def main(arguments: list[str] | None = None) -> int:
    """``python -m bench.gpu_parity DEVICE``: the small checks alone, for a memory checker to watch."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_parity")
    parser.add_argument("device", type=torch.device)
    device = parser.parse_args(arguments).device
    problems = [
        self_test(device, 1),
        every_op(device, 1),
        many_tensors(device, 420),  # past the 2,040 of a launch
        training(device, 2, "adamw", torch.bfloat16),
    ]
    print(*[problem for problem in problems if problem is not None] or ["ok"], sep="\n")
    return int(any(problem is not None for problem in problems))


if __name__ == "__main__":
    sys.exit(main())
