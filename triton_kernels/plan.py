"""From lists of tensors to one launch: its grid, and the entries that tell a program what it works on. No Triton."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from fusedaccum.layout import CHUNK
from fusedaccum.op_checks import check_dtype
from fusedaccum.validate import is_dense

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""``Dtype`` of csrc/layout.h."""
NO_GRAD = 3
MAX_PROGRAMS = 2**31 - 1

Place = tuple[int, int, int]
"""Address, elements and dtype code of a tensor."""


class Plan:
    """One launch over ``tensors`` that lie in ``slots``; empty ones are left out.

    Attributes:
        words: ``entries`` of chunks.py, (3, n_entries) int64: addresses, ends in chunks, and
            ``slot << 3 | dtype << 1 | first``.
        n_programs: one for each chunk.
    """

    __slots__ = ("n_entries", "n_programs", "words")

    def __init__(self, tensors: Sequence[Place], slots: Sequence[int], first: Sequence[int] | None = None) -> None:
        addresses, ends, what = [], [], []
        end = 0
        for i, (address, n_elems, code) in enumerate(tensors):
            if n_elems:
                end += -(-n_elems // CHUNK)
                addresses.append(address)
                ends.append(end)
                what.append(slots[i] << 3 | code << 1 | (1 if first is not None and first[i] else 0))
        if end > MAX_PROGRAMS:
            raise RuntimeError(f"{end} chunks in one call; accepted: {MAX_PROGRAMS}")
        self.n_entries, self.n_programs = len(addresses), end
        self.words = array("q", addresses + ends + what)


def check_slots(op: str, slots: Sequence[int], n_slots: int) -> None:
    """Each in the table, and once."""
    if slots and min(slots) >= 0 and max(slots) < n_slots and len(set(slots)) == len(slots):
        return
    seen: set[int] = set()
    for i, slot in enumerate(slots):
        if not 0 <= slot < n_slots:
            raise RuntimeError(f"{op}: slots[{i}] is {slot}; accepted: 0 to {n_slots - 1}")
        if slot in seen:
            raise RuntimeError(f"{op}: slots[{i}] is {slot} again; accepted: each slot once")
        seen.add(slot)


def checked_tensors(
    op: str, name: str, tensors: Sequence[Tensor], slots: Sequence[int], n_slots: int, device: torch.device
) -> list[Place]:
    """What a plan takes of ``tensors``, after checking all that the host can see."""
    check_slots(op, slots, n_slots)
    places = []
    for i, tensor in enumerate(tensors):
        code = DTYPE_CODES.get(tensor.dtype)
        if code is None:
            check_dtype(op, name, i, tensor)
        if tensor.device != device:
            raise RuntimeError(f"{op}: {name}[{i}] is on {tensor.device}; accepted: {device}, the device of acc")
        n_elems = tensor.numel()
        if n_elems and not is_dense(tensor):
            raise RuntimeError(
                f"{op}: {name}[{i}] has gaps or overlaps in memory; accepted: dense, in the order of its slot"
            )
        places.append((tensor.data_ptr() if n_elems else 0, n_elems, code))
    return places
