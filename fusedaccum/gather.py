"""Every rank's stepped part of the parameters, to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .distributed import GATHER, STEPPED_IN_PART, Ranks
from .zero import Part, Run, cut_runs, width_of

N_ON_THE_WAY = 2
"""Matrices that are on their way at the same time, one to be filled while the other travels."""


class _OnTheWay(NamedTuple):
    runs: list[Run]
    work: dist.Work
    mine: Tensor
    """Must live until ``work`` is done."""
    everybodys: Tensor
    """Row r will be what rank r has of ``runs``."""


def gather_(ranks: Ranks, parts: Sequence[Part], n_bytes: int) -> None:
    """Makes the parameters of ``parts``, of one device, whole: each rank's part of them is what that rank has.

    Args:
        ranks: who has the parts; all of them call this with parts of the same parameters, in the same order.
        parts: of any dtypes. Those that are whole on each rank stay as they are.
        n_bytes: of the copies that travel, all together.
    """
    by_dtype: dict[torch.dtype, list[Part]] = {}
    for part in parts:
        if part.dim is not None and part.whole.n_elems:
            by_dtype.setdefault(part.dtype, []).append(part)
    with torch.no_grad():
        for dtype, same in by_dtype.items():
            n_columns = max(n_bytes // (N_ON_THE_WAY * ranks.size * dtype.itemsize), 1)
            on_the_way: list[_OnTheWay] = []
            for runs in cut_runs(same, n_columns):
                if len(on_the_way) == N_ON_THE_WAY:
                    _receive(ranks, on_the_way.pop(0))
                on_the_way.append(_send(ranks, runs))
            for sent in on_the_way:
                _receive(ranks, sent)


def _send(ranks: Ranks, runs: list[Run]) -> _OnTheWay:
    first = runs[0].part
    everybodys = torch.empty((ranks.size, width_of(runs)), dtype=first.dtype, device=first.device)
    mine = torch.empty_like(everybodys[0])
    into, out_of = [], []
    for run in runs:
        own = run.part.own_of(run.part.flat())[run.start : run.own_stop]
        into.append(run.columns_of(mine)[: own.numel()])
        out_of.append(own)
    torch._foreach_copy_(into, out_of)
    return _OnTheWay(runs, ranks.start_gather(everybodys, mine), mine, everybodys)


def _receive(ranks: Ranks, come: _OnTheWay) -> None:
    with ranks.naming_failures(GATHER, STEPPED_IN_PART):
        come.work.wait()
    into, out_of = [], []
    for run in come.runs:
        for values, sent in run.part.pairs(run.part.flat(), run.columns_of(come.everybodys), run.start, run.stop):
            into.append(values)
            out_of.append(sent)
    torch._foreach_copy_(into, out_of)
