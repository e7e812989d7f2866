"""From a torch optimizer and its param_groups to a fused update rule and its settings.

A rule says which ``torch.optim`` class it stands for, what it keeps for each parameter, what a param_group means as a
row of ``hyper``, and which op makes the update. CONTRIBUTING.md tells how to add one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .layout import RULE_ADAM, RULE_SGD

if TYPE_CHECKING:
    from .arena import Arena

ParamGroup = dict[str, Any]
HyperRow = tuple["float | Tensor", ...]


class Rule(ABC):
    """What the arena and the optimizer need to know of an update rule."""

    id: int
    """``finalize_``'s name for it."""
    state_names: tuple[str, ...]
    """fp32 states that every parameter has, by torch's names."""
    extra_name: str
    """The state that only some groups have."""
    counts_steps: bool
    """Whether torch keeps ``state["step"]``."""
    group_keys: frozenset[str]
    """The param_group options that the rule honours or that cannot change a result."""

    @abstractmethod
    def needs_extra(self, group: ParamGroup) -> bool:
        """Whether the group's parameters have the extra state."""

    @abstractmethod
    def hyper_row(self, group: ParamGroup) -> HyperRow:
        """The group's row of ``hyper``. A setting may be a tensor, on a device perhaps; nobody waits for it here."""

    @abstractmethod
    def step(self, arena: Arena, params: Sequence[Tensor], active: list[int]) -> None:
        """Calls the op."""


def _setting(value: Any) -> float | Tensor:
    return value if isinstance(value, Tensor) else float(value)


# Ways of computing the same update, which the fused kernels replace; they change no result.
_IMPLEMENTATION_KEYS = frozenset({"foreach", "fused", "capturable"})
_COMMON_KEYS = frozenset({"params", "param_names", "initial_lr", "lr", "weight_decay", "maximize", "differentiable"})


class AdamRule(Rule):
    """``torch.optim.Adam`` and ``AdamW``."""

    id = RULE_ADAM
    state_names = ("exp_avg", "exp_avg_sq")
    extra_name = "max_exp_avg_sq"
    counts_steps = True
    group_keys = _COMMON_KEYS | _IMPLEMENTATION_KEYS | {"betas", "eps", "amsgrad", "decoupled_weight_decay"}

    def __init__(self, decoupled: bool) -> None:
        self.decoupled = decoupled  # what a group that does not say (a checkpoint of an older torch) means

    def needs_extra(self, group: ParamGroup) -> bool:
        return bool(group["amsgrad"])

    def hyper_row(self, group: ParamGroup) -> HyperRow:
        beta1, beta2 = group["betas"]
        return (
            _setting(group["lr"]),
            _setting(beta1),
            _setting(beta2),
            _setting(group["eps"]),
            _setting(group["weight_decay"]),
            float(group.get("decoupled_weight_decay", self.decoupled)),
            -1.0 if group["maximize"] else 1.0,
            float(group["amsgrad"]),
        )

    def step(self, arena: Arena, params: Sequence[Tensor], active: list[int]) -> None:
        arena.backend.adam_step_(
            params,
            arena.states["exp_avg"],
            arena.states["exp_avg_sq"],
            arena.extra if arena.layout.n_extra_elems else None,
            arena.master if arena.layout.n_master_elems else None,
            arena.acc,
            arena.table,
            arena.scalars,
            arena.control,
            active,
        )


class SgdRule(Rule):
    """``torch.optim.SGD``."""

    id = RULE_SGD
    state_names = ()
    extra_name = "momentum_buffer"
    counts_steps = False
    group_keys = _COMMON_KEYS | _IMPLEMENTATION_KEYS | {"momentum", "dampening", "nesterov"}

    def needs_extra(self, group: ParamGroup) -> bool:
        return bool(group["momentum"] != 0)

    def hyper_row(self, group: ParamGroup) -> HyperRow:
        return (
            _setting(group["lr"]),
            _setting(group["momentum"]),
            _setting(group["dampening"]),
            float(group["nesterov"]),
            _setting(group["weight_decay"]),
            0.0,
            -1.0 if group["maximize"] else 1.0,
            0.0,
        )

    def step(self, arena: Arena, params: Sequence[Tensor], active: list[int]) -> None:
        arena.backend.sgd_step_(
            params,
            arena.extra if arena.layout.n_extra_elems else None,
            arena.master if arena.layout.n_master_elems else None,
            arena.acc,
            arena.table,
            arena.scalars,
            arena.control,
            active,
        )


# By exact type: a subclass may have overridden what the rule would silently replace.
_RULES: dict[type, Rule] = {
    torch.optim.Adam: AdamRule(decoupled=False),
    torch.optim.AdamW: AdamRule(decoupled=True),
    torch.optim.SGD: SgdRule(),
}
_REFUSED: dict[type, str] = {
    torch.optim.LBFGS: "it evaluates the closure several times a step, so there is no accumulation window",
    torch.optim.SparseAdam: "it takes sparse gradients only, and the accumulator is dense",
}


def rule_for(optimizer: torch.optim.Optimizer) -> Rule | None:
    """The fused rule of ``optimizer``; None where its own ``step`` must run, on fp32 masters."""
    return _RULES.get(type(optimizer))


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError where ``optimizer`` cannot be wrapped at all."""
    for cls, reason in _REFUSED.items():
        if isinstance(optimizer, cls):
            raise ValueError(f"optimizer is a torch.optim.{cls.__name__}, which cannot be wrapped: {reason}")


def check_group(optimizer: torch.optim.Optimizer, rule: Rule | None, index: int, group: ParamGroup) -> None:
    """Raises ValueError for an option of ``group`` that the path taken cannot honour."""
    where = f"param_groups[{index}]"
    if group.get("differentiable"):
        raise ValueError(
            f"{where} has differentiable=True; accepted: False. The step runs in place, outside of autograd; "
            "use the plain optimizer to differentiate through it"
        )
    if rule is None:
        return
    unknown = sorted(set(group) - rule.group_keys - set(_extra_keys(optimizer, group)))
    if unknown:
        raise ValueError(
            f"{where} has the option {unknown[0]!r}, which the fused {type(optimizer).__name__} does not know; "
            f"accepted: {', '.join(sorted(rule.group_keys))}"
        )


def _extra_keys(optimizer: torch.optim.Optimizer, group: ParamGroup) -> list[str]:
    """Keys that no torch optimizer of this class reads: a user's own labels ("name", "lr_scale") and a scheduler's."""
    return [key for key in group if key not in optimizer.defaults]
