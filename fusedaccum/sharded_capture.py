"""Interception of the gradients of DTensors.

FSDP2 (seen on torch 2.13) does not use a sharded parameter's AccumulateGrad node. After its reduce-scatter it assigns
``.grad`` itself, or adds to the local tensor of one that is there, and calls the post-accumulate-grad hooks. The hook
here takes ``.grad`` off at once; the gradients wait until the backward is over, as FSDP2 would have them do in
``.grad``, and are then added on the stream that all of it has been waited for on.

So ``.grad`` must be None when a backward begins: else FSDP2 adds to the accumulator by itself, in one rounding, but
knows nothing of a scale. It is hidden, to be there again when the backward ends, where something of ours says that one
is about to begin: ``step()`` inside a window, ``optimizer.backward``, ``optimizer.micro_batch``, a loss scaled by us.

Tensor-parallel parameters without FSDP2 come through their node, which stores into the ``.grad`` that its prehook has
hidden.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import dtensor
from .scaling import call_last, starts
from .slot import Slot

if TYPE_CHECKING:
    from .bucket import Bucket
    from .capture import Capture

_captures: weakref.WeakSet[Capture] = weakref.WeakSet()
"""Those that hold sharded parameters."""


def hook(slot: Slot, node: Any, bucket: Bucket, capture: Capture) -> list[Any]:
    """Hooks the parameter. Returns the handles to remove."""
    _captures.add(capture)
    if _begin_scaled_backward not in starts:
        starts.append(_begin_scaled_backward)
    return [
        node.register_prehook(_hider(slot)),
        slot.param.register_post_accumulate_grad_hook(_collector(slot, bucket, capture.judge is not None)),
    ]


def _hider(slot: Slot) -> Callable[[tuple[Tensor | None, ...]], None]:
    def hide(grads: tuple[Tensor | None, ...]) -> None:
        if grads[0] is not None:
            _hide(slot)

    return hide


def _collector(slot: Slot, bucket: Bucket, judges: bool) -> Callable[[Tensor], None]:
    """The hook that takes what has just become ``.grad``."""

    def collect(param: Tensor) -> None:
        grad = param.grad
        task = torch._C._current_graph_task_id()
        if grad is None or (task != bucket.task and not bucket.enter(task)):
            return
        has_others = len(param._post_accumulate_grad_hooks) > 1  # type: ignore[attr-defined]
        if has_others and judges:
            raise RuntimeError(
                f"{slot.name} has a post-accumulate-grad hook, which is to see the sum of the gradients; accepted: "
                "none with nonfinite='skip_micro_batch', where nothing is added before the micro-batch ends"
            )
        bucket.note_stream()
        if grad is slot.grad:
            bucket.added.append(slot)
            return
        param.grad = None
        grad = dtensor.in_place_of(slot.name, grad, param)
        earlier = bucket.grads.get(slot)
        if earlier is not None:  # a module that ran twice: FSDP2 reduces twice
            grad = earlier.float() + grad.float()
        bucket.grads[slot] = grad
        bucket.odd.add(slot)
        if has_others:  # they run next, and are to see the sum
            bucket.flush()
            _expose(slot)

    return collect


def _hide(slot: Slot) -> None:
    if slot.grad is not None and slot.param.grad is slot.grad:
        slot.param.grad = None
        slot.is_hidden = True


def _expose(slot: Slot) -> None:
    if slot.is_hidden:
        slot.is_hidden = False
        if slot.param.grad is None:
            slot.param.grad = slot.grad


def hide(slots: Iterable[Slot]) -> None:
    """Takes the accumulators off ``.grad``: the next thing is a backward."""
    for slot in slots:
        _hide(slot)


def expose(slots: Iterable[Slot]) -> None:
    """Makes ``.grad`` the accumulators again."""
    for slot in slots:
        _expose(slot)


def _begin_scaled_backward() -> None:
    """The backward of a loss that somebody here has scaled begins. Whose is not known: all hide for its time."""
    for capture in list(_captures):
        capture.hide()
        call_last(capture.show)


def check_judged(added: Iterable[list[Slot]]) -> None:
    """Raises RuntimeError where FSDP2 has added a gradient by itself before anybody could judge it."""
    for slots in added:
        if slots:
            name = slots[0].name
            slots.clear()
            raise RuntimeError(
                f"a backward found the .grad of {name} there, and FSDP2 added to it before it could be judged; "
                "accepted under fully_shard with nonfinite='skip_micro_batch': optimizer.backward(loss), which says "
                "that a backward begins. The open window is wrong by that: reset() drops it"
            )


def check_added(slots: Iterable[Slot], scale: float, factor: Tensor | None) -> None:
    """What FSDP2 has added to the accumulators by itself is right only where gradients are added as they are.

    Raises:
        RuntimeError: they are not.
    """
    if scale == 1.0 and factor is None:
        return
    for slot in slots:
        times = "a factor on the device" if factor is not None else f"{scale:g}"
        raise RuntimeError(
            f"a backward found the .grad of {slot.name} there, and FSDP2 added to it without the window's scale "
            f"({times}); accepted under fully_shard: one backward before each step() and zero_grad() after each "
            "boundary, or optimizer.backward(loss), which says that a backward begins. The open window is wrong by "
            "that: reset() drops it"
        )
