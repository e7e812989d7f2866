"""The ranks of a process group: what they tell each other, and that they train the same model.

Everything goes through ``torch.distributed``; there is no transport here. Each function that talks is called by all
ranks, in the same order, or fails on all of them within the group's timeout.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import validate
from .rules import rule_for

GATHER = "the exchange of the stepped parameters"
NOTHING_STEPPED = "Nothing was stepped, and the open window is dropped"
STEPPED_IN_PART = "This rank has stepped its own shard, and may not have all parameters of the others"
_BITS = {2: torch.int16, 4: torch.int32}


class RankLostError(RuntimeError):
    """A collective failed: a rank has died, hangs, or has made other calls than this one."""


class Ranks:
    """A process group, seen from one of its ranks.

    Args:
        group: the group; this process is one of its ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Held by torch until destroy_process_group. Held here too, it would live on until the interpreter is gone, of
        # which gloo's threads know nothing (seen on torch 2.13: "terminate called without an active exception").
        self._group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        # Where it can, what the host must know travels between hosts, so that nobody waits for a device.
        self._speaks_cpu = "cpu:" in dist.get_backend_config(group)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group.

        Raises:
            ValueError: it has been destroyed.
        """
        group = self._group()
        if group is None:
            raise ValueError(
                "process_group has been destroyed; accepted: one that lives as long as this optimizer steps"
            )
        return group

    def gather(self, values: Sequence[float], device: torch.device) -> list[list[float]]:
        """Everybody's ``values``, as many on each rank, in the order of the ranks. Exact: they travel as float64."""
        mine = torch.tensor(values, dtype=torch.float64, device="cpu" if self._speaks_cpu else device)
        everybodys = list(mine.new_empty(self.size, len(values)).unbind())
        with self.naming_failures("the exchange before a boundary"):
            dist.all_gather(everybodys, mine, group=self.group)
        rows: list[list[float]] = torch.stack(everybodys).tolist()
        return rows

    def gather_objects(self, mine: Any) -> list[Any]:
        """Everybody's object, by pickle: for what is not said at every boundary."""
        everybodys: list[Any] = [None] * self.size
        with self.naming_failures("the comparison of the ranks"):
            dist.all_gather_object(everybodys, mine, group=self.group)
        return everybodys

    def sum_(self, tensor: Tensor) -> None:
        """Makes ``tensor`` the sum over the ranks, in place."""
        with self.naming_failures("a sum over the ranks"):
            dist.all_reduce(tensor, group=self.group)

    def start_sum_(self, tensor: Tensor) -> dist.Work:
        """As ``sum_``, without waiting."""
        with self.naming_failures("a sum over the ranks"):
            work: dist.Work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return work

    def start_scatter(self, into: Tensor, everybodys: Tensor) -> dist.Work:
        """Makes ``into``, (m,), the sum over the ranks of the row of ``everybodys``, (size, m), that is this rank's,
        without waiting."""
        # torch 2.13 has given it a new name and warns of the old one.
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        with self.naming_failures("a sum over the ranks"):
            work: dist.Work = scatter(into, everybodys.view(-1), group=self.group, async_op=True)
        return work

    def start_gather(self, into: Tensor, mine: Tensor) -> dist.Work:
        """Makes row r of ``into``, (size, m), what rank r has as ``mine``, (m,), without waiting."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self.naming_failures(GATHER, STEPPED_IN_PART):
            # As bytes: not all transports know all dtypes.
            into, mine = into.view(-1).view(torch.uint8), mine.view(torch.uint8)
            work: dist.Work = gather(into, mine, group=self.group, async_op=True)
        return work

    def take_first_(self, tensor: Tensor) -> None:
        """Makes ``tensor`` what rank 0 of the group has, in place."""
        with self.naming_failures("a sum over the ranks"):
            dist.broadcast(tensor, group=self.group, group_src=0)

    def union(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """For each place, whether any rank has its flag set."""
        mine = torch.tensor(flags, dtype=torch.uint8, device="cpu" if self._speaks_cpu else device)
        with self.naming_failures("the exchange before a boundary"):
            dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self.group)
        return [flag != 0 for flag in mine.tolist()]

    @contextmanager
    def naming_failures(self, what: str, so: str = NOTHING_STEPPED) -> Iterator[None]:
        """Raises RankLostError for whatever torch raises inside."""
        try:
            yield
        except RuntimeError as error:  # what gloo, NCCL and the store raise
            raise RankLostError(
                f"rank {self.rank} of {self.size}: {what} failed. Another rank has died, is later than the group's "
                f"timeout, or has called step() and flush() another number of times. {so}; start again from "
                f"a checkpoint. torch says: {str(error).splitlines()[0]}"
            ) from error


def check_group(group: Any, reduce_dtype: Any) -> None:
    """Raises TypeError or ValueError for a ``process_group`` or ``reduce_dtype`` that is not accepted."""
    if reduce_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"reduce_dtype is {reduce_dtype!r}; accepted: torch.float32, torch.bfloat16")
    if group is None:
        return
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"process_group is a {type(group).__name__}; accepted: None, or a torch.distributed.ProcessGroup that this "
            "process is a rank of, such as torch.distributed.group.WORLD after init_process_group"
        )
    if dist.get_rank(group) < 0:
        raise ValueError("process_group does not have this process among its ranks; accepted: one that does")


def check_shard_states(shard_states: Any, group: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for a ``shard_states`` that is not accepted."""
    if not isinstance(shard_states, bool):
        raise ValueError(f"shard_states is {shard_states!r}; accepted: True, False")
    if shard_states and group is None:
        raise ValueError("shard_states is True without a process_group; accepted: False, there is nobody to share with")
    if shard_states and rule_for(optimizer) is None:
        raise ValueError(
            f"shard_states is True with {type(optimizer).__name__}, whose own step takes whole parameters; accepted: "
            "torch.optim's Adam, AdamW and SGD, which are fused"
        )


def check_overlap(overlap: Any, group: Any, nonfinite: str) -> None:
    """Raises ValueError for an ``overlap`` that is not accepted."""
    if not isinstance(overlap, bool):
        raise ValueError(f"overlap is {overlap!r}; accepted: True, False")
    if overlap and group is None:
        raise ValueError("overlap is True without a process_group; accepted: False, there is nothing to reduce")
    if overlap and nonfinite == "raise":
        raise ValueError(
            "overlap is True with nonfinite='raise'; accepted: False. What has gone out to the other ranks cannot be "
            "as it was"
        )


class Agreement:
    """The checks of a constructor, on all ranks or on none.

    ``with Agreement(ranks) as agreement:`` runs them; a rank whose checks raise tells the others, so that nobody waits
    for it, and each then raises. ``agreement.description``, set inside, must be the same on all ranks. Without ranks it
    does nothing.

    Raises:
        RuntimeError: another rank's checks have raised.
        ValueError: the descriptions differ, saying in what.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        self.description: dict[str, Any] = {}

    def __enter__(self) -> Agreement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ranks is None or not isinstance(error, (Exception, type(None))):
            return
        mine = self.description if error is None else f"{type(error).__name__}: {error}"
        everybodys = self._ranks.gather_objects(mine)
        if error is not None:
            return
        for rank, theirs in enumerate(everybodys):
            if isinstance(theirs, str):
                raise RuntimeError(f"rank {rank} refused its FusedAccumOptimizer: {theirs}")
        difference = first_difference(everybodys)
        if difference is not None:
            raise ValueError(f"{difference}; accepted: the same on all ranks of process_group")


def first_difference(descriptions: Sequence[dict[str, Any]]) -> str | None:
    """A sentence on the first entry in which a rank differs from rank 0; None where all agree."""
    first = descriptions[0]
    for rank, other in enumerate(descriptions[1:], 1):
        for key in [*first, *(key for key in other if key not in first)]:
            here, there = first.get(key, "missing"), other.get(key, "missing")
            if repr(here) != repr(there):
                return f"{key} is {here} on rank 0 and {there} on rank {rank}"
    return None


def settings_of(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All that the groups say which a host can read without waiting, but for the parameters."""
    settings = {}
    for g, group in enumerate(groups):
        settings[f"the number of parameters of param_groups[{g}]"] = len(group["params"])
        for key, value in group.items():
            if isinstance(value, Tensor):
                value = value.tolist() if value.device.type == "cpu" else "on a device"
            if key not in ("params", "param_names"):
                settings[f"param_groups[{g}][{key!r}]"] = value
    return settings


def checksum(what: Any) -> float:
    """A number that two ranks have in common exactly if (but for one case in 2^32) ``what`` prints the same."""
    return float(zlib.crc32(repr(what).encode()))


def describe(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> dict[str, Any]:
    """All that must be the same on the ranks of a group: options, groups, parameters and their values.

    Raises:
        TypeError: a parameter that is sharded already.
    """
    described: dict[str, Any] = {"the optimizer": type(optimizer).__name__, **options}
    names: list[str] = []
    sums: list[Tensor] = []
    for g, group in enumerate(optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            name = validate.param_name(g, group, i)
            if is_traceable_wrapper_subclass(param):
                raise TypeError(
                    f"{name} is a {type(param).__name__}; accepted with process_group: plain tensors, of which every "
                    "rank holds the whole. Sharded parameters are reduced by what has sharded them"
                )
            fate = "trainable" if param.requires_grad else "frozen"
            described[name] = f"{tuple(param.shape)} {validate.dtype_name(param.dtype)}, {fate}"
            names.append(name)
            bits = param.detach().reshape(-1).view(_BITS.get(param.element_size(), torch.uint8))
            sums.append(bits.sum(dtype=torch.int64))  # without a temporary as large as the parameter
    described.update(settings_of(optimizer.param_groups))
    for name, value in zip(names, torch.stack([each.cpu() for each in sums]).tolist() if sums else (), strict=True):
        described[f"{name}, by the checksum of its values,"] = value
    return described
