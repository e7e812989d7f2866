"""Interception of gradients in autograd: from the engine to buckets, in the engine's own order.

Each parameter's AccumulateGrad node gets a prehook that takes the incoming gradient and hands the node an undefined
one, at which the node returns without touching ``.grad`` (seen on torch 2.10 to 2.13; not a documented promise, so
``node_skips_undefined`` tries it). Gradients wait in a bucket until it is full, their parameter comes a second time,
or the backward ends. No gradient outlives its bucket, so at most ``bucket_bytes`` plus one gradient are alive.

Where the node does not return early, the capture works around the node instead: the prehook takes ``.grad`` off the
parameter, the node stores the gradient there, and a post-accumulate hook takes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .slot import Slot

Sink = Callable[[list[Slot], list[Tensor]], None]
_Grads = tuple[Tensor | None, ...]

_UNDEFINED: _Grads = (None,)
_owners: Any = WeakIdKeyDictionary()  # parameter -> weak reference to the capture that holds it


def accumulate_grad_node(param: Tensor) -> Any:
    """The AccumulateGrad node of a leaf. The caller must keep it: torch holds it weakly, hooks and all."""
    with torch.enable_grad():
        view = param.view_as(param)
    assert view.grad_fn is not None
    return view.grad_fn.next_functions[0][0]


@cache
def node_skips_undefined() -> bool:
    """Whether AccumulateGrad leaves ``.grad`` alone when a prehook hands it None, and still runs the post hooks."""
    with torch.enable_grad():
        param = torch.zeros(1, requires_grad=True)
        posts: list[bool] = []
        node = accumulate_grad_node(param)
        node.register_prehook(lambda grads: _UNDEFINED)
        param.register_post_accumulate_grad_hook(lambda _: posts.append(True))
        (param * 1).sum().backward()
    return param.grad is None and posts == [True]


class Capture:
    """Takes the gradients of the attached slots and hands them to ``sink`` in buckets.

    Args:
        sink: called with slots and their gradients (any strides and layout, no slot twice), outside of grad mode.
        bucket_bytes: gradient bytes that may wait.
        through_node: intercept before the node (the default where torch allows it) or behind it.
    """

    def __init__(self, sink: Sink, bucket_bytes: int, through_node: bool | None = None) -> None:
        self._sink = sink
        self._bucket_bytes = bucket_bytes
        self.through_node = node_skips_undefined() if through_node is None else through_node
        self._pending: dict[torch.device, dict[Slot, Tensor]] = {}
        self._bytes: dict[torch.device, int] = {}
        self._attached: dict[Slot, list[Any]] = {}  # slot -> its node (kept alive) and the handles to remove
        self._detached_views: dict[Slot, Tensor] = {}  # behind the node: .grad taken off for the time of a backward
        self._task = -1  # the graph task (backward call) of the last gradient
        self._tasks: set[int] = set()  # those whose end will call us

    def attach(self, slot: Slot) -> None:
        """Starts taking the slot's gradients. A frozen parameter's too, should it be unfrozen later.

        Raises:
            ValueError: another capture holds the parameter.
        """
        param = slot.param
        self.check_free(slot)
        requires_grad = param.requires_grad
        if not (param.is_floating_point() or param.is_complex()):
            return  # an integer tensor never has a gradient
        # torch keeps the node's hooks when requires_grad is switched off and on, as long as the node lives.
        param.requires_grad_(True)
        node = accumulate_grad_node(param)
        # Any dtype may then be in .grad, and the engine hands the gradient over as it was produced.
        param.grad_dtype = None
        hooks = [node, node.register_prehook(self._prehook(slot))]
        if not self.through_node:
            hooks.append(param.register_post_accumulate_grad_hook(self._posthook(slot)))
        param.requires_grad_(requires_grad)
        self._attached[slot] = hooks
        _owners[param] = weakref.ref(self)

    def check_free(self, slot: Slot) -> None:
        """Raises ValueError where another living capture holds the slot's parameter."""
        owner = _owners.get(slot.param)
        if owner is not None and owner() not in (None, self):
            raise ValueError(
                f"{slot.name} already belongs to another FusedAccumOptimizer; accepted: one for each parameter. "
                "Call remove() on the other one first"
            )

    def detach(self, slot: Slot) -> None:
        """Stops taking the slot's gradients."""
        hooks = self._attached.pop(slot, None)
        if hooks is None:
            return
        for handle in hooks[1:]:
            handle.remove()
        if _owners.get(slot.param) is not None:
            del _owners[slot.param]

    def flush(self) -> None:
        """Hands over everything that waits."""
        for device in list(self._pending):
            self._flush(device)
        # Behind the node: parameters whose backward broke off between the two hooks get their .grad back.
        while self._detached_views:
            slot, view = self._detached_views.popitem()
            if slot.param.grad is None:
                slot.param.grad = view

    def _flush(self, device: torch.device) -> None:
        waiting = self._pending.get(device)
        if not waiting:
            return
        # Emptied first: should the sink fail, the error must not repeat at every later flush.
        self._pending[device] = {}
        self._bytes[device] = 0
        if self._detached_views:
            for slot in waiting:
                view = self._detached_views.pop(slot, None)
                if view is not None:
                    slot.param.grad = view
        with torch.no_grad():
            self._sink(list(waiting), list(waiting.values()))

    def _take(self, slot: Slot, grad: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._enter(task)
        if grad.requires_grad:  # create_graph=True: the buffer holds values, no graph
            grad = grad.detach()
        device = slot.device
        waiting = self._pending.get(device)
        if waiting is None:
            waiting = self._pending[device] = {}
            self._bytes[device] = 0
        elif slot in waiting:
            self._flush(device)
            waiting = self._pending[device]
        waiting[slot] = grad
        # A sparse gradient's bytes are its dense ones here, which errs towards flushing early.
        n_bytes = self._bytes[device] + slot.n_elems * grad.itemsize
        self._bytes[device] = n_bytes
        # Somebody's post-accumulate hook runs right after the node and is to see the sum.
        hooks = slot.param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if n_bytes >= self._bucket_bytes or (hooks and len(hooks) > (not self.through_node)):
            self._flush(device)

    def _enter(self, task: int) -> None:
        """The first gradient of a backward: ask the engine to call when it ends.

        A backward that fails calls nobody; what it left waiting is added by the next flush, as torch would have.
        """
        self._task = task
        if task in self._tasks:
            return
        self._tasks.add(task)
        this = weakref.ref(self)

        def end_of_backward() -> None:
            capture = this()
            if capture is not None:
                capture._tasks.discard(task)
                capture._task = -1
                capture.flush()

        torch.autograd.Variable._execution_engine.queue_callback(end_of_backward)  # type: ignore[attr-defined]

    def _prehook(self, slot: Slot) -> Callable[[_Grads], _Grads | None]:
        # A weak reference: the node holds its hooks, the capture holds the node, and no garbage collector sees
        # through the C++ side.
        this = weakref.ref(self)
        if self.through_node:

            def prehook(grads: _Grads) -> _Grads | None:
                grad = grads[0]
                capture = this()
                if grad is None or capture is None:
                    return None
                capture._take(slot, grad)
                return _UNDEFINED

        else:

            def prehook(grads: _Grads) -> _Grads | None:
                capture = this()
                if grads[0] is None or capture is None:
                    return None
                param = slot.param
                if param.grad is not None:
                    capture._detached_views[slot] = param.grad
                    param.grad = None
                return None

        return prehook

    def _posthook(self, slot: Slot) -> Callable[[Tensor], None]:
        this = weakref.ref(self)

        def posthook(param: Tensor) -> None:
            capture = this()
            grad = param.grad
            if capture is None or grad is None:
                return
            param.grad = None
            capture._take(slot, grad)

        return posthook

    def remove(self) -> None:
        """Stops everything; gradients that wait are handed over first."""
        self.flush()
        for slot in list(self._attached):
            self.detach(slot)
