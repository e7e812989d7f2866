"""Where each parameter lies in the flat buffers: pure arithmetic, no tensors.

The constants mirror ``csrc/layout.h``; ``tests/test_layout.py`` compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CHUNK = 32768
"""Elements of one chunk, the unit of work and of the norm's partial sums."""
LANES = 1024
"""Lanes of a sum of squares: element index (or chunk index) modulo LANES."""
ALIGNMENT = 64
"""Every slot starts at a multiple of this many elements: 256 bytes in fp32, so that a 16-byte access or a cache
line never spans two slots, whatever the parameters' sizes."""

SLOT_COLUMNS = ("offset_elems", "n_elems", "first_chunk", "group", "master_offset_elems", "extra_offset_elems")
"""Columns of ``table``: (n_slots, 6) int64."""
HYPER_COLUMNS = 8
"""Columns of ``hyper``: (n_groups, 8) float64; what they mean depends on the rule (``rules.py``)."""
SCALAR_COLUMNS = 12
"""Columns of ``scalars``: (n_slots, 12) float32; what they mean depends on the rule."""

NORM, FOUND_INF, CLIP_COEF, GRAD_MULTIPLIER, SUM_SQ, SKIPPED, MICRO_NORM, MICRO_SUM_SQ = range(8)
"""Entries of ``control``: (8,) float64."""
CONTROL_SIZE = 8

(
    WEIGHT,
    WEIGHT_SQ,
    LOSS_SCALE,
    INV_LOSS_SCALE,
    GROWTH_TRACKER,
    GROWTH_FACTOR,
    BACKOFF_FACTOR,
    GROWTH_INTERVAL,
    WINDOWS,
    SKIPPED_WINDOWS,
    CLIPPED_WINDOWS,
    DECAY,
    GRAD_SQ,
    NOISE,
    MEAN_WEIGHT,
    MICRO_WEIGHT,
) = range(16)
"""Entries of ``window``: (16,) float64; ``csrc/layout.h`` says what each is."""
WINDOW_SIZE = 16

RULE_ADAM, RULE_SGD, RULE_NONE = 0, 1, 2


def n_chunks(n_elems: int) -> int:
    """Chunks of a slot of ``n_elems`` elements; 0 for an empty one."""
    return -(-n_elems // CHUNK)


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, with empty dimensions counted as 1 as torch does."""
    result = [1] * len(sizes)
    for i in range(len(sizes) - 2, -1, -1):
        result[i] = result[i + 1] * max(sizes[i + 1], 1)
    return tuple(result)


def is_contiguous(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether ``strides`` are row-major; dimensions of size 1, and empty tensors, do not matter."""
    if 0 in sizes:
        return True
    wanted = contiguous_strides(sizes)
    return all(n == 1 or have == want for n, have, want in zip(sizes, strides, wanted, strict=True))


def dense_strides(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides of a slot for a parameter of ``sizes`` and ``strides``.

    A parameter that fills its memory without gaps or overlaps, in whatever order (channels-last, transposed), keeps
    its strides, so that a gradient in the same order is one run of memory. Any other gets contiguous ones.
    """
    if 0 in sizes:
        return contiguous_strides(sizes)
    expected = 1
    for i in sorted((i for i, n in enumerate(sizes) if n != 1), key=lambda i: strides[i]):
        if strides[i] != expected:
            return contiguous_strides(sizes)
        expected *= sizes[i]
    return tuple(strides)


@dataclass(slots=True)
class Placement:
    """One parameter's place: a row of ``table`` but for its group, which the optimizer may change."""

    offset_elems: int
    n_elems: int
    first_chunk: int
    master_offset_elems: int = -1
    extra_offset_elems: int = -1

    def row(self, group: int) -> list[int]:
        """The row of ``table``."""
        return [
            self.offset_elems,
            self.n_elems,
            self.first_chunk,
            group,
            self.master_offset_elems,
            self.extra_offset_elems,
        ]


def _aligned(n_elems: int) -> int:
    return -(-n_elems // ALIGNMENT) * ALIGNMENT


class Layout:
    """Hands out places in the flat buffers of one device. Places never move; buffers only grow."""

    def __init__(self) -> None:
        self.placements: list[Placement] = []
        self.n_elems = 0
        self.n_chunks = 0
        self.n_master_elems = 0
        self.n_extra_elems = 0

    def add(self, n_elems: int) -> Placement:
        """A new slot of ``n_elems`` elements, behind all others."""
        placement = Placement(self.n_elems, n_elems, self.n_chunks)
        self.placements.append(placement)
        self.n_elems += _aligned(n_elems)
        self.n_chunks += n_chunks(n_elems)
        return placement

    def add_master(self, placement: Placement) -> None:
        """Room for the slot's fp32 master; nothing where it has one."""
        if placement.master_offset_elems < 0:
            placement.master_offset_elems = self.n_master_elems
            self.n_master_elems += _aligned(placement.n_elems)

    def add_extra(self, placement: Placement) -> None:
        """Room for the state that only some groups have (momentum, AMSGrad maxima); nothing where it has it."""
        if placement.extra_offset_elems < 0:
            placement.extra_offset_elems = self.n_extra_elems
            self.n_extra_elems += _aligned(placement.n_elems)
