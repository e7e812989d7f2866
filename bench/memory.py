"""What a provider's run needs besides time: calls of ops, and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from .measure import Provider


@dataclass(frozen=True)
class Memory:
    """Of one run.

    Attributes:
        op_calls: calls through torch's dispatcher, None where nobody can count them.
        held_bytes: of the storages the provider keeps.
        temporary_bytes: most bytes allocated by torch during the run and alive at one time.
    """

    op_calls: int | None
    held_bytes: int
    temporary_bytes: int


class OpCalls(TorchDispatchMode):
    """Counts calls of ops. ``namespace``: only of this one."""

    def __init__(self, namespace: str | None = None) -> None:
        super().__init__()
        self.n_calls = 0
        self._namespace = namespace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # detach is how autograd hands a tensor on, and moves nothing.
        counts = self._namespace in (None, func.namespace) and func is not torch.ops.aten.detach.default
        self.n_calls += counts
        return func(*args, **(kwargs or {}))


def op_calls(run: Callable[[], object], namespace: str | None = None) -> int:
    """Calls of ops, of one namespace or of all, during ``run``."""
    with OpCalls(namespace) as calls:
        run()
    return calls.n_calls


def allocations(run: Callable[[], object]) -> list[tuple[int, int]]:
    """(time in ns, bytes) of each allocation (positive) and release (negative) by torch on the CPU, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    memory = sorted(
        (event.start_ns(), i, event.nbytes()) for i, event in enumerate(events) if event.name() == "[memory]"
    )
    return [(time_ns, n_bytes) for time_ns, _, n_bytes in memory]


def peak(sizes: list[int]) -> int:
    """The highest sum on the way."""
    highest = alive = 0
    for n_bytes in sizes:
        alive += n_bytes
        highest = max(highest, alive)
    return highest


def _temporaries(run: Callable[[], object]) -> int:
    if not torch.cuda.is_initialized():
        return peak([n_bytes for _, n_bytes in allocations(run)])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def memory_of(provider: Provider) -> Memory:
    """Runs the provider, once for each number."""
    n_calls = None
    if not provider.compiled:
        provider.prepare()
        n_calls = op_calls(provider.run) // provider.repeats
    provider.prepare()
    temporary = _temporaries(provider.run)
    storages = {}
    for tensor in provider.held():
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return Memory(n_calls, sum(storages.values()), temporary)
