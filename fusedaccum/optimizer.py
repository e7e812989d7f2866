"""FusedAccumOptimizer: the window's state machine around a torch optimizer.

A gradient's way: autograd -> ``capture`` -> ``registry`` -> ``arena`` -> a backend's op. At the boundary:
``step`` -> ``boundary`` -> ``arena.finalize`` -> ``arena.step`` -> parameters.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import checkpoint, layout, validate
from .arena import Arena
from .backends import choose
from .boundary import Boundary
from .capture import Capture
from .registry import Registry
from .rules import check_optimizer, rule_for
from .slot import Slot
from .window import Window

DEFAULT_BUCKET_BYTES = 32 * 2**20


class FusedAccumOptimizer(torch.optim.Optimizer):
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
        backend: "auto", "native" or "reference". One asked for by name never falls back.
        bucket_bytes: gradient bytes that wait before they are added in one call.

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
    ) -> None:
        validate.check_arguments(optimizer, accumulation_steps, max_grad_norm, master_weights, bucket_bytes)
        validate.check_process_group()
        check_optimizer(optimizer)
        for device in {param.device for group in optimizer.param_groups for param in group["params"]}:
            choose(device, backend)  # refused here rather than in the first backward
        self.inner = optimizer
        self.max_grad_norm = max_grad_norm
        self._options = {"backend": backend, "bucket_bytes": bucket_bytes, "master_weights": master_weights}
        self._window = Window(accumulation_steps)
        this = weakref.ref(self)

        def sink(slots: list[Slot], grads: list[Tensor], first: list[bool], odd: set[Slot]) -> None:
            optimizer = this()
            if optimizer is not None:
                optimizer._registry.accumulate(slots, grads, first, odd, optimizer._window.scale)

        self._capture = Capture(sink, bucket_bytes)
        rule = rule_for(optimizer)
        self._registry = Registry(
            optimizer, rule, self._capture, lambda device: Arena(device, choose(device, backend), rule)
        )
        self._boundary = Boundary(optimizer, rule, self._registry, masters=master_weights is not False)
        self._registry.check_new_groups()
        self._registry.adopt_new_groups(self._window.scale)
        self._init_as_torch_optimizer()
        # Runs at garbage collection and at interpreter exit, and holds the window only.
        self._at_end = weakref.finalize(self, self._window.warn_if_open)

    def _init_as_torch_optimizer(self) -> None:
        # What Optimizer.__init__ (torch 2.13) sets, but for state and param_groups, which are the inner ones.
        self.defaults = self.inner.defaults
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._optimizer_state_dict_pre_hooks = OrderedDict()
        self._optimizer_state_dict_post_hooks = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        self._optimizer_load_state_dict_post_hooks = OrderedDict()
        self._warned_capturable_if_run_uncaptured = True
        self._patch_step_function()

    # The wrapped optimizer's own objects ---------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's list of groups, the same object."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state; fused rules keep fp32 views there, under torch's names."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

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

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Ends what is accumulated, as in torch; inside a window of ``accumulation_steps`` it does nothing."""
        self._capture.flush()
        if self._window.position == 0:
            self._window.take_clip(None)  # it was asked for the gradients that end here
            # Before the registry looks: a converted parameter that holds a gradient is refused, one that does not is
            # followed.
            super().zero_grad(set_to_none)
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
        if self._window.advance():
            self._run_boundary(divisor_correction=1.0)
        return loss

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
        correction = self._window.close()
        if correction is None:
            return False
        self._run_boundary(correction)
        return True

    def _run_boundary(self, divisor_correction: float) -> None:
        max_norm = self._window.take_clip(self.max_grad_norm)
        self._boundary.run(divisor_correction, max_norm)

    @torch.no_grad()
    def reset(self) -> None:
        """Drops an open window and its gradients, with a warning that counts the micro-batches lost."""
        self._capture.flush()
        self._window.warn_if_open()
        self._window.close()
        self._window.take_clip(None)
        super().zero_grad()

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
        norm = self._boundary.norm()
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"clip_grad_norm_: the norm of the gradients is {norm.item()}; accepted: finite. "
                "With error_if_nonfinite=False the step is skipped"
            )
        self._window.request_clip(float(max_norm))
        return norm

    # What happened -------------------------------------------------------------------------------------------------

    @property
    def accumulation_steps(self) -> int | None:
        """Micro-batches a window; None: every ``step()`` is a boundary."""
        return self._window.accumulation_steps

    @property
    def stepped(self) -> bool:
        """Whether the last call of ``step`` or ``flush`` was a boundary."""
        return self._window.stepped

    @property
    def found_inf(self) -> Tensor:
        """0-dim float32 tensor on the device: 1 if the last boundary was skipped for a non-finite gradient, else 0."""
        return self._boundary.control_value(layout.FOUND_INF)

    @property
    def grad_norm(self) -> Tensor:
        """0-dim float32 tensor on the device: the norm of all gradients at the last boundary, before clipping."""
        return self._boundary.control_value(layout.NORM)

    # State ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's format, with masters as ``state[i]["master_param"]``.

        The tensors are the live ones, as in torch. An open window is not part of it; a warning says so.
        """
        self._capture.flush()
        self._window.warn_if_open("is not part of the state_dict")
        return checkpoint.without_unused_momentum(super().state_dict(), self.param_groups, self._registry)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a ``state_dict`` of this class or of the plain torch optimizer. fp32 state stays fp32.

        Raises:
            ValueError: groups or shapes that do not match; the state is as before then.
        """
        checkpoint.load(self, self._registry, self._boundary, state_dict)

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
        return _rebuild, (self.inner, options)

    def __repr__(self) -> str:
        steps = self._window.accumulation_steps
        return f"{type(self).__name__}(accumulation_steps={steps}, max_grad_norm={self.max_grad_norm}, {self.inner!r})"


def _rebuild(inner: torch.optim.Optimizer, options: dict[str, Any]) -> FusedAccumOptimizer:
    return FusedAccumOptimizer(inner, **options)
