"""A torch Optimizer around another one, whose param_groups and state it shares."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch


class WrappingOptimizer(torch.optim.Optimizer):
    """Passes ``isinstance``, and has hooks of its own; ``param_groups`` and ``state`` are the wrapped optimizer's very
    objects, so that schedulers and checkpoints see one optimizer.

    Args:
        optimizer: the one to wrap, kept as ``inner``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer
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
