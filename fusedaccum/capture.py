"""Interception of gradients in autograd: from the engine to buckets, in the engine's own order.

Each parameter's AccumulateGrad node gets a prehook that takes the incoming gradient and hands the node an undefined
one, at which the node returns without touching ``.grad`` (seen on torch 2.13 and 2.14; not a documented promise, so
``node_skips_undefined`` tries it). Gradients wait in a bucket until it is full, their parameter comes a second time,
or the backward ends. No gradient outlives its bucket, so at most ``bucket_bytes`` plus one gradient are alive.

Where the node does not return early, the capture works around the node instead: the prehook takes ``.grad`` off the
parameter, the node stores the gradient there, and a post-accumulate hook takes it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from . import sharded_capture
from .bucket import Bucket
from .slot import Slot

Sink = Callable[[list[Slot], list[Tensor], list[bool], set[Slot], Tensor | None, Tensor | None], None]
Judge = Callable[[list[Tensor]], Tensor]
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
def keep_compiler_out() -> None:
    """Has ``torch.compile`` step over this package.

    A compiled training step calls the hooks and the optimizer, and Dynamo would look into them: it fails on an fp32
    ``.grad`` of a 16-bit parameter, and on the engine's callbacks. Whoever made a torch optimizer has it imported.
    """
    from torch._dynamo import trace_rules

    trace_rules.add(__name__.partition(".")[0])


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


@cache
def _references_in_a_hook() -> int:
    """``sys.getrefcount`` of a gradient in a prehook, when nobody but the engine holds it."""
    counts: list[int] = []

    def count(grads: _Grads) -> None:
        grad = grads[0]
        counts.append(sys.getrefcount(grad))

    with torch.enable_grad():
        param = torch.zeros(1, requires_grad=True)
        node = accumulate_grad_node(param)
        node.register_prehook(count)
        (param * 1).sum().backward()
    return counts[0]


class _EndOfBackward:
    """Called by the engine when a backward ends. One that fails calls nobody, but drops its callbacks: what was
    captured until then is added all the same, as torch would have."""

    def __init__(self, capture: Capture, task: int) -> None:
        self._capture = weakref.ref(capture)
        self._task = task

    def __call__(self) -> None:
        capture = self._capture()
        if capture is not None:
            capture.leave(self._task)
            capture.end_backward()

    def __del__(self) -> None:
        capture = self._capture()
        if capture is not None and capture.leave(self._task):
            capture.end_backward()


class Capture:
    """Takes the gradients of the attached slots and hands them to ``sink`` in buckets.

    Args:
        sink: called with the arguments of ``Registry.accumulate``, outside of grad mode.
        bucket_bytes: gradient bytes that may wait, counted in the parameters' dtypes.
        through_node: intercept before the node (the default where torch allows it) or behind it.
        judge: given, all gradients of a micro-batch wait until it is over, whatever their size, and are then handed
            over together with what ``judge`` returns of them.
    """

    def __init__(
        self, sink: Sink, bucket_bytes: int, through_node: bool | None = None, judge: Judge | None = None
    ) -> None:
        keep_compiler_out()
        self.sink = sink
        self.judge = judge
        self.on_backward: Callable[[], None] | None = None
        """Called when a backward brings its first gradient; may refuse it."""
        self.in_micro_batch = False
        """The end of a backward is not the end of the micro-batch."""
        self._bucket_bytes = bucket_bytes
        self.through_node = node_skips_undefined() if through_node is None else through_node
        self._buckets: dict[tuple[torch.device, bool], Bucket] = {}
        self._attached: dict[Slot, list[Any]] = {}  # slot -> its node (kept alive) and the handles to remove
        self._sharded: dict[Slot, None] = {}
        self._own_grads: dict[Slot, Tensor] = {}  # behind the node: .grad while the node must not see it
        self._tasks: set[int] = set()  # those whose end will call us
        self._n_backwards = 0

    def attach(self, slot: Slot) -> None:
        """Starts taking the slot's gradients. A frozen parameter's too, should it be unfrozen later.

        Raises:
            ValueError: another capture holds the parameter.
        """
        param = slot.param
        self.check_free(param, slot.name)
        requires_grad = param.requires_grad
        if not (param.is_floating_point() or param.is_complex()):
            return  # an integer tensor never has a gradient
        # torch keeps the node's hooks when requires_grad is switched off and on, as long as the node lives.
        param.requires_grad_(True)
        node = accumulate_grad_node(param)
        # Any dtype may then be in .grad, and the engine hands the gradient over as it was produced.
        param.grad_dtype = None
        # FSDP2's gradients come on streams of its own, so that no bucket of theirs is handed over before the end.
        kind = (slot.device, slot.is_sharded)
        bucket = self._buckets.get(kind)
        if bucket is None:
            bucket = self._buckets[kind] = Bucket(self)
        take = self._taker(slot, bucket) if self.judge is None else self._holder(slot, bucket)
        if slot.is_sharded:
            hooks = [node, *sharded_capture.hook(slot, node, bucket, self)]
            self._sharded[slot] = None
        elif self.through_node:
            hooks = [node, node.register_prehook(take)]
        else:
            handle = param.register_post_accumulate_grad_hook(self._behind(slot, take))
            hooks = [node, node.register_prehook(self._clearer(slot)), handle]
        if not self.through_node or slot.is_sharded:
            # Before those of others, which are to see the sum. torch calls them in the order of the underlying dict, of
            # which move_to_end knows nothing.
            posts = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            for key in [key for key in posts if key != hooks[-1].id]:
                posts[key] = posts.pop(key)
        param.requires_grad_(requires_grad)
        self._attached[slot] = hooks
        _owners[param] = weakref.ref(self)

    def check_free(self, param: Tensor, name: str) -> None:
        """Raises ValueError where another living capture holds the parameter."""
        owner = _owners.get(param)
        if owner is not None and owner() not in (None, self):
            raise ValueError(
                f"{name} already belongs to another FusedAccumOptimizer; accepted: one for each parameter. "
                "Call remove() on the other one first"
            )

    def is_attached(self, slot: Slot) -> bool:
        """Whether the parameter still has the node that was hooked: a conversion makes torch drop it, hooks and all."""
        hooks = self._attached.get(slot)
        return hooks is not None and (not slot.param.requires_grad or accumulate_grad_node(slot.param) is hooks[0])

    def detach(self, slot: Slot) -> None:
        """Stops taking the slot's gradients."""
        hooks = self._attached.pop(slot, None)
        if hooks is None:
            return
        for handle in hooks[1:]:
            handle.remove()
        self._sharded.pop(slot, None)
        if _owners.get(slot.param) is not None:
            del _owners[slot.param]

    def remove(self) -> None:
        """Stops everything; gradients that wait are handed over first."""
        self.flush()
        for slot in list(self._attached):
            self.detach(slot)

    def flush(self) -> None:
        """Hands over everything that waits, and shows it where ``.grad`` was hidden."""
        self.hand_over()
        self.show()

    def any_sharded(self) -> Slot | None:
        """An attached slot whose parameter is a DTensor, if there is one."""
        return next(iter(self._sharded), None)

    def hide(self) -> None:
        """Takes the accumulators of DTensors off their ``.grad`` before a backward: see ``sharded_capture``."""
        sharded_capture.hide(self._sharded)

    def show(self) -> None:
        """Undoes ``hide``."""
        sharded_capture.expose(self._sharded)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """For a backward: ``hide`` before, and ``.grad`` as it should be after, whether or not the backward reduces."""
        self.hide()
        try:
            yield
        finally:
            self.show()

    def hand_over(self) -> None:
        """Hands over everything that waits."""
        verdict = None
        if self.judge is not None:
            sharded_capture.check_judged(bucket.added for bucket in self._buckets.values())
            held = [grad for bucket in self._buckets.values() for grad in bucket.grads.values()]
            if not held:
                return
            with torch.no_grad():
                verdict = self.judge(held)
        for bucket in self._buckets.values():
            bucket.flush(verdict)

    def end_backward(self) -> None:
        """A backward is over: hands over what waits, unless more of its micro-batch may come."""
        if self.judge is None or not (self._tasks or self.in_micro_batch):
            self.flush()
        else:
            self.show()

    def take_backwards(self) -> int:
        """Backward calls that brought gradients since the last time."""
        n, self._n_backwards = self._n_backwards, 0
        return n

    def enter(self, task: int) -> None:
        """Asks the engine to call when the backward ``task`` ends."""
        if task not in self._tasks:
            if self.on_backward is not None:
                self.on_backward()
            if not self._tasks:  # else inside of another (reentrant checkpointing)
                self._n_backwards += 1
            self._tasks.add(task)
            engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
            engine.queue_callback(_EndOfBackward(self, task))

    def leave(self, task: int) -> bool:
        """The backward ``task`` is over. Returns whether that is news."""
        for bucket in self._buckets.values():
            bucket.task = -1
        known = task in self._tasks
        self._tasks.discard(task)
        return known

    # The hooks are written for the interpreter: one runs for every parameter and micro-batch, and a model of 1,000
    # small parameters must not notice.

    def _taker(self, slot: Slot, bucket: Bucket) -> Callable[[_Grads], _Grads | None]:
        """The hook that puts the slot's incoming gradient into the bucket."""
        param = slot.param
        dtype, is_contiguous = slot.dtype, slot.is_contiguous
        n_bytes = slot.n_elems * param.element_size()  # gradients mostly come in the parameter's dtype
        bucket_bytes = self._bucket_bytes
        n_own_hooks = 0 if self.through_node else 1
        current_task = torch._C._current_graph_task_id
        getrefcount = sys.getrefcount
        # Behind the node it is torch's own copy where somebody else holds the original.
        n_references = _references_in_a_hook() if self.through_node else sys.maxsize

        def take(grads: _Grads) -> _Grads | None:
            grad = grads[0]
            if grad is None:
                return None
            # Somebody who keeps it (a Function with a workspace) may write to it before the backward ends.
            is_kept = getrefcount(grad) > n_references
            task = current_task()
            if task != bucket.task and not bucket.enter(task):
                return None
            if slot in bucket.grads:
                bucket.flush()
            bucket.grads[slot] = grad
            # Looked at here, while the processor still has the tensor at hand.
            if not is_contiguous or grad.dtype is not dtype or not grad.is_contiguous():
                bucket.odd.add(slot)
            bucket.n_bytes += n_bytes
            # Somebody's post-accumulate hook runs right after the node and is to see the sum.
            hooks = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            if bucket.n_bytes >= bucket_bytes or is_kept or (hooks is not None and len(hooks) > n_own_hooks):
                bucket.flush()
            return _UNDEFINED

        return take

    def _holder(self, slot: Slot, bucket: Bucket) -> Callable[[_Grads], _Grads | None]:
        """``_taker`` for a capture that judges: nothing is handed over before the micro-batch ends."""
        n_own_hooks = 0 if self.through_node else 1
        n_references = _references_in_a_hook() if self.through_node else sys.maxsize

        def hold(grads: _Grads) -> _Grads | None:
            grad = grads[0]
            if grad is None:
                return None
            task = torch._C._current_graph_task_id()
            if task != bucket.task and not bucket.enter(task):
                return None
            hooks = slot.param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            if hooks is not None and len(hooks) > n_own_hooks:
                raise RuntimeError(
                    f"{slot.name} has a post-accumulate-grad hook, which is to see the sum of the gradients; accepted: "
                    "none with nonfinite='skip_micro_batch', where nothing is added before the micro-batch ends"
                )
            earlier = bucket.grads.get(slot)
            if earlier is not None:
                grad = earlier.detach().float() + grad.detach().float()
            elif sys.getrefcount(grad) > n_references:
                grad = grad.detach().clone()  # somebody keeps it, and may write to it before the micro-batch ends
            bucket.grads[slot] = grad
            bucket.odd.add(slot)
            return _UNDEFINED

        return hold

    # Behind the node: what its prehook takes off .grad, its post hook puts back. torch runs the two in one piece.

    def _clearer(self, slot: Slot) -> Callable[[_Grads], None]:
        """Takes ``.grad`` off the parameter, so that the node stores what comes as it is."""
        own_grads = self._own_grads

        def clear(grads: _Grads) -> None:
            param = slot.param
            if grads[0] is not None and param.grad is not None:
                own_grads[slot] = param.grad
                param.grad = None

        return clear

    def _behind(self, slot: Slot, take: Callable[[_Grads], _Grads | None]) -> Callable[[Tensor], None]:
        """Takes what the node stored."""
        own_grads = self._own_grads

        def posthook(param: Tensor) -> None:
            grad = param.grad
            param.grad = own_grads.pop(slot, None)
            if take((grad,)) is None and grad is not None:  # nobody is left to take it: as plain torch
                param.grad = grad if param.grad is None else param.grad + grad

        return posthook
