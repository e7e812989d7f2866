"""A parameter under the optimizer's care, and what is known of it between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .dtensor import around, is_dtensor, local_of, n_replicas, part_of
from .layout import Placement, dense_strides, is_contiguous

if TYPE_CHECKING:
    from .arena import Arena


class Slot:
    """One parameter: its place in an arena, its ``.grad`` view, and what the last step left.

    A slot has an arena from its first gradient on; a frozen parameter costs no memory. Sizes, strides and buffers of a
    DTensor are those of its local tensor.
    """

    __slots__ = (
        "arena",
        "data_ptr",
        "device",
        "dtype",
        "grad",
        "group",
        "has_extra",
        "has_master",
        "has_state",
        "index",
        "is_contiguous",
        "is_hidden",
        "is_sharded",
        "keeps_order",
        "n_elems",
        "n_replicas",
        "name",
        "param",
        "param_strides",
        "placement",
        "shape",
        "state",
        "strides",
        "version",
        "view",
        "view_ptr",
    )

    def __init__(self, param: Tensor, name: str, group: int) -> None:
        self.param = param
        self.name = name
        self.group = group
        self.is_sharded = is_dtensor(param)
        self.n_replicas = n_replicas(param) if self.is_sharded else 1
        self.is_hidden = False
        """A gradient is accumulated, and yet ``.grad`` is None: see ``sharded_capture``."""
        self.keeps_order = False
        """States lie in the memory order that the parameter has, and cannot follow it into another."""
        self.leave_arena()
        self.remember_tensor()

    def leave_arena(self) -> None:
        """Forgets place, view and state."""
        self.arena: Arena | None = None
        self.index = -1
        self.placement: Placement | None = None
        self.view: Tensor | None = None
        self.grad: Tensor | None = None
        self.view_ptr = 0
        self.forget_state()

    def forget_state(self) -> None:
        """Forgets that ``optimizer.state[param]`` held anything of ours."""
        self.state: dict[str, Tensor] = {}
        self.has_state = False
        self.has_extra = False
        self.has_master = False

    def remember_tensor(self) -> None:
        """Notes dtype, device, shape and memory order of the parameter as it is now."""
        param = self.param
        self.dtype = param.dtype
        self.device = param.device
        self.n_elems = self.local().numel()
        self.remember_order()
        self.remember_value()

    def remember_order(self) -> None:
        """Notes the memory order of the parameter as it is now."""
        local = self.local()
        self.shape = local.shape
        self.param_strides = self.param.stride()
        self.strides = dense_strides(local.shape, local.stride())
        self.is_contiguous = is_contiguous(local.shape, self.strides)

    def local(self) -> Tensor:
        """What this rank has of the parameter: its local tensor where it is a DTensor, else the parameter itself."""
        return local_of(self.param) if self.is_sharded else self.param

    def as_param(self, local: Tensor) -> Tensor:
        """A buffer of the local shape as users see it beside the parameter: a DTensor where the parameter is one."""
        return around(self.param, local) if self.is_sharded else local

    def fill(self, view: Tensor, value: Any, name: str) -> None:
        """Copies ``value`` (a tensor as ``optimizer.state`` may have it, or a number) into a view that is there."""
        value = torch.as_tensor(value)
        if is_dtensor(view):
            local_of(view).copy_(part_of(f"{name} of {self.name}", value, self.param))
        else:
            view.copy_(value.reshape(view.shape))

    def remember_value(self) -> None:
        """Notes the parameter's memory and version, to see later whether somebody else wrote to it."""
        self.version = self.param._version
        self.data_ptr = self.local().data_ptr()

    def was_written(self) -> bool:
        """Whether somebody wrote to the parameter, or gave it other memory, since ``remember_value``."""
        return self.param._version != self.version or self.local().data_ptr() != self.data_ptr

    def keep_view(self, view: Tensor) -> None:
        """The slot's accumulator. It, or the DTensor around it, is what ``.grad`` is while something is accumulated."""
        self.view = view
        self.grad = self.as_param(view)
        self.view_ptr = view.data_ptr()

    def is_own(self, grad: Tensor) -> bool:
        """Whether ``grad`` is the accumulator. ``Module.to`` converts ``.grad`` in place: same object, other memory."""
        return grad is self.grad and (local_of(grad) if self.is_sharded else grad).data_ptr() == self.view_ptr

    def held_grad(self) -> Tensor | None:
        """``.grad``, or the accumulator where it is hidden."""
        grad = self.param.grad
        return self.grad if grad is None and self.is_hidden else grad

    def keep_state(self, views: dict[str, Tensor]) -> None:
        """Notes the views that ``optimizer.state[param]`` now holds, by name."""
        self.state = views
        self.has_state = True

    def is_own_state(self, held: dict[str, Any] | None) -> bool:
        """Whether ``held`` (``optimizer.state[param]``) has our views. By identity: anything else is a value that
        somebody put in their place, to be taken over."""
        if not self.has_state:
            return False
        if held is None:
            return not self.state
        for name, view in self.state.items():  # noqa: SIM110 - a generator doubles the cost of this, once a parameter
            if held.get(name) is not view:
                return False
        return True

    def in_order(self, tensor: Tensor) -> Tensor:
        """``tensor`` (any strides, the parameter's shape) in this slot's memory order; a copy only if it must be."""
        if tensor.is_contiguous() if self.is_contiguous else tensor.stride() == self.strides:
            return tensor
        return torch.empty_strided(tensor.shape, self.strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
