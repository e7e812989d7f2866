"""FusedAccumOptimizer: the window's state machine around a torch optimizer.

A gradient's way: autograd -> ``capture`` -> ``registry`` -> ``arena`` -> a backend's op. At the boundary:
``step`` -> ``boundary`` -> ``arena.finalize`` -> ``arena.step`` -> parameters.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from . import checkpoint, layout, resume, stats, validate
from .arena import Arena
from .backends import choose
from .boundary import Boundary
from .bucket import DEFAULT_BUCKET_BYTES
from .capture import Capture
from .ddp import ReducersOut
from .distributed import Agreement, Ranks, check_group, check_overlap, check_shard_states, describe
from .microbatch import MicroBatches
from .parallel import ParallelOptimizer
from .reduction import Reduction
from .registry import Registry
from .rules import check_optimizer, rule_for
from .scaling import LossScale, mark
from .sharded_boundary import ShardedBoundary
from .window import Window


class FusedAccumOptimizer(ParallelOptimizer):
    """A torch optimizer whose gradients accumulate in fp32 and whose boundary is one fused pass.

    Every parameter's ``.grad`` becomes a view into one flat fp32 buffer for each device, whatever the parameter's
    dtype; ``None`` means that nothing is accumulated, as in torch. ``param_groups`` and ``state`` are the wrapped
    optimizer's own, so that schedulers and checkpoints see one optimizer.

    Memory, bytes a parameter element: 4 accumulator, 4 master (16-bit parameters), 8 Adam's averages (4 momentum),
    4 AMSGrad. No more gradients than ``bucket_bytes`` and one parameter's are alive during a backward.

    ``Adam``, ``AdamW`` and ``SGD`` are fused. Any other ``torch.optim`` optimizer runs its own ``step`` on fp32 masters
    with the fp32 gradients; its boundary then waits for the device once, to know whether to skip.

    Args:
        optimizer: the torch optimizer to wrap. Its parameters: float32, float16 or bfloat16.
        accumulation_steps: None: the loop decides, every ``step()`` is a boundary and the loss is scaled by the user.
            K: call ``step()`` after every micro-batch; each K-th is a boundary, each gradient is added times 1/K, and
            ``zero_grad()`` inside a window does nothing.
        max_grad_norm: clip the norm of all gradients together to this at each boundary, as
            ``torch.nn.utils.clip_grad_norm_`` does.
        master_weights: "auto" or True: float16 and bfloat16 parameters get an fp32 master at the first boundary.
            False: they are updated in fp32 and rounded to nearest each time.
        backend: "auto", "native", "cuda", "triton" or "reference". One asked for by name never falls back.
        bucket_bytes: gradient bytes that wait before they are added in one call, and bytes of the accumulator in one
            collective.
        loss_scale: for ``backward`` and ``scale``. A number: fixed. "dynamic" or a ``LossScale``: grows and backs off
            on the device, as ``torch.amp.GradScaler``'s does.
        nonfinite: what an inf or NaN in a micro-batch's gradients costs. "skip_window": the window, at no cost.
            "skip_micro_batch": that micro-batch, whose weight leaves the denominator; its gradients all wait until it
            is over, and are read once more to be judged. "raise": the boundary waits for the device, raises
            FloatingPointError naming the parameters, and leaves everything as it was.
        statistics: keep each micro-batch's own squared norm, from which ``stats()`` tells the gradient noise scale; no
            pass more, and no time from memory; from a cache up to a quarter of an add (README, "How fast").
        process_group: whose ranks each have a whole copy of the model and micro-batches of their own. Gradients,
            weights, norm and found_inf are those of all ranks together, by one reduction a window.
        reduce_dtype: of that reduction; float32 or bfloat16 (half the bytes; each rank's sum is rounded to 8 bits).
        overlap: reduce during the last micro-batch's backward; see ``last_micro_batch``.
        shard_states: each of the N ranks keeps states and masters of its own part of every parameter, steps that, and
            sends it to the others (ZeRO-1): 12/N bytes instead of 12 for bf16 and AdamW, and no more traffic where the
            backend has a reduce-scatter of its own (gloo's is an all-reduce).
            ``.grad`` is None once the sum is made: after ``step()`` and after ``clip_grad_norm_``. States are DTensors:
            save them with ``torch.distributed.checkpoint``, which brings them to any number of ranks, or get them whole
            on all ranks by its ``get_optimizer_state_dict(..., full_state_dict=True)``.

    Raises:
        TypeError, ValueError: an argument or parameter that is not accepted, or not the same on all ranks; nothing has
            been changed then.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        accumulation_steps: int | None = None,
        max_grad_norm: float | None = None,
        master_weights: bool | str = "auto",
        backend: str = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        loss_scale: float | str | LossScale | None = None,
        nonfinite: str = "skip_window",
        statistics: bool = False,
        process_group: torch.distributed.ProcessGroup | None = None,
        reduce_dtype: torch.dtype = torch.float32,
        overlap: bool = False,
        shard_states: bool = False,
    ) -> None:
        check_group(process_group, reduce_dtype)
        ranks = None if process_group is None else Ranks(process_group)
        options: dict[str, Any] = {
            "accumulation_steps": accumulation_steps,
            "max_grad_norm": max_grad_norm,
            "bucket_bytes": bucket_bytes,
            "master_weights": master_weights,
            "nonfinite": nonfinite,
            "statistics": statistics,
            "reduce_dtype": reduce_dtype,
            "overlap": overlap,
            "shard_states": shard_states,
        }
        with Agreement(ranks) as agreement:
            validate.check_arguments(optimizer, accumulation_steps, max_grad_norm, master_weights, bucket_bytes)
            validate.check_nonfinite(nonfinite)
            scaling = LossScale.of(loss_scale)
            check_shard_states(shard_states, process_group, optimizer)
            if process_group is None:
                validate.check_process_group(param for group in optimizer.param_groups for param in group["params"])
            check_overlap(overlap, process_group, nonfinite)
            check_optimizer(optimizer)
            for device in {param.device for group in optimizer.param_groups for param in group["params"]}:
                choose(device, backend)  # refused here rather than in the first backward
            if ranks is not None:
                agreement.description = describe(optimizer, {**options, "loss_scale": scaling})
        super().__init__(optimizer)
        self.max_grad_norm = max_grad_norm
        self._options = {**options, "backend": backend, "loss_scale": scaling}
        self._has_group = process_group is not None
        judges = nonfinite == "skip_micro_batch"
        place = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self._window = Window(accumulation_steps, judges, place)
        this = weakref.ref(self)

        def sink(*what: Any) -> None:
            optimizer = this()
            if optimizer is not None:
                optimizer._micro_batches.add(*what)

        def judge(grads: list[Tensor]) -> Tensor:
            optimizer = this()
            assert optimizer is not None  # it owns the capture that calls
            return optimizer._micro_batches.judge(grads)

        self._capture = Capture(sink, bucket_bytes, judge=judge if judges else None)
        rule = rule_for(optimizer)

        def new_arena(device: torch.device) -> Arena:
            arena = Arena(device, choose(device, backend), rule, statistics)
            arena.window.copy_(stats.new_window(scaling))
            return arena

        self._registry = Registry(optimizer, rule, self._capture, new_arena)
        self._micro_batches = MicroBatches(self._window, self._registry, self._capture)
        parties = optimizer, rule, self._registry, master_weights is not False
        self._boundary = Boundary(*parties)
        if ranks is not None and ranks.size > 1 and shard_states:
            self._boundary = ShardedBoundary(*parties, ranks, bucket_bytes)
        self._reducers_out = ReducersOut(self._registry.slots.__contains__)
        self._capture.on_backward = self._reducers_out.check
        self._reduction = None
        if ranks is not None and ranks.size > 1:
            self._reduction = self._micro_batches.reduction = Reduction(
                ranks, optimizer, self._window, self._registry, self._boundary, options
            )
        self._registry.check_new_groups()
        self._registry.adopt_new_groups(self._window.scale)
        # Runs at garbage collection and at interpreter exit, and holds the window only.
        self._at_end = weakref.finalize(self, self._window.warn_if_open)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the new parameters join an open window.

        Raises:
            ValueError: a parameter or option that is not accepted; the groups are as before then.
        """
        self.inner.add_param_group(param_group)
        try:
            self._registry.check_new_groups()
        except (TypeError, ValueError):
            self.inner.param_groups.pop()
            raise
        self._registry.adopt_new_groups(self._window.scale)

    # Accumulate ----------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, weight: float | Tensor | None = None, **kwargs: Any) -> None:
        """``loss.backward()`` of one micro-batch, scaled by ``loss_scale``, whose gradients count ``weight``.

        With weights the step is that of one large batch: sum(w g) / sum(w), where ``loss`` is a mean over w items.
        Without ``accumulation_steps`` the loss is then not to be divided by the number of micro-batches. Until the
        boundary ``.grad`` holds sum(w g), over K with ``accumulation_steps``: clip with ``max_grad_norm`` or this
        class's ``clip_grad_norm_``, which divide first. A window of total weight 0 is no step: see ``skipped``.

        Args:
            loss: scalar.
            weight: items of the micro-batch (samples, valid tokens): a number or 0-dim tensor, at least 0. A tensor on
                a device is never waited for; should it be negative or not finite, its window is skipped. 0 adds
                nothing, even where the loss is NaN. Default: 1 each with ``accumulation_steps``; else the user's loss
                is taken as it is.
            kwargs: of ``Tensor.backward``.

        Raises:
            TypeError, ValueError: a weight that is not accepted.
            RuntimeError: a weight after a backward without one, in the same micro-batch.
        """
        if weight is None:
            with self._capture.hidden():
                self.scale(loss).backward(**kwargs)
            return
        # What has sharded the parameters takes the mean over the ranks before a gradient gets here.
        in_loss = self._registry.has_sharded()
        with self._micro_batches.scope(weight, in_loss), self._capture.hidden():
            self.scale(loss * weight if in_loss else loss).backward(**kwargs)

    def micro_batch(self, weight: float | Tensor = 1) -> AbstractContextManager[None]:
        """Every backward inside of this context counts ``weight``; see ``backward``."""
        return self._micro_batches.scope(weight)

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` times the loss scale; the gradients of a backward from the result are divided as they are added.

        Without a ``loss_scale`` the loss itself.
        """
        if self._options["loss_scale"] is None:
            return loss
        arena = self._registry.any_arena()
        scale = arena.window[layout.LOSS_SCALE].to(device=loss.device, dtype=torch.float32)
        return mark(loss * scale, arena.window[layout.INV_LOSS_SCALE : layout.INV_LOSS_SCALE + 1])

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Ends what is accumulated, as in torch; inside a window of ``accumulation_steps`` it does nothing."""
        self._capture.flush()
        if self._window.position == 0:
            self._window.take_clip(None)  # it was asked for the gradients that end here
            self._micro_batches.drop(keeps_gradients=not set_to_none)
            # Before the registry looks: a converted parameter that holds a gradient is refused, one that does not is
            # followed.
            super().zero_grad(set_to_none)
        self._registry.refresh(self._window.scale)
        self._rest()

    # Boundary ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One micro-batch is done: the boundary, or with ``accumulation_steps`` each K-th call.

        A window with a non-finite gradient changes nothing but ``found_inf``, and its step does not count.

        Args:
            closure: computes the loss again and returns it; runs with grad enabled, once.

        Returns:
            What the closure returned, else None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._capture.flush()
        if self._reduction is not None:
            self._reduction.check_alive()
        self._registry.refresh(self._window.scale)
        if self._only_makes_state():
            self._window.advance()
            self._window.close()  # a window of its own
            self._run_boundary()
            return loss
        if self._window.would_end():
            self._prepare_boundary()
        if self._window.advance():
            self._run_boundary()
        self._rest()
        return loss

    @torch.no_grad()
    def flush(self) -> bool:
        """Steps a short last window: the gradients are divided by the micro-batches it really had.

        With a ``process_group`` all ranks call it, and it takes part in the windows of those that have more
        micro-batches until they call it too.

        Returns:
            Whether there was an open window, on any rank. Call it at the end of every epoch.

        Raises:
            RuntimeError: without ``accumulation_steps`` there is no window to end; every ``step()`` is a boundary.
        """
        validate.check_has_window(self._window.accumulation_steps, "flush")
        self._capture.flush()
        self._registry.refresh(self._window.scale)
        if self._reduction is not None:
            return self._flush_with_others()
        if self._window.position > 0:
            self._prepare_boundary()
        if not self._window.close():
            return False
        self._run_boundary()
        return True

    @torch.no_grad()
    def reset(self) -> None:
        """Drops an open window and its gradients, with a warning that counts the micro-batches lost."""
        self._capture.flush()
        self._micro_batches.check_droppable()
        self._window.warn_if_open()
        self._window.close()
        self._window.take_clip(None)
        super().zero_grad()
        self._micro_batches.drop()

    # State ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's format, with masters as ``state[i]["master_param"]``, and under "fusedaccum" the open
        window (accumulators, which parameters have one, position, weights), loss scale and statistics.

        The tensors are the live ones, as in torch. With ``shard_states`` they are DTensors, of which this rank has its
        part.
        """
        self._capture.flush()
        if self._reduction is not None:
            self._reduction.check_own()
        held = checkpoint.without_unused_momentum(
            super().state_dict(), self.param_groups, self._registry, self._boundary
        )
        held = {**held, resume.KEY: resume.save(self.param_groups, self._registry, self._window)}
        self._rest()
        return held

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], *, open_window: str = "restore") -> None:
        """Loads a ``state_dict`` of this class or of the plain torch optimizer. fp32 state stays fp32.

        Args:
            open_window: of a checkpoint that was saved inside a window. "restore": goes on there, bit by bit. "drop":
                begins a new window.

        Raises:
            ValueError: groups or shapes that do not match, or an open window of other ``accumulation_steps``; the state
                is as before then.
        """
        self._capture.flush()
        resume.check(state_dict, self.param_groups, self._window, open_window)
        if self._reduction is not None:
            self._reduction.drop()
        checkpoint.load(self, self._registry, self._boundary, state_dict)
        resume.load(self.param_groups, self._registry, self._window, state_dict, open_window == "restore")
        self._rest()

    def sync_masters(self) -> None:
        """Takes the parameters' present values into their masters.

        Needed only after writes that leave no trace in torch's version counters (``p.data.copy_(...)``, numpy): others
        are noticed by ``step``.
        """
        with torch.no_grad():
            self._boundary.sync_masters()

    def remove(self) -> torch.optim.Optimizer:
        """Gives the model back to plain torch and returns the wrapped optimizer.

        Gradients and state stay, in the parameters' dtypes; masters go. The wrapper cannot be used afterwards. With
        ``shard_states`` all ranks call it, and each has the whole state then.
        """
        self._window.warn_if_open()
        self._window.close()
        self._registry.remove()
        self._at_end.detach()
        return self.inner

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles as the wrapped optimizer and the options; the copy wraps its own parameters anew."""
        if self._window.position > 0:
            warnings.warn(self._window.describe("is not part of the copy"), stacklevel=2)
        if self._has_group:
            raise TypeError("the optimizer has a process_group; accepted: copies of optimizers that have none")
        steps = self._window.accumulation_steps
        options = {**self._options, "accumulation_steps": steps, "max_grad_norm": self.max_grad_norm}
        return _rebuild, (self.inner, options, self._registry.any_arena().window.clone())

    def __repr__(self) -> str:
        steps = self._window.accumulation_steps
        return f"{type(self).__name__}(accumulation_steps={steps}, max_grad_norm={self.max_grad_norm}, {self.inner!r})"


def _rebuild(inner: torch.optim.Optimizer, options: dict[str, Any], window: Tensor) -> FusedAccumOptimizer:
    optimizer = FusedAccumOptimizer(inner, **options)
    # Loss scale, counts and averages; the open window stays behind.
    arena = optimizer._registry.any_arena()
    arena.window.copy_(window)
    arena.drop_weights()
    return optimizer
