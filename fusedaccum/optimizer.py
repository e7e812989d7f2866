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
from .capture import Capture
from .microbatch import MicroBatches
from .registry import Registry
from .reports import ReportingOptimizer
from .rules import check_optimizer, rule_for
from .scaling import LossScale, mark
from .window import Window

DEFAULT_BUCKET_BYTES = 32 * 2**20


class FusedAccumOptimizer(ReportingOptimizer):
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
        bucket_bytes: gradient bytes that wait before they are added in one call.
        loss_scale: for ``backward`` and ``scale``. A number: fixed. "dynamic" or a ``LossScale``: grows and backs off
            on the device, as ``torch.amp.GradScaler``'s does.
        nonfinite: what an inf or NaN in a micro-batch's gradients costs. "skip_window": the window, at no cost.
            "skip_micro_batch": that micro-batch, whose weight leaves the denominator; its gradients all wait until it
            is over, and are read once more to be judged. "raise": the boundary waits for the device, raises
            FloatingPointError naming the parameters, and leaves everything as it was.
        statistics: keep each micro-batch's own squared norm, from which ``stats()`` tells the gradient noise scale; no
            pass more, but up to about a tenth of each accumulate's time (README, "How fast").

    Raises:
        TypeError, ValueError: an argument or parameter that is not accepted; nothing has been changed then.
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
    ) -> None:
        validate.check_arguments(optimizer, accumulation_steps, max_grad_norm, master_weights, bucket_bytes)
        validate.check_nonfinite(nonfinite)
        scaling = LossScale.of(loss_scale)
        validate.check_process_group()
        check_optimizer(optimizer)
        for device in {param.device for group in optimizer.param_groups for param in group["params"]}:
            choose(device, backend)  # refused here rather than in the first backward
        super().__init__(optimizer)
        self.max_grad_norm = max_grad_norm
        self._options: dict[str, Any] = {
            "backend": backend,
            "bucket_bytes": bucket_bytes,
            "master_weights": master_weights,
            "loss_scale": scaling,
            "nonfinite": nonfinite,
            "statistics": statistics,
        }
        judges = nonfinite == "skip_micro_batch"
        self._window = Window(accumulation_steps, counts_on_device=judges)
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
        self._boundary = Boundary(optimizer, rule, self._registry, masters=master_weights is not False)
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
            self.scale(loss).backward(**kwargs)
            return
        with self._micro_batches.scope(weight):
            self.scale(loss).backward(**kwargs)

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
            # Before the registry looks: a converted parameter that holds a gradient is refused, one that does not is
            # followed.
            super().zero_grad(set_to_none)
            self._micro_batches.drop(keeps_gradients=not set_to_none)
        self._registry.refresh(self._window.scale)

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
        self._registry.refresh(self._window.scale)
        if self._only_makes_state():
            self._window.advance()
            self._window.close()  # a window of its own
            self._run_boundary()
            return loss
        if self._window.would_end():
            self._refuse_nonfinite()
        if self._window.advance():
            self._run_boundary()
        return loss

    def _only_makes_state(self) -> bool:
        """Whether ``torch.distributed.checkpoint`` makes the state exist before it reads or loads it: it steps once
        with zeros for gradients and learning rates. Taken for a micro-batch, that would shift all windows by one."""
        if self._window.accumulation_steps is None or self._window.position > 0 or self.inner.state:
            return False
        for group in self.param_groups:
            lr = group.get("lr", 1.0)
            if (isinstance(lr, Tensor) and lr.device.type != "cpu") or lr != 0:
                return False
        slots = self._registry.slots.items()
        return any(param.grad is not None and param.grad is not slot.view for param, slot in slots)

    @torch.no_grad()
    def flush(self) -> bool:
        """Steps a short last window: the gradients are divided by the micro-batches it really had.

        Returns:
            Whether there was an open window. Call it at the end of every epoch.

        Raises:
            RuntimeError: without ``accumulation_steps`` there is no window to end; every ``step()`` is a boundary.
        """
        validate.check_has_window(self._window.accumulation_steps, "flush")
        self._capture.flush()
        self._registry.refresh(self._window.scale)
        if self._window.position > 0:
            self._refuse_nonfinite()
        if not self._window.close():
            return False
        self._run_boundary()
        return True

    def _refuse_nonfinite(self) -> None:
        if self._options["nonfinite"] != "raise" or torch.isfinite(self._boundary.norm((1.0, 1.0, 1.0))):
            return
        names = self._boundary.nonfinite_names()
        raise FloatingPointError(
            f"the accumulated gradient of {', '.join(names[:3])}{' and others' if len(names) > 3 else ''} holds an inf "
            "or NaN; accepted with nonfinite='raise': finite gradients. Nothing was stepped, and the window is as it "
            "was: reset() drops it"
        )

    def _run_boundary(self) -> None:
        max_norm = self._window.take_clip(self.max_grad_norm)
        if self._window.open.has_weights and self._boundary.was_written():
            warnings.warn(
                "fusedaccum: .grad was written to in a window of weighted micro-batches, where it holds the weighted "
                "sum, not the mean. A clip by torch.nn.utils.clip_grad_norm_ is wrong there; use max_grad_norm or "
                "optimizer.clip_grad_norm_",
                stacklevel=4,
            )
        self._boundary.run(self._window.totals(), max_norm, self.grad_scale, self._given_found_inf)
        self._window.start_afresh(is_spent=self._window.open.has_weights)

    @torch.no_grad()
    def reset(self) -> None:
        """Drops an open window and its gradients, with a warning that counts the micro-batches lost."""
        self._capture.flush()
        self._window.warn_if_open()
        self._window.close()
        self._window.take_clip(None)
        super().zero_grad()
        self._micro_batches.drop()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clips at the coming boundary, and returns the norm now, from the partials: no pass over the gradients.

        Unlike ``torch.nn.utils.clip_grad_norm_``, which works too at the price of one pass, it leaves ``.grad`` as it
        is. A call that is not followed by a boundary has no effect. Overrides ``max_grad_norm`` for one boundary.

        Args:
            max_norm: 0 or more.
            norm_type: 2.
            error_if_nonfinite: wait for the device and raise RuntimeError if the norm is not finite.

        Returns:
            0-dim float32 tensor, the norm before clipping.
        """
        validate.check_clip(max_norm, norm_type)
        self._capture.flush()
        self._registry.refresh(self._window.scale)
        norm = self._boundary.norm(self._window.totals_so_far())
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"clip_grad_norm_: the norm of the gradients is {norm.item()}; accepted: finite. "
                "With error_if_nonfinite=False the step is skipped"
            )
        self._window.request_clip(float(max_norm))
        return norm

    # State ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's format, with masters as ``state[i]["master_param"]``, and under "fusedaccum" the open
        window (accumulators, which parameters have one, position, weights), loss scale and statistics.

        The tensors are the live ones, as in torch.
        """
        self._capture.flush()
        held = checkpoint.without_unused_momentum(super().state_dict(), self.param_groups, self._registry)
        return {**held, resume.KEY: resume.save(self.param_groups, self._registry, self._window)}

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
        checkpoint.load(self, self._registry, self._boundary, state_dict)
        resume.load(self.param_groups, self._registry, self._window, state_dict, open_window == "restore")

    def sync_masters(self) -> None:
        """Takes the parameters' present values into their masters.

        Needed only after writes that leave no trace in torch's version counters (``p.data.copy_(...)``, numpy): others
        are noticed by ``step``.
        """
        with torch.no_grad():
            self._boundary.sync_masters()

    def remove(self) -> torch.optim.Optimizer:
        """Gives the model back to plain torch and returns the wrapped optimizer.

        Gradients and state stay, in the parameters' dtypes; masters go. The wrapper cannot be used afterwards.
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
        options = {
            **self._options,
            "accumulation_steps": self._window.accumulation_steps,
            "max_grad_norm": self.max_grad_norm,
        }
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
