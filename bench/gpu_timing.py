"""Accumulate and boundary on a GPU, timed with CUDA events against torch's ways and against a plain copy.

Each provider works on several sets of buffers in turn, together larger than the L2 cache, and the providers of a case
take turns. A result is checked before it is timed. Without a GPU the same code builds and runs everything, and times
nothing.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from fusedaccum import FusedAccumOptimizer, layout
from fusedaccum.backends import why_not

from .gpu_parity import backend_of, gpu_backend, kind_of
from .shapes import Shape, gpt2_124m, n_elems

SCALE = 0.25  # a power of two: the first result is exact, whichever way it is computed
LR, WEIGHT_DECAY, EPS, MAX_NORM = 1e-3, 0.1, 1e-8, 1.0
OURS, STATISTICS, CEILING = "fusedaccum", "fusedaccum, statistics", "copy"
TRITON = "fusedaccum, triton"
ROUNDS = 30
MIN_ROUNDS = 5
# A timed stretch moves at least this much, so that the events themselves do not count.
STRETCH_BYTES = 256 * 2**20
MAX_SETS = 256


@dataclass
class Way:
    """One provider of a case: ``run(i)`` does the op on the i-th set of buffers.

    Attributes:
        bytes_an_element: that it has to move, as the loads and stores of its passes; 0 where nobody has counted.
    """

    name: str
    run: Callable[[int], object]
    bytes_an_element: int


@dataclass(frozen=True)
class Row:
    """One provider's time. The times are None where nothing was timed, for want of a GPU.

    ``share_of_copy``: GB/s over those of the case's copy.
    """

    op: str
    case: str
    provider: str
    n: int
    n_sets: int
    bytes_moved: int
    rounds: int
    median_ms: float | None
    p20_ms: float | None
    p80_ms: float | None
    gb_per_s: float | None
    share_of_copy: float | None


@dataclass(frozen=True)
class Case:
    """Shapes to time. ``compiled``: whether ``torch.compile`` takes part, which costs tens of seconds."""

    name: str
    shapes: Sequence[Shape]
    compiled: bool = False

    @property
    def n(self) -> int:
        return n_elems(self.shapes)


def cases(largest: int = 28) -> list[Case]:
    """Powers of two and a model, the most telling first, should time run out."""
    powers = [Case(f"2^{p}", [(2**p,)], compiled=p == 24) for p in (28, 24, 20, 16) if p <= largest]
    return [*powers[:1], Case("GPT-2 124M", gpt2_124m(), compiled=True), *powers[1:]]


class Timer:
    """Runs ways in turn and takes the times, if ``device`` is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"
        properties = torch.cuda.get_device_properties(device) if self.is_gpu else None
        self._cache_bytes = getattr(properties, "L2_cache_size", 64 * 2**20)

    def n_sets(self, n_bytes: int) -> int:
        """Sets of ``n_bytes`` that together are twice the cache."""
        return min(MAX_SETS, 1 + 2 * self._cache_bytes // n_bytes) if self.is_gpu else 2

    def has_room(self, n_bytes: int) -> bool:
        """Whether the device has that much memory free, and some to spare."""
        return not self.is_gpu or torch.cuda.mem_get_info(self.device)[0] > 1.1 * n_bytes

    def times_ms(self, ways: Sequence[Way], n_sets: int, n_bytes: int, budget_s: float) -> dict[str, list[float]]:
        """Milliseconds a run: rounds of every way, begun with another one each, as long as ``budget_s`` lasts."""
        stretch = max(1, min(n_sets, STRETCH_BYTES // n_bytes)) if self.is_gpu else 1
        for way in ways:  # warm-up, compilation included
            for i in range(2):
                way.run(i % n_sets)
        times: dict[str, list[float]] = {way.name: [] for way in ways}
        if not self.is_gpu:
            return times
        torch.cuda.synchronize()
        start, at = time.perf_counter(), 0
        for number in range(ROUNDS):
            if number >= MIN_ROUNDS and time.perf_counter() - start > budget_s:
                break
            shift = number % len(ways)
            for way in [*ways[shift:], *ways[:shift]]:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for i in range(at, at + stretch):
                    way.run(i % n_sets)
                end.record()
                end.synchronize()
                times[way.name].append(begin.elapsed_time(end) / stretch)
            at += stretch
        return times

    def rows(self, op: str, case: Case, ways: Sequence[Way], n_sets: int, budget_s: float) -> list[Row]:
        """The rows of one case."""
        times = self.times_ms(ways, n_sets, case.n * ways[0].bytes_an_element, budget_s)
        speeds: dict[str, float] = {}
        result = []
        for way in sorted(ways, key=lambda way: way.name != CEILING):  # the ceiling first, the others relate to it
            moved, samples = way.bytes_an_element * case.n, times[way.name]
            if not samples:
                result.append(Row(op, case.name, way.name, case.n, n_sets, moved, 0, None, None, None, None, None))
                continue
            p20, median, p80 = (float(q) for q in np.percentile(samples, [20, 50, 80]))
            speed = moved / median / 1e6
            speeds[way.name] = speed
            share = speed / speeds[CEILING] if moved else None
            cells = (len(samples), median, p20, p80, speed if moved else None, share)
            result.append(Row(op, case.name, way.name, case.n, n_sets, moved, *cells))
        return result


def _copy(device: torch.device, n_bytes: int, n_sets: int) -> Way:
    """A device-to-device copy that moves ``n_bytes``, half of them read, half written. Random bytes, as real data."""
    make = lambda: torch.randint(0, 256, (n_bytes // 2,), dtype=torch.uint8, device=device)  # noqa: E731
    pairs = [(make(), make()) for _ in range(n_sets)]
    return Way(CEILING, lambda i: pairs[i][0].copy_(pairs[i][1]), 0)


def _gradients(shapes: Sequence[Shape], device: torch.device, seed: int) -> list[Tensor]:
    random = torch.Generator(device).manual_seed(seed)
    return [torch.randn(shape, generator=random, device=device).to(torch.bfloat16) for shape in shapes]


# Accumulate ----------------------------------------------------------------------------------------------------------


def accumulate_ways(case: Case, timer: Timer, n_sets: int) -> list[Way]:
    """A later micro-batch: bfloat16 gradients onto an fp32 accumulator. Ours keeps the norm too."""
    device, shapes = timer.device, case.shapes
    grads = [_gradients(shapes, device, seed) for seed in range(n_sets)]
    places = layout.Layout()
    table = torch.tensor([places.add(math.prod(shape)).row(0) for shape in shapes]).to(device)
    backend = backend_of(device)
    flat = [torch.zeros(places.n_elems, device=device) for _ in range(n_sets)]
    partials, micro_partials = (torch.zeros(places.n_chunks, dtype=torch.float64, device=device) for _ in range(2))
    views = [
        [acc[p.offset_elems :][: p.n_elems].view(s) for p, s in zip(places.placements, shapes, strict=True)]
        for acc in flat
    ]
    slots, first = list(range(len(shapes))), [0] * len(shapes)

    def ours(i: int) -> None:
        backend.accumulate_(flat[i], partials, None, table, grads[i], slots, first, SCALE, None)

    def ours_with_statistics(i: int) -> None:
        backend.accumulate_(flat[i], partials, micro_partials, table, grads[i], slots, first, SCALE, None)

    def naive(i: int) -> None:
        for acc, grad in zip(views[i], grads[i], strict=True):
            acc += grad.float() * SCALE

    def foreach(i: int) -> None:
        torch._foreach_add_(views[i], grads[i], alpha=SCALE)

    # Naive: the cast reads 2 and writes 4, the product 4 and 4, the sum 8 and 4. All ways share the accumulators.
    ways = [
        Way(OURS, ours, 10),
        Way(STATISTICS, ours_with_statistics, 10),
        Way("naive", naive, 26),
        Way("foreach", foreach, 10),
    ]
    if timer.is_gpu and why_not("triton", device) is None:
        with gpu_backend("triton"):
            triton = backend_of(device)
        ways.append(
            Way(
                TRITON,
                lambda i: triton.accumulate_(flat[i], partials, None, table, grads[i], slots, first, SCALE, None),
                10,
            )
        )
    if case.compiled:
        compiled = torch.compile(
            lambda accs, gs: [acc.add_(g.float() * SCALE) for acc, g in zip(accs, gs, strict=True)]
        )
        ways.append(Way("compiled", lambda i: compiled(views[i], grads[i]), 10))
    for way in ways:
        flat[0].fill_(1.0)
        way.run(0)
        for acc, grad in zip(views[0], grads[0], strict=True):
            if not torch.equal(acc, 1.0 + grad.float() * SCALE):
                raise AssertionError(f"{way.name}: wrong sums")
    ceiling = _copy(device, 10 * case.n, n_sets)
    ceiling.bytes_an_element = 10
    return [*ways, ceiling]


# The boundary --------------------------------------------------------------------------------------------------------


def _wrapped(shapes: Sequence[Shape], device: torch.device, seed: int) -> tuple[list[Parameter], FusedAccumOptimizer]:
    """A wrapper that holds accumulated gradients and keeps them, so that ``step`` can be run again and again."""
    params = [Parameter(grad * 0.02) for grad in _gradients(shapes, device, seed + 1000)]
    inner = torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY, eps=EPS)
    optimizer = FusedAccumOptimizer(inner, max_grad_norm=MAX_NORM, backend=kind_of(device))
    inputs = _gradients(shapes, device, seed)
    torch.stack([(param * x).sum() for param, x in zip(params, inputs, strict=True)]).sum().backward()
    return params, optimizer


def _torch_way(
    shapes: Sequence[Shape], device: torch.device, seed: int, options: dict[str, bool]
) -> tuple[list[Parameter], list[Parameter], torch.optim.Optimizer]:
    """bfloat16 parameters, fp32 masters that hold the same gradients, torch's optimizer."""
    params = [Parameter(grad * 0.02) for grad in _gradients(shapes, device, seed + 1000)]
    masters = [Parameter(param.detach().float()) for param in params]
    for master, grad in zip(masters, _gradients(shapes, device, seed), strict=True):
        master.grad = grad.float()
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=WEIGHT_DECAY, eps=EPS, **options)
    return params, masters, optimizer


def boundary_ways(case: Case, timer: Timer, n_sets: int) -> list[Way]:
    """Clip, AdamW on fp32 masters, and the copy back to bfloat16. fused: 4 norm, 8 clip, 28 AdamW, 6 copy."""
    device, shapes = timer.device, case.shapes
    ours = [_wrapped(shapes, device, seed) for seed in range(n_sets)]
    ways = [Way(OURS, lambda i: ours[i][1].step(), 30)]
    ours[0][1].step()
    if timer.is_gpu and why_not("triton", device) is None:
        with gpu_backend("triton"):
            theirs = [_wrapped(shapes, device, seed) for seed in range(n_sets)]
        theirs[0][1].step()
        masters = [theirs[0][1].state[p]["master_param"] for p in theirs[0][0]]
        _check_first_step(TRITON, theirs[0][0], masters, shapes, device)
        ways.append(Way(TRITON, lambda i: theirs[i][1].step(), 30))
    params = ours[0][0]
    _check_first_step(OURS, params, [ours[0][1].state[p]["master_param"] for p in params], shapes, device)
    kinds: dict[str, dict[str, bool]] = {"fused": {"fused": True}, "foreach": {"foreach": True}}
    if len(shapes) == 1 or case.compiled:
        kinds["naive"] = {"foreach": False}
    if case.compiled:
        kinds["compiled"] = {"foreach": True, "capturable": timer.is_gpu}
    for name, options in kinds.items():
        sets = [_torch_way(shapes, device, seed, options) for seed in range(n_sets)]
        step = _torch_boundary(sets, name == "compiled")
        step(0)
        _check_first_step(name, sets[0][0], sets[0][1], shapes, device)
        ways.append(Way(name, step, 46 if name == "fused" else 0))
    ceiling = _copy(device, 30 * case.n, n_sets)
    ceiling.bytes_an_element = 30
    return [*ways, ceiling]


def _torch_boundary(
    sets: list[tuple[list[Parameter], list[Parameter], torch.optim.Optimizer]], compiled: bool
) -> Callable[[int], None]:
    steps = [torch.compile(optimizer.step) if compiled else optimizer.step for _, _, optimizer in sets]

    def run(i: int) -> None:
        params, masters, _ = sets[i]
        torch.nn.utils.clip_grad_norm_(masters, MAX_NORM)
        steps[i]()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)

    return run


def _check_first_step(
    name: str, params: Sequence[Tensor], masters: Sequence[Tensor], shapes: Sequence[Shape], device: torch.device
) -> None:
    """Against fp64: from zero states AdamW moves by lr * g / (|g| + eps), g clipped.

    Where g is near eps the quotient feels the error of an fp32 norm, 1e-6 of it: lr / 100 is far above that, and far
    below the step itself. No gradient may be wrong in sign or left out.
    """
    grads = _gradients(shapes, device, 0)
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
    factor = min(1.0, MAX_NORM / (norm + 1e-6))
    starts = _gradients(shapes, device, 1000)
    for param, master, start, grad in zip(params, masters, starts, grads, strict=True):
        before = (start * 0.02).reshape(-1)[:4096].double()
        g = grad.reshape(-1)[:4096].double() * factor
        expected = before * (1 - LR * WEIGHT_DECAY) - LR * g / (g.abs() + EPS)
        got = master.detach().reshape(-1)[:4096].double()
        if not torch.allclose(got, expected, rtol=0, atol=LR / 100):
            raise AssertionError(f"{name}: a master is off by {float((got - expected).abs().max())}")
        if not torch.equal(param.detach(), master.detach().to(param.dtype)):
            raise AssertionError(f"{name}: a parameter is not its rounded master")


# Bytes alive for each element and set: gradients, accumulator and copy; states of up to six providers and copy.
OPS: dict[str, tuple[Callable[[Case, Timer, int], list[Way]], int, int]] = {
    "accumulate": (accumulate_ways, 10, 6 + 10 + 8),
    "boundary": (boundary_ways, 30, 6 * 24 + 30 + 8),
}


def run(
    device: torch.device, chosen: Sequence[Case], deadline: float, report: Callable[[list[Row]], object]
) -> tuple[list[Row], list[str]]:
    """Times every op in every case until ``deadline`` (of ``time.perf_counter``).

    Returns:
        The rows, and what was left out or failed, and why.
    """
    timer = Timer(device)
    rows: list[Row] = []
    left_out = []
    for case in chosen:
        for op, (make, n_bytes, n_bytes_alive) in OPS.items():
            n_sets = timer.n_sets(n_bytes * case.n)
            if time.perf_counter() > deadline:
                left_out.append(f"{op}, {case.name}: no time was left")
            elif not timer.has_room(n_bytes_alive * case.n * n_sets):
                left_out.append(f"{op}, {case.name}: not enough memory is free")
            else:
                try:
                    rows += timer.rows(op, case, make(case, timer, n_sets), n_sets, budget_s=6.0)
                    report([row for row in rows if (row.op, row.case) == (op, case.name)])
                except Exception as error:  # what has been measured so far must be written
                    left_out.append(f"{op}, {case.name}: {type(error).__name__}: {error}")
            gc.collect()
            if timer.is_gpu:
                torch.cuda.empty_cache()
    return rows, left_out
