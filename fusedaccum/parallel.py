"""What a ``FusedAccumOptimizer`` does at the end of a window, alone or with the other ranks of a process group."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import validate
from .capture import Capture
from .ddp import ReducersOut
from .microbatch import MicroBatches
from .reduction import FLUSH, STEP, Reduction
from .reports import ReportingOptimizer
from .window import Totals

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


class ParallelOptimizer(ReportingOptimizer):
    """The part of the optimizer that knows of ranks. Without a ``process_group`` it asks nobody."""

    max_grad_norm: float | None
    _capture: Capture
    _micro_batches: MicroBatches
    _reduction: Reduction | None
    _reducers_out: ReducersOut

    def last_micro_batch(self) -> AbstractContextManager[None]:
        """Says that the backward inside is the last before ``step()``, so that with ``overlap=True`` its gradients go
        out while it runs. For loops without ``accumulation_steps``; where that is given, the optimizer knows.

        Calling it on some ranks only costs the overlap, nothing else.
        """
        if self._reduction is None:
            return nullcontext()
        return self._reduction.last_micro_batch(self._capture.flush)

    def reduce_instead_of(self, ddp: DistributedDataParallel) -> None:
        """Has this optimizer reduce the gradients of a DistributedDataParallel model, once a window and in fp32, and
        keeps DDP's own reducer out, which cannot take fp32 sums for 16-bit parameters.

        Call it once, after both exist (with Accelerate or Trainer: after ``prepare``). ``no_sync`` and the loop's own
        settings then change nothing. Buffers (BatchNorm's statistics) stay each rank's own, as inside of ``no_sync``:
        a broadcast in the forward would wait for ranks that have no micro-batch.

        Args:
            ddp: the model; its gradients are this optimizer's.

        Raises:
            TypeError: not a DistributedDataParallel.
            ValueError: this optimizer reduces nothing, or over another number of ranks.
        """
        size = 1 if self._reduction is None else self._reduction.ranks.size
        self._reducers_out.add(ddp, size)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clips at the coming boundary, and returns the norm now, from the partials: no pass over the gradients.

        Unlike ``torch.nn.utils.clip_grad_norm_``, which works too at the price of one pass, it leaves ``.grad`` as it
        is. A call that is not followed by a boundary has no effect. Overrides ``max_grad_norm`` for one boundary.

        Args:
            max_norm: 0 or more. With a ``process_group`` all ranks call this before ``step()``, or none does: it is
                where the sum over the ranks is made then.
            norm_type: 2.
            error_if_nonfinite: wait for the device and raise RuntimeError if the norm is not finite.

        Returns:
            0-dim float32 tensor, the norm before clipping.
        """
        validate.check_clip(max_norm, norm_type)
        self._capture.flush()
        self._registry.refresh(self._window.scale)
        self._window.request_clip(float(max_norm))
        totals = self._sum_over_ranks()
        norm = self._boundary.norm(self._window.totals_so_far() if totals is None else totals)
        self._rest()
        if error_if_nonfinite and not torch.isfinite(norm):
            self._window.take_clip(None)
            raise RuntimeError(
                f"clip_grad_norm_: the norm of the gradients is {norm.item()}; accepted: finite. "
                "With error_if_nonfinite=False the step is skipped"
            )
        return norm

    def _rest(self) -> None:
        """Inside a window the next thing is a backward, which must not find the ``.grad`` of sharded parameters."""
        if self._window.is_between_micro_batches:
            self._capture.hide()

    # Boundaries -----------------------------------------------------------------------------------------------------

    def _only_makes_state(self) -> bool:
        """Whether ``torch.distributed.checkpoint`` makes the state exist before it reads or loads it: it steps once
        with zeros for gradients and learning rates. Taken for a micro-batch, that would shift all windows by one."""
        if self._window.position > 0 or self.inner.state:
            return False
        if self._window.accumulation_steps is None and self._reduction is None:
            return False  # each step is a window of its own, and nobody else need take part
        for group in self.param_groups:
            lr = group.get("lr", 1.0)
            if (isinstance(lr, Tensor) and lr.device.type != "cpu") or lr != 0:
                return False
        slots = self._registry.slots.items()
        return any(param.grad is not None and param.grad is not slot.view for param, slot in slots)

    def _prepare_boundary(self) -> None:
        """What may refuse the coming boundary, while the window is as it was; with others, their sums."""
        if self._reduction is None:
            self._refuse_nonfinite()
            self._warn_of_written_sums()
        elif self._reduction.ended is None:
            self._warn_of_written_sums()
            self._reduction.end_window(STEP, self._window.coming_clip(self.max_grad_norm), self._given_found_inf)

    def _refuse_nonfinite(self) -> None:
        if self._options["nonfinite"] != "raise" or torch.isfinite(self._boundary.norm((1.0, 1.0, 1.0))):
            return
        names = self._boundary.nonfinite_names()
        raise FloatingPointError(
            f"the accumulated gradient of {', '.join(names[:3]) or 'a parameter, on another rank,'}"
            f"{' and others' if len(names) > 3 else ''} holds an inf or NaN; accepted with nonfinite='raise': finite "
            "gradients. Nothing was stepped, and the window is as it was: reset() drops it"
        )

    def _warn_of_written_sums(self) -> None:
        if self._window.open.has_weights and self._boundary.was_written():
            warnings.warn(
                "fusedaccum: .grad was written to in a window of weighted micro-batches, where it holds the weighted "
                "sum, not the mean. A clip by torch.nn.utils.clip_grad_norm_ is wrong there; use max_grad_norm or "
                "optimizer.clip_grad_norm_",
                stacklevel=5,
            )

    def _run_boundary(self) -> None:
        """Steps. The window has been closed, or advanced to its end."""
        max_norm = self._window.take_clip(self.max_grad_norm)
        totals, found_inf, is_spent = self._window.totals(), self._given_found_inf, self._window.open.has_weights
        ended = None if self._reduction is None else self._reduction.take()
        if ended is not None:
            totals, found_inf, is_spent = ended.totals, ended.found_inf, True
        with nullcontext() if self._reduction is None else self._reduction.noting_loss():
            self._boundary.run(totals, max_norm, self.grad_scale, found_inf)
        self._window.start_afresh(is_spent)

    def _sum_over_ranks(self) -> Totals | None:
        """Where a boundary of several ranks is next and somebody asks for its norm: sums now, and returns the totals.
        None where there is nothing to sum."""
        if self._reduction is None or not self._window.would_end():
            return None
        self._prepare_boundary()
        ended = self._reduction.ended
        assert ended is not None  # a step, unlike a flush, always ends a window
        return ended.totals

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # Asked by torch.amp.GradScaler.step, which would look for infs in this rank's own gradients, and call step() on
        # some ranks only.
        if self._reduction is not None and not self._is_asked_by_ours:
            raise RuntimeError(
                "torch.amp.GradScaler.step was given an optimizer with a process_group; accepted: "
                "fusedaccum.GradScaler or loss_scale='dynamic', which see the gradients of all ranks"
            )
        return super()._step_supports_amp_scaling

    def _flush_with_others(self) -> bool:
        """``flush``: takes part in the windows of ranks that have more micro-batches, until all have come here."""
        assert self._reduction is not None
        stepped = False
        while True:
            max_norm = self._window.coming_clip(self.max_grad_norm)
            ended = self._reduction.end_window(FLUSH, max_norm, self._given_found_inf)
            self._window.close()
            if ended is None:
                break
            all_flush = ended.all_flush
            self._run_boundary()
            stepped = True
            if all_flush:
                break
            torch.optim.Optimizer.zero_grad(self)
            self._micro_batches.drop()
        self._window.stepped = stepped
        return stepped
