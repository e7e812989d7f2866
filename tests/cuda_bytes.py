"""The least bytes that a kernel has to move, and those that it moved: by direction and width of access."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np
from ptxrun import Stats
from torch import Tensor

from fusedaccum.layout import CHUNK, LANES


def is_aligned(*tensors: Tensor | None) -> bool:
    """As the kernels decide it. The device has the host's alignment."""
    return all(t is None or t.data_ptr() % 16 == 0 for t in tensors)


def traffic(n: int, aligned: bool, arrays: Iterable[tuple[int, str]]) -> Counter:
    """{(r or w, access width): bytes} for ``n`` elements of ``arrays`` (element size; "r", "w" or "rw").

    Full rows of 1024 go 16 bytes at a time if every array is aligned, the rest by elements.
    """
    wide = n // LANES * LANES if aligned else 0
    result: Counter = Counter()
    for item, access in arrays:
        for way in access:
            result[way, 16] += wide * item
            result[way, item] += (n - wide) * item
    return result


_SINGLE = re.compile(r"st\.global\.f32\s+\[(?P<base>%rd\d+)(?:\+(?P<offset>\d+))?\]")
_VECTOR = re.compile(r"st\.global\.v4\.f32\s+\[(?P<base>%rd\d+)\+(?:16|32|48)\]")


def widths(stats: Stats) -> Counter:
    """{(r or w, access width): bytes} of a launch, as ptxas makes of it.

    In PTX for sm_80 and sm_90, nvcc 13.0 writes one of two neighbouring float4 stores as four of 4 bytes. ptxas joins
    them again (24 STG.E.128 in the machine code of accumulate.cu for sm_80, sm_90 and sm_100 alike), which it may only
    because the other one says that the address is a multiple of 16. That condition is checked here.
    """
    result = Counter(stats.widths())
    rows = [row for _, row in sorted(stats.per_line.items())]
    aligned = {(m["base"], row["lanes"]) for row in rows if (m := _VECTOR.search(row["text"]))}
    for i in range(len(rows) - 3):
        four = rows[i : i + 4]
        found = [_SINGLE.search(row["text"]) for row in four]
        if not all(found) or [int(m["offset"] or 0) for m in found] != [0, 4, 8, 12]:
            continue
        lines = [row["line"] - four[0]["line"] for row in four]
        same = {(m["base"], row["lanes"]) for m, row in zip(found, four, strict=True)}
        if lines == [0, 1, 2, 3] and len(same) == 1 and same <= aligned:
            n_bytes = sum(row["bytes"] for row in four)
            result["w", 4] -= n_bytes
            result["w", 16] += n_bytes
    return result


def rescanned_elems(acc: Tensor) -> int:
    """Elements in chunks whose squares overflow in fp32 (or are not finite): they are read once more."""
    values, result = acc.numpy(), 0
    for at in range(0, values.size, CHUNK):
        chunk = values[at : at + CHUNK]
        rows = np.zeros(-(-chunk.size // LANES) * LANES, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            rows[: chunk.size] = chunk * chunk
            if not np.isfinite(rows.reshape(-1, LANES).sum(0, dtype=np.float32)).all():
                result += chunk.size
    return result
