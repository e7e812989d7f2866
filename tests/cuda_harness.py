"""The CUDA kernels with no GPU: the PTX that nvcc compiled, executed by the interpreter in ``ptxrun``.

``PtxBackend`` has the ops of ``fusedaccum.ops`` on CPU tensors, so that whatever runs on another backend runs on it.
Its device memory holds only what an op may read, at the host's alignment. After each op it asserts that exactly what
the op has to write was written, and that the bytes moved are the least possible, in the widest accesses possible.
"""

from __future__ import annotations

import functools
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from cuda_bytes import is_aligned, rescanned_elems, traffic, widths
from cuda_memory import Piece, Region, flat
from ptxrun import Stats, cuda
from torch import Tensor

from fusedaccum import layout
from fusedaccum.layout import CHUNK, LANES, n_chunks

ARCHS = (80, 90, 100)
SOURCES = Path(__file__).parent.parent / "csrc" / "cuda"
# As setup.py compiles the kernels; test_cuda_ptx_accumulate.py compares.
FLAGS = ("-std=c++17", "-O3", "--fmad=false")

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
OFFSET, N_ELEMS, FIRST_CHUNK, _, MASTER, EXTRA = range(len(layout.SLOT_COLUMNS))
AMSGRAD_SCALAR, MOMENTUM_SCALAR, FIRST_SCALAR = 10, 2, 6
SCALAR_BYTES = {"adam_kernel": 44, "sgd_kernel": 28}  # AdamScalars and SgdScalars without their unused ends
_LINE_BYTES = 64


@functools.cache
def load(source: Path, arch: int) -> cuda.Program:
    """The program of a .cu file."""
    return cuda.load(source, arch, FLAGS)


@functools.cache
def checked(program: cuda.Program, kernel: str) -> str:
    """The kernel's entry, after checking that the interpreter knows all of it and ptxas may fuse nothing in it."""
    entry = program.find(kernel)
    assert program.module.unsupported(entry) == [], f"{kernel}: the interpreter lacks an instruction"
    assert program.module.contractible(entry) == [], f"{kernel}: a product and a sum that ptxas may fuse"
    return entry


def rotated(cases: Iterable[object]) -> list[tuple[object, int]]:
    """Each case with one of the architectures in turn."""
    return [(case, ARCHS[i % len(ARCHS)]) for i, case in enumerate(cases)]


@dataclass
class Launched:
    """One launch: ``capacity`` entries in its parameter block."""

    kernel: str
    capacity: int
    n_blocks: int
    stats: Stats


class PtxBackend:
    """The ops of ``fusedaccum.ops``, run by the interpreter.

    Args:
        plan: ``plan_module``: csrc/cuda/plan.h.
        far_elems: what the tables' offsets are raised by, and the buffers' addresses lowered by.
        before_chunks: the tensors pose as the ends of larger ones, with so many chunks before; only the blocks of the
            ends run. As with far_elems, the results are the same unless an index was cut to 32 bits on the way.
        backwards: the blocks run from the last to the first.
        sources: the folder of the .cu files.

    Attributes: ``launches``, of all ops so far.
    """

    def __init__(
        self,
        plan: ModuleType,
        arch: int,
        *,
        far_elems: int = 0,
        before_chunks: int = 0,
        backwards: bool = False,
        sources: Path = SOURCES,
    ) -> None:
        self.plan, self.arch, self.sources = plan, arch, sources
        self.far_elems, self.before_chunks, self.backwards = far_elems, before_chunks, backwards
        self.launches: list[Launched] = []
        self._regions: list[Region] = []

    @property
    def _back_elems(self) -> int:
        return self.far_elems + self.before_chunks * CHUNK

    def _start(self, file: str) -> None:
        self._regions = []
        self._program = load(self.sources / file, self.arch)
        self._program.reset()

    def _region(self, name: str, n_bytes: int, misalign: int, pieces: Iterable[Piece]) -> int:
        self._regions.append(Region(self._program, name, n_bytes, misalign, pieces))
        return self._regions[-1].address

    def _buffer(self, name: str, whole: Tensor | None, parts: Sequence[tuple[int, int, str]] = (), far: int = 0) -> int:
        """The address of a flat buffer, of which ``parts`` (start, elements, "r", "w", "rw" or "rw?") are used."""
        if whole is None:
            return 0
        size = whole.element_size()
        parted = [(start, flat(whole)[start : start + n], a) for start, n, a in parts]
        pieces = [Piece(start * size, part, "r" in a, "w" in a, "?" not in a) for start, part, a in parted]
        address = self._region(name, whole.numel() * size, whole.data_ptr() % _LINE_BYTES, pieces)
        return (address - far * size) % 2**64

    def _rows(self, name: str, whole: Tensor, slots: Iterable[int], access: str) -> int:
        n = whole.shape[-1] if whole.dim() > 1 else 1
        return self._buffer(name, whole, [(s * n, n, access) for s in slots])

    def _table(self, table: Tensor, slots: Iterable[int]) -> int:
        rows = table.clone()
        rows[:, N_ELEMS] += self.before_chunks * CHUNK
        for column in (OFFSET, FIRST_CHUNK, MASTER, EXTRA):
            rows[:, column] += (rows[:, column] >= 0) * self.far_elems
        return self._rows("table", rows, slots, "r")

    def _pool(self, name: str, tensors: Sequence[Tensor], access: Sequence[str]) -> list[int]:
        """The addresses of tensors that lie in one region, with gaps."""
        pieces, end = [], 0
        for tensor, each in zip(tensors, access, strict=True):
            start = -(-end // _LINE_BYTES) * _LINE_BYTES + tensor.data_ptr() % _LINE_BYTES
            pieces.append(Piece(start, tensor, "r" in each, "w" in each))
            end = start + pieces[-1].n_bytes + _LINE_BYTES
        address = self._region(name, end, 0, pieces)
        return [address + piece.start for piece in pieces]

    def _entry(self, address: int, n: int, item: int, slot: int, dtype: int, first: bool) -> tuple:
        """What the plan takes for one tensor."""
        before = self.before_chunks * CHUNK if n else 0
        return (address - before * item) % 2**64 if address else 0, n + before, slot, dtype, first

    def _launch(
        self, kernel: str, launches: Sequence[tuple[int, int, bytes]], entries: Sequence[tuple], variant: str = ""
    ) -> Counter:
        """All launches of an op: bytes by access width. ``variant``: the template's arguments after the capacity."""
        moved: Counter = Counter()
        chunks = [n_chunks(n) for _, n, *_ in entries if n]
        for n_blocks, capacity, block in launches:
            order: list[int] = []
            end = 0
            while end < n_blocks:
                begin, end = end, end + chunks.pop(0)
                order += range(begin + self.before_chunks, end)
            self._run(f"{kernel}<{capacity}{variant}>", capacity, n_blocks, self.plan.THREADS, block, order)
            moved.update(widths(self.launches[-1].stats))
        self._copy_back()
        return moved

    def _run(self, name: str, capacity: int, grid: int, threads: int, block: bytes, order: list[int]) -> None:
        if self.backwards:
            order = order[::-1]
        entry = checked(self._program, name)
        stats = self._program.launch(entry, grid, threads, bytes(block), check_races="all", block_order=order)
        self.launches.append(Launched(name, capacity, grid, stats))
        assert not stats.approx, f"{name}: approximate instructions {dict(stats.approx)}"

    def _copy_back(self) -> None:
        for region in self._regions:
            region.copy_back()

    def _check_bytes(self, moved: Counter, least: Counter, overhead_bytes: int, optional_bytes: int = 0) -> None:
        """No byte more than ``least`` and what each block moves beside it; no narrower access.

        ``optional_bytes`` of 4-byte reads are up to the compiler.
        """
        most = least.total() + overhead_bytes
        total = moved.total()
        assert most - optional_bytes <= total <= most, f"{dict(moved)}, not {dict(least)} + {overhead_bytes}"
        spared = Counter({("r", 4): most - total})
        narrow = {key: (moved[key], n) for key, n in (least - spared).items() if moved[key] < n}
        assert not narrow, f"fewer bytes than expected in accesses of that width: {narrow}"

    def accumulate_(
        self,
        acc: Tensor,
        partials: Tensor,
        micro_partials: Tensor | None,
        table: Tensor,
        grads: Sequence[Tensor],
        slots: Sequence[int],
        first: Sequence[int],
        scale: float,
        factor: Tensor | None,
    ) -> None:
        # A scale of zero writes zeros where they are the first, and nothing elsewhere; no gradient is read.
        adds = bool(np.float32(scale * (1.0 if factor is None else float(factor[0]))) != 0)
        accs = [("w" if new else "rw" if adds else "") for new in first]
        self._start("accumulate.cu")
        addresses = self._pool("grads", grads, ["r" if adds else ""] * len(grads))
        codes = [DTYPE_CODES[grad.dtype] for grad in grads]
        entries = [
            self._entry(address, grad.numel(), grad.element_size(), slot, code, bool(new))
            for address, grad, slot, code, new in zip(addresses, grads, slots, codes, first, strict=True)
        ]
        least: Counter = Counter()
        for grad, slot, access in zip(grads, slots, accs, strict=True):
            here = acc[int(table[slot, OFFSET]) :]
            aligned = adds and is_aligned(grad, here)
            least += traffic(grad.numel(), aligned, [(grad.element_size(), "r" if adds else ""), (4, access)])
        self._sum(acc, partials, micro_partials, table, slots, accs, scale, factor, entries, least)

    def measure_(
        self, partials: Tensor, acc: Tensor, table: Tensor, slots: Sequence[int], n_elems: Sequence[int]
    ) -> None:
        self._start("accumulate.cu")
        entries = [self._entry(0, n, 0, slot, self.plan.NO_GRAD, False) for slot, n in zip(slots, n_elems, strict=True)]
        least = traffic(sum(n_elems), False, [(4, "r")])
        self._sum(acc, partials, None, table, slots, ["r"] * len(slots), 1.0, None, entries, least)

    def _sum(
        self,
        acc: Tensor,
        partials: Tensor,
        micro_partials: Tensor | None,
        table: Tensor,
        slots: Sequence[int],
        access: Sequence[str],
        scale: float,
        factor: Tensor | None,
        entries: list[tuple],
        least: Counter,
    ) -> None:
        rows = table[list(slots)].tolist()
        parts = [(row[OFFSET], row[N_ELEMS], each) for row, each in zip(rows, access, strict=True)]
        chunks = [(row[FIRST_CHUNK], n_chunks(row[N_ELEMS])) for row in rows]
        sums = [(*chunk, "w" if each else "") for chunk, each in zip(chunks, access, strict=True)]
        # A first add stores to the micro-batches' sums, a later one adds to them.
        micro_sums = [(*chunk, each) for chunk, each in zip(chunks, access, strict=True)]
        addresses = (
            self._buffer("acc", acc, parts, self._back_elems),
            self._buffer("partials", partials, sums, self.far_elems + self.before_chunks),
            self._buffer("micro_partials", micro_partials, micro_sums, self.far_elems + self.before_chunks),
            self._table(table, slots),
            self._buffer("factor", factor, [(0, 1, "r")]),
        )
        has_micro = micro_partials is not None
        launches = self.plan.accumulate(*addresses, scale, entries)
        moved = self._launch("accumulate_kernel", launches, entries, f", {str(has_micro).lower()}")
        again = sum(rescanned_elems(flat(acc)[start : start + n]) for start, n, each in parts if each)
        least["r", 4] += 4 * again
        # A block: each thread reads offset and size of the slot (16 bytes) and the factor (8), one its first chunk (8);
        # one partial (8), and what was added to it before.
        n_blocks, n_idle = sum(n for _, n in chunks), sum(n for _, n, each in sums if not each)
        per_thread = 16 + 8 * (factor is not None)
        overhead = n_blocks * self.plan.THREADS * per_thread + (n_blocks - n_idle) * (8 + 8)
        overhead += sum(n * 8 * len(each) for _, n, each in micro_sums) * has_micro
        # Blocks that return at once may do so before they look at the slot.
        self._check_bytes(moved, least, overhead, n_idle * self.plan.THREADS * 16)

    def finalize_(
        self,
        control: Tensor,
        scalars: Tensor,
        steps: Tensor,
        window: Tensor,
        partials: Tensor,
        micro_partials: Tensor | None,
        table: Tensor,
        hyper: Tensor,
        active: Tensor,
        rule: int,
        numerator: float,
        weight: float,
        weight_sq: float,
        max_norm: float,
        extra: Tensor | None,
        advance: bool,
    ) -> None:
        slots = flat(active).nonzero().flatten().tolist()
        rows = table.tolist()
        sums = [(rows[s][FIRST_CHUNK], n_chunks(rows[s][N_ELEMS])) for s in slots]
        total = sum(float(partials[at : at + n].sum()) for at, n in sums)
        total += 0.0 if extra is None else float(extra[0])
        goes = np.isfinite(total) and weight + float(window[layout.WEIGHT]) > 0
        ages = slots if advance and goes and rule != layout.RULE_NONE else []
        # Which entries change is for the results to show; without advancing, two are looked at and none is written.
        entries = [(0, layout.WINDOW_SIZE, "rw?")] if advance else [(layout.WEIGHT, 2, "r")]
        self._start("finalize.cu")
        groups = sorted({rows[s][3] for s in ages})
        pointers = (
            self._buffer("control", control, [(0, layout.CONTROL_SIZE, "w")]),
            self._rows("scalars", scalars, ages, "w"),
            self._rows("steps", steps, ages, "rw"),
            self._buffer("window", window, entries),
            self._buffer("partials", partials, [(at, n, "r") for at, n in sums]),
            self._buffer("micro_partials", micro_partials, [(at, n, "r") for at, n in sums]),
            self._rows("table", table, range(len(rows)), "r"),
            self._rows("hyper", hyper, groups, "r"),
            self._rows("active", active, range(len(rows)), "r"),
            self._buffer("extra", extra, [(0, 2, "r")]),
        )
        # FinalizeArgs of csrc/cuda/kernels.h.
        numbers = (numerator, weight, weight_sq, max_norm)
        args = struct.pack(
            "<10Q2q4d3q", *pointers, len(rows), len(hyper), *numbers, rule, advance, micro_partials is not None
        )
        self._run("finalize_kernel", 0, 1, LANES, args, [0])
        self._copy_back()

    def adam_step_(
        self,
        params: Sequence[Tensor],
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        max_exp_avg_sq: Tensor | None,
        master: Tensor | None,
        *shared: object,
    ) -> None:
        self._step("adam_kernel", AMSGRAD_SCALAR, params, (exp_avg, exp_avg_sq), max_exp_avg_sq, master, *shared)

    def sgd_step_(
        self, params: Sequence[Tensor], momentum_buffer: Tensor | None, master: Tensor | None, *shared: object
    ) -> None:
        self._step("sgd_kernel", MOMENTUM_SCALAR, params, (None, None), momentum_buffer, master, *shared)

    def _step(
        self,
        kernel: str,
        extra_scalar: int,
        params: Sequence[Tensor],
        moments: tuple[Tensor | None, Tensor | None],
        extra: Tensor | None,
        master: Tensor | None,
        acc: Tensor,
        table: Tensor,
        scalars: Tensor,
        control: Tensor,
        slots: Sequence[int],
    ) -> None:
        self._start("step.cu")
        skipped = bool(control[layout.SKIPPED] != 0.0)
        used = [] if skipped else list(slots)
        rows = [table[s].tolist() for s in used]
        has_master = [
            row[MASTER] >= 0 and param.dtype != torch.float32 for row, param in zip(rows, params, strict=False)
        ]
        has_extra = [row[EXTRA] >= 0 and bool(scalars[s, extra_scalar]) for s, row in zip(used, rows, strict=True)]
        param_access = ["" if skipped else "rw"] * len(params)
        for i, yes in enumerate(has_master):
            param_access[i] = "w" if yes else "rw"

        def parts(column: int, access: str, which: Sequence[bool] | None = None) -> Iterator[tuple[int, int, str]]:
            for i, row in enumerate(rows):
                if which is None or which[i]:
                    yield row[column], row[N_ELEMS], access

        def buffer(name: str, whole: Tensor | None, *args: object) -> int:
            return self._buffer(name, whole, list(parts(*args)), self._back_elems)

        pointers = (
            buffer("exp_avg", moments[0], OFFSET, "rw"),
            buffer("exp_avg_sq", moments[1], OFFSET, "rw"),
            buffer("extra", extra, EXTRA, "rw", has_extra),
            buffer("master", master, MASTER, "rw", has_master),
            buffer("acc", acc, OFFSET, "r"),
            self._table(table, used),
            self._rows("scalars", scalars, used, "r"),
            self._buffer("control", control, [(layout.SKIPPED, 1, "r")]),
        )
        addresses = self._pool("params", params, param_access)
        entries = [
            self._entry(address, param.numel(), param.element_size(), slot, DTYPE_CODES[param.dtype], False)
            for address, param, slot in zip(addresses, params, slots, strict=True)
        ]
        moved = self._launch(kernel, self.plan.step(*pointers, entries), entries)
        least: Counter = Counter()
        for i, row in enumerate(rows):
            arrays = [(4, "r"), (params[i].element_size(), param_access[i])]
            arrays += [(4, "rw")] * (2 * (moments[0] is not None) + has_extra[i] + has_master[i])
            here = [acc[row[OFFSET] :], *(m[row[OFFSET] :] for m in moments if m is not None), params[i]]
            here += [master[row[MASTER] :]] if row[MASTER] >= 0 else []
            here += [extra[row[EXTRA] :]] if row[EXTRA] >= 0 else []
            least += traffic(row[N_ELEMS], is_aligned(*here), arrays)
        # A block: each thread reads whether to skip (8 bytes), one the size and offsets of a slot (32) and the scalars.
        per_block = self.plan.THREADS * 8 + (0 if skipped else 32 + SCALAR_BYTES[kernel])
        n_blocks = sum(n_chunks(param.numel()) for param in params)
        # The first momentum buffer is the gradient: the old one is read or not, as suits the compiler.
        unread = [
            kernel == "sgd_kernel" and extra and bool(scalars[s, FIRST_SCALAR])
            for s, extra in zip(used, has_extra, strict=True)
        ]
        optional = sum(4 * row[N_ELEMS] for row, may in zip(rows, unread, strict=True) if may)
        self._check_bytes(moved, least, n_blocks * per_block, optional)
