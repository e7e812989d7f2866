"""Device memory for the interpreter that holds what a kernel may read, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from ptxrun import cuda
from torch import Tensor


def flat(tensor: Tensor) -> Tensor:
    """The elements in memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


@dataclass
class Piece:
    """Host memory that a kernel may read, has to write, or both, ``start`` bytes into its region.

    ``must``: whether it has to, or only may write it.
    """

    start: int
    host: Tensor
    reads: bool
    writes: bool
    must: bool = True

    @property
    def n_bytes(self) -> int:
        return self.host.numel() * self.host.element_size()

    @property
    def bytes(self) -> Tensor:
        return flat(self.host).view(torch.uint8)


class Region:
    """Device memory where only what may be read has a value: reading anything else is the interpreter's error."""

    def __init__(self, program: cuda.Program, name: str, n_bytes: int, misalign: int, pieces: Iterable[Piece]) -> None:
        self.program, self.name, self.n_bytes = program, name, n_bytes
        self.pieces = [piece for piece in pieces if piece.n_bytes and (piece.reads or piece.writes)]
        writable = any(piece.writes for piece in self.pieces)
        poison = np.zeros(n_bytes, np.uint8)
        self.address = program.region(name, poison, misalign=misalign, writable=writable, init=False).address
        for piece in self.pieces:
            if piece.reads:
                program.memory.write(self.address + piece.start, piece.bytes.numpy())

    def copy_back(self) -> None:
        """Takes over what was written, after checking that it is what had to be."""
        if not self.n_bytes:
            return
        allowed, expected = np.zeros((2, self.n_bytes), bool)
        for piece in self.pieces:
            here = slice(piece.start, piece.start + piece.n_bytes)
            allowed[here], expected[here] = True, piece.must
        written = self.program.memory.written(self.address, self.n_bytes)
        for what, where in (("a gap was written", written & ~allowed), ("never written", expected & ~written)):
            at = np.flatnonzero(where)
            assert not at.size, f"{self.name}: {what}: {at.size} bytes, the first are {at[:4].tolist()}"
        data = torch.from_numpy(self.program.memory.read(self.address, np.uint8, self.n_bytes))
        for piece in self.pieces:
            if piece.writes:
                piece.bytes.copy_(data[piece.start : piece.start + piece.n_bytes])
