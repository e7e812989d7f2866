"""How the cost of the ops grows with n: one tensor of n elements, ops called directly.

Every call works on another set of buffers, together larger than the last cache, so that data come from memory at every
n, as they do in training. A small n is called many times in a timed run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fusedaccum import layout
from fusedaccum.backends import choose

from . import boundary, ceilings, probe
from .measure import OURS, PEER, PROBE, Provider
from .providers import NAME, SCALE, SHORT, AbsentError, Given, Makers, check_present, our_backends
from .shapes import THREADS

MAX_REPEATS = 64
# The largest n that the slow providers take part at.
SLOW_N = 2**22
# Below, two threads of the probe cost more to start than they save.
ONE_THREAD_N = 2**21


def cache_bytes(device: torch.device) -> int:
    """Of the last cache; 32 MiB where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [
        int(path.read_text().strip().removesuffix("K")) * 1024
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(sizes, default=32 * 2**20)


class _Sets:
    """Buffers of one n. ``take``: the next sets, of which no provider has touched any for longest."""

    def __init__(self, given: Given) -> None:
        n = given.n
        self.given = given
        self.repeats = max(1, min(MAX_REPEATS, 2**16 // n))
        n_sets = self.repeats + 2 * cache_bytes(given.device) // (n * (4 + given.grad_bytes))
        padded = -(-n // 64) * 64
        self.accs = list(torch.zeros(n_sets, padded, device=given.device)[:, :n].unbind())
        # The probe leaves bits that are no numbers, which arithmetic might be slow on.
        self.probe_accs = list(torch.zeros(n_sets, padded, device=given.device)[:, :n].unbind())
        grads = torch.zeros(n_sets, padded, dtype=given.dtype, device=given.device)
        grads[:, :n] = given.grads[0].reshape(-1)
        self.grads = list(grads[:, :n].unbind())
        self._at = 0

    def take(self) -> list[int]:
        """Indices."""
        start, self._at = self._at, (self._at + self.repeats) % len(self.accs)
        return [(start + i) % len(self.accs) for i in range(self.repeats)]


def _provider(
    name: str,
    sets: _Sets,
    first: bool,
    run: Callable[[int], object],
    role: str = PEER,
    n_bytes: int = 0,
    compiled: bool = False,
) -> Provider:
    """``run(i)`` works on the i-th set."""
    given = sets.given

    def all_of_them() -> None:
        for i in sets.take():
            run(i)

    if role != PROBE:
        sets.accs[0].zero_()
        for _ in range(1 if first else 3):
            run(0)
        expected = sets.grads[0].float() * (SCALE if first else 3 * SCALE)
        if not torch.equal(sets.accs[0], expected):
            raise AssertionError(f"{name}: wrong sums at n = {given.n}")
    least = ceilings.least_bytes("first" if first else "accumulate", given)
    return Provider(
        name,
        all_of_them,
        dtypes=f"{SHORT[given.dtype]} -> fp32",
        bytes_an_element=n_bytes or least,
        role=role,
        held=lambda: [torch.empty(4 * given.n, dtype=torch.uint8)],  # one accumulator of the many
        repeats=sets.repeats,
        compiled=compiled,
    )


def _ours(sets: _Sets, first: bool, name: str, backend_name: str) -> Provider:
    """The op itself, which keeps the partials and the micro-batch's too, as it does under the wrapper's defaults."""
    given = sets.given
    check_present(backend_name, given)
    backend = choose(given.device, backend_name)
    places = layout.Layout()
    table = torch.tensor([places.add(given.n).row(0)]).to(given.device)
    partials, micro = (torch.zeros(places.n_chunks, dtype=torch.float64, device=given.device) for _ in range(2))

    def run(i: int) -> None:
        backend.accumulate_(sets.accs[i], partials, micro, table, [sets.grads[i]], [0], [int(first)], SCALE, None)

    return _provider(name, sets, first, run, OURS if name == NAME else PEER)


def _probe(name: str, sets: _Sets, first: bool, threads: int, streaming: bool) -> Provider:
    def run(i: int) -> None:
        if first:
            probe.store(sets.probe_accs[i], sets.grads[i], streaming, threads)
        else:
            probe.add(sets.probe_accs[i], sets.grads[i], threads)

    try:
        probe.library()
    except RuntimeError as error:
        raise AbsentError(str(error)) from None
    run(0)
    return _provider(name, sets, first, run, PROBE)


def _compiled_add(acc: Tensor, grad: Tensor) -> None:
    acc += grad.float() * SCALE


def _compiled_first(acc: Tensor, grad: Tensor) -> None:
    acc.copy_(grad.float() * SCALE)


def _device_copy(name: str, sets: _Sets, first: bool) -> Provider:
    n_bytes = ceilings.least_bytes("first" if first else "accumulate", sets.given) * sets.given.n
    make = partial(torch.zeros, len(sets.accs), n_bytes // 2, dtype=torch.uint8, device=sets.given.device)
    to, source = make(), make()
    return _provider(name, sets, first, lambda i: to[i].copy_(source[i]), PROBE)


def accumulate(given: Given, first: bool = False) -> Makers:
    """Providers of one call of ``accumulate_``."""
    sets = _Sets(given)
    accs, grads, b = sets.accs, sets.grads, given.grad_bytes

    def naive(i: int) -> None:
        if first:
            accs[i].copy_(grads[i].float() * SCALE)
        else:
            accs[i].add_(grads[i].float() * SCALE)

    def foreach(i: int) -> None:
        if first:
            accs[i].zero_()
        torch._foreach_add_([accs[i]], [grads[i]], alpha=SCALE)

    makers: Makers = {
        name: partial(_ours, sets, first, name, backend)
        for name, backend in our_backends(given.device).items()
        if name == NAME or (given.wide and given.n <= SLOW_N)
    }
    makers["naive fp32"] = lambda: _provider("naive fp32", sets, first, naive, n_bytes=b + 20 if first else b + 24)
    if given.wide:
        compiled = torch.compile(_compiled_first if first else _compiled_add, dynamic=True)
        run = lambda i: compiled(accs[i], grads[i])  # noqa: E731
        n_bytes = b + 4 if first else b + 8
        makers["compiled"] = lambda: _provider("compiled", sets, first, run, n_bytes=n_bytes, compiled=True)
    makers["foreach"] = lambda: _provider("foreach", sets, first, foreach, n_bytes=b + 12 if first else b + 8)
    if given.device.type != "cpu":
        return {**makers, "device copy": partial(_device_copy, "device copy", sets, first)}
    for threads in (1, THREADS) if given.n < ONE_THREAD_N else (THREADS,):
        for streaming in (False, True) if first else (False,):
            name = f"probe, {threads} thread{'s' * (threads > 1)}{', streaming' * streaming}"
            makers[name] = partial(_probe, name, sets, first, threads, streaming)
    return makers


# The boundary --------------------------------------------------------------------------------------------------------


def _in_turn(make: Callable[[], Provider], n_sets: int) -> Provider:
    """One provider made of many of its kind, each run of which is the next one's."""
    providers = [make() for _ in range(n_sets)]
    position = 0

    def run() -> None:
        nonlocal position
        position = (position + 1) % n_sets
        providers[position].run()

    provider = providers[0]
    runs = provider.run
    providers[0] = Provider(provider.name, runs)
    provider.run = run
    return provider


def step(given: Given) -> Makers:
    """Providers of a boundary with one parameter, by way of the wrapper."""
    n_sets = 1 + 2 * cache_bytes(given.device) // (18 * given.n)
    wanted = {NAME, "torch fused"}

    def fresh(name: str) -> Provider:
        return boundary.providers(given)[name]()

    names = [name for name in boundary.providers(given) if name in wanted or name.startswith(("probe", "device copy"))]
    return {name: partial(_in_turn, partial(fresh, name), n_sets) for name in names}
