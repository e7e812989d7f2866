"""DistributedDataParallel beside the optimizer: one of the two must reduce, and DDP cannot reduce fp32 sums.

Seen on torch 2.13: DDP's reducer looks at ``.grad`` in a hook of the parameter's AccumulateGrad node. It finds the fp32
accumulator, or nothing where the bucket still waits, and fails with "Expected BFloat16, got Float", or takes a fp32
model's sum over several micro-batches for one gradient. With ``require_backward_grad_sync`` off it does nothing.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


class ReducersOut:
    """Keeps DDP's reducers out, and notices those that are in.

    Args:
        holds: whether a parameter is the optimizer's.
    """

    def __init__(self, holds: Callable[[Tensor], bool]) -> None:
        self._holds = holds
        self._kept_out: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._found: list[weakref.ref[Any]] | None = None

    def add(self, ddp: Any, n_ranks: int) -> None:
        """From now on ``ddp`` never reduces. See ``FusedAccumOptimizer.reduce_instead_of``."""
        from torch.nn.parallel import DistributedDataParallel

        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(
                f"reduce_instead_of: ddp is a {type(ddp).__name__}; accepted: a DistributedDataParallel (what "
                "accelerator.prepare returned, not the model that it was given)"
            )
        theirs = dist.get_world_size(ddp.process_group)
        if theirs != n_ranks:
            raise ValueError(
                f"reduce_instead_of: ddp reduces over {theirs} ranks and this optimizer over {n_ranks}; accepted: the "
                "same. Give FusedAccumOptimizer the process_group of ddp"
            )
        if ddp in self._kept_out:
            return
        self._kept_out.add(ddp)
        ddp.require_backward_grad_sync = False
        ddp.register_forward_pre_hook(_keep_out)

    def check(self) -> None:
        """A backward begins.

        Raises:
            RuntimeError: a DDP of the optimizer's parameters is about to reduce them.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return
        if self._found is None:
            self._found = [weakref.ref(ddp) for ddp in self._find()]
        for reference in self._found:
            ddp = reference()
            if ddp is not None and ddp.require_backward_grad_sync:
                raise RuntimeError(
                    "a DistributedDataParallel reduces the gradients that this FusedAccumOptimizer accumulates, and "
                    "cannot take its fp32 sums; accepted: optimizer.reduce_instead_of(ddp) once, after both exist, "
                    "with FusedAccumOptimizer(..., process_group=ddp.process_group)"
                )

    def _find(self) -> list[Any]:
        """The DDP modules of this process that hold one of our parameters. Torch keeps no list of them."""
        from torch.nn.parallel import DistributedDataParallel

        # By type: isinstance would ask every object for its __class__, and lazy modules load themselves when asked.
        modules = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
        return [module for module in modules if any(self._holds(param) for param in module.parameters())]


def _keep_out(ddp: Any, args: Any) -> None:
    """Before each forward: some loops (Accelerate's ``trigger_sync_in_backward``) switch the reducer on again."""
    ddp.require_backward_grad_sync = False
