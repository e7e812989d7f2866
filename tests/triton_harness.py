"""The Triton kernels with no GPU: compiled ahead of time for one, their PTX executed by the interpreter in ``ptxrun``.

``TritonPtxBackend`` is ``cuda_harness.PtxBackend`` with other kernels and launches: the same device memory that holds
only what an op may read, the same checks of what was written, how many bytes moved and in accesses of what width.
"""

from __future__ import annotations

import functools
import os
import struct
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from cuda_bytes import is_aligned, traffic
from cuda_harness import AMSGRAD_SCALAR, ARCHS, N_ELEMS, OFFSET, Launched, PtxBackend
from cuda_memory import Piece, flat
from ptxrun import cuda
from torch import Tensor
from triton_interpreter import PACKAGE, load_package

from fusedaccum import layout
from fusedaccum.layout import n_chunks

__all__ = ["ARCHS", "TritonPtxBackend", "compiled", "package"]

_SIGNED = 2**63


@functools.cache
def package(folder: Path = PACKAGE) -> ModuleType:
    """The package in ``folder``, whose kernels can be compiled; ``ahead`` does."""
    return load_package(folder, interpret=False)


@functools.cache
def compiled(folder: Path, kernel: str, constants: tuple[tuple[str, Any], ...], arch: int) -> Any:
    """What Triton makes of a kernel for sm_``arch``; kept in Triton's own cache, with ptxrun's."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cuda.cache_dir() / "triton"))
    return package(folder).ahead.compile_kernel(kernel, dict(constants), arch)


@functools.cache
def _program(folder: Path, kernel: str, constants: tuple[tuple[str, Any], ...], arch: int) -> cuda.Program:
    program = cuda.Program(compiled(folder, kernel, constants, arch).asm["ptx"])
    assert program.module.unsupported(kernel) == [], f"{kernel}: the interpreter lacks an instruction"
    assert program.module.contractible(kernel) == [], f"{kernel}: a product and a sum that ptxas may fuse"
    return program


@dataclass
class _Job:
    """One launch: the kernel's arguments."""

    arguments: list[int | float]


class _Plan:
    """The part of ``plan_module`` that ``PtxBackend`` uses, for launches whose entries lie in device memory."""

    THREADS = 128
    NO_GRAD = 3

    def __init__(self, backend: TritonPtxBackend) -> None:
        self.backend = backend

    def accumulate(self, *arguments: Any) -> Iterator[tuple[int, int, _Job]]:
        acc, partials, micro_partials, table, factor, scale, entries = arguments
        n_programs, words = self.backend.entries(entries)
        if self.backend.kernel == "measure_kernel":
            values = [acc, partials, table, *words]
        else:
            values = [acc, partials, micro_partials, table, words[0], factor, words[1], scale]
        if n_programs:
            yield n_programs, 0, _Job(values)

    def step(self, *arguments: Any) -> Iterator[tuple[int, int, _Job]]:
        *pointers, entries = arguments
        n_programs, words = self.backend.entries(entries)
        values = [*(pointers if self.backend.kernel == "adam_kernel" else pointers[2:]), *words]
        if n_programs:
            yield n_programs, 0, _Job(values)


class TritonPtxBackend(PtxBackend):
    """The ops of ``fusedaccum.ops``, run by the interpreter. ``folder``: the package; the rest as in ``PtxBackend``."""

    def __init__(self, arch: int, *, folder: Path = PACKAGE, **options: Any) -> None:
        super().__init__(_Plan(self), arch, **options)  # type: ignore[arg-type]
        self.folder = folder
        self.kernel = ""

    def _prepare(self, kernel: str, **constants: Any) -> None:
        self.kernel, self._constants = kernel, tuple(constants.items())
        # The bytes of what tells programs where to work, which each thread reads for itself.
        self._lookup_bytes, self._skips = 0, False

    def _start(self, file: str) -> None:
        self._regions = []
        self._program = _program(self.folder, self.kernel, self._constants, self.arch)
        self._program.reset()

    def entries(self, tensors: Sequence[tuple[int, int, int, int, int]]) -> tuple[int, list[int]]:
        """(programs, [address and number of the entries])."""
        places = [((a + _SIGNED) % 2**64 - _SIGNED, n, code) for a, n, _, code, _ in tensors]
        plan = package(self.folder).plan.Plan(places, [t[2] for t in tensors], [t[4] for t in tensors])
        words = torch.frombuffer(plan.words or array("q", [0]), dtype=torch.int64)
        address = self._region("entries", words.numel() * 8, 0, [Piece(0, words, True, False)])
        ends = words[plan.n_entries : 2 * plan.n_entries].tolist()
        begin = 0
        for end in [] if self._skips else ends:
            loads = _loads_to_find(ends, begin) - (self.kernel == "measure_kernel")  # which needs no address
            self._lookup_bytes += (end - begin - self.before_chunks) * 128 * 8 * loads
            begin = end
        return plan.n_programs, [address, plan.n_entries]

    def _run(self, name: str, capacity: int, grid: int, threads: int, block: Any, order: list[int]) -> None:
        arguments = block.arguments if isinstance(block, _Job) else self._finalize_arguments(block)
        made = compiled(self.folder, self.kernel, self._constants, self.arch)
        # Triton adds pointers to scratch memory, which these kernels do not use.
        arguments += [0] * (len(self._program.module.kernels[self.kernel].params) - len(arguments))
        stats = self._program.launch(
            self.kernel,
            grid,
            32 * made.metadata.num_warps,
            arguments,
            shared_bytes=made.metadata.shared,
            check_races="all",
            block_order=order[::-1] if self.backwards else order,
        )
        self.launches.append(Launched(self.kernel, 0, grid, stats))
        assert not stats.approx, f"{name}: approximate instructions {dict(stats.approx)}"

    def _finalize_arguments(self, block: bytes) -> list[int | float]:
        """Of FinalizeArgs of csrc/cuda/kernels.h."""
        (*values, rule, advance, has_micro) = struct.unpack("<10Q2q4d3q", block)
        assert dict(self._constants) == {"RULE": rule, "HAS_MICRO": bool(has_micro)}
        pointers, (n_slots, n_groups), numbers = values[:10], values[10:12], values[12:]
        sizes = [n_slots, n_groups, self._n_chunks, n_slots.bit_length()]
        return [*pointers, *sizes, *numbers, int(pointers[9] != 0), advance]

    def _check_bytes(self, moved: Counter, least: Counter, overhead_bytes: int, optional_bytes: int = 0) -> None:
        """As in ``PtxBackend``, to the byte: a program's 128 threads each read all that tells where it works."""
        most = least.total() + self._lookup_bytes
        total = moved.total()
        assert most - optional_bytes <= total <= most, f"{dict(moved)}, not {dict(least)} + {self._lookup_bytes}"
        for way, width in least:
            wide, wanted = (sum(n for (w, x), n in of.items() if w == way and x >= width) for of in (moved, least))
            wanted -= optional_bytes if way == "r" else 0
            assert wide >= wanted, f"fewer bytes than expected in accesses of that width: {way} {width}, {dict(moved)}"

    def accumulate_(self, *arguments: Any) -> None:
        micro_partials, factor = arguments[2], arguments[8]
        self._prepare("accumulate_kernel", KEEP_MICRO=micro_partials is not None, HAS_FACTOR=factor is not None)
        super().accumulate_(*arguments)

    def measure_(
        self, partials: Tensor, acc: Tensor, table: Tensor, slots: Sequence[int], n_elems: Sequence[int]
    ) -> None:
        self._prepare("measure_kernel")
        self._start("")
        entries = [self._entry(0, n, 0, slot, self.plan.NO_GRAD, False) for slot, n in zip(slots, n_elems, strict=True)]
        least: Counter = Counter()
        for slot, n in zip(slots, n_elems, strict=True):
            least += traffic(n, is_aligned(acc[int(table[slot, OFFSET]) :]), [(4, "r")])
        self._sum(acc, partials, None, table, slots, ["r"] * len(slots), 1.0, None, entries, least)

    def _sum(self, acc: Tensor, partials: Tensor, micro_partials: Tensor | None, table: Tensor, *rest: Any) -> None:
        slots, access, _, factor, _, _ = rest
        for slot, each in zip(slots, access, strict=True):
            n_programs = n_chunks(int(table[slot, N_ELEMS]))
            # The size of the slot, and the factor. Then its offset and first chunk, and what is kept of statistics.
            loads, stores = 1 + (factor is not None), 0
            if each:
                loads, stores = loads + 2, 1
                if micro_partials is not None:
                    loads, stores = loads + ("r" in each), 2
            self._lookup_bytes += n_programs * 8 * (128 * loads + stores)
        super()._sum(acc, partials, micro_partials, table, *rest)

    def finalize_(self, *arguments: Any) -> None:
        self._n_chunks = arguments[4].numel()
        self._prepare("finalize_kernel", RULE=arguments[9], HAS_MICRO=arguments[5] is not None)
        super().finalize_(*arguments)

    def adam_step_(self, *arguments: Any) -> None:
        self._prepare("adam_kernel")
        super().adam_step_(*arguments)

    def sgd_step_(self, *arguments: Any) -> None:
        self._prepare("sgd_kernel")
        super().sgd_step_(*arguments)

    def _step(self, kernel: str, extra_scalar: int, params: Sequence[Tensor], *rest: Any) -> None:
        control = rest[-2]
        self._skips = bool(flat(control)[layout.SKIPPED] != 0.0)
        scalars = 11 if extra_scalar == AMSGRAD_SCALAR else 7
        n_programs = sum(n_chunks(param.numel()) for param in params)
        # Whether to skip; the size and the offsets of the slot, and its scalars.
        self._lookup_bytes += n_programs * 128 * (8 + (0 if self._skips else 4 * 8 + 4 * scalars))
        super()._step(kernel, extra_scalar, params, *rest)


def _loads_to_find(ends: list[int], program: int) -> int:
    """Loads of ``chunks.find_chunk``."""
    low, high, loads = 0, len(ends) - 1, 0
    while low < high:
        middle = (low + high) // 2
        loads += 1
        low, high = (middle + 1, high) if ends[middle] <= program else (low, middle)
    return loads + 2 + (low > 0)
