"""The ops: their schemas, and what they mean. Every backend implements these and nothing else.

All flat buffers are contiguous, on one device, and laid out by ``layout.Layout``:

``acc``: (n,) float32
    The accumulator. Slot ``s`` holds ``table[s].n_elems`` elements from ``table[s].offset_elems`` on, in the memory
    order of its parameter.
``partials``: (n_chunks,) float64
    For each chunk of ``acc``, the sum of squares of its elements, non-finite exactly if one of them is.
``table``: (n_slots, 6) int64
    ``layout.SLOT_COLUMNS``.
``micro_partials``: (n_chunks,) float64 or None
    For each chunk, the sum over the window's micro-batches of the sum of squares of what each added to it. Infinite
    where a square overflows float32. None: not kept.
``hyper``: (n_groups, 8) float64
    The rule's settings of each param_group.
``control``: (8,) float64
    ``layout.NORM`` and following: norm of the gradient, found_inf (0 or 1), clip coefficient, what the step
    multiplies the accumulator by, raw sum of squares, whether the step does nothing (found_inf, or a window without
    weight), root mean square of the micro-batches' own norms and the raw sum of squares that it comes from.
``window``: (16,) float64
    ``layout.WEIGHT`` and following: the part of the open window's weight that only the device knows, the loss scale
    and its settings, counts of windows, and the averages behind the gradient noise scale.
``scalars``: (n_slots, 12) float32
    What the step of each slot needs, written by ``finalize_``.
``steps``: (n_slots,) float32
    Updates that each slot has had.

``accumulate_``
    ``acc[slot] = first ? s * grad : acc[slot] + s * grad`` for each gradient, with the partials of every chunk touched,
    where ``s = float32(scale * factor)``. ``factor``: (1,) float64 or None (1), what only the device knows of the
    scale. ``s == 0`` adds nothing, whatever the gradient holds: a first add stores zeros then, another writes nothing.
    ``micro_partials`` of each chunk becomes the sum of squares of ``s * grad`` on a first add (the same number as its
    partial), and grows by it on a later one. ``grads[i]``: float32, float16 or bfloat16, dense, in its slot's memory
    order.
``measure_``
    The partials of the given slots, from ``acc`` as it is: for buffers that something else has written to. ``n_elems``:
    the slots' sizes, which a host cannot read from a table on a device.
``finalize_``
    From the partials of the slots whose ``active`` (n_slots,) uint8 is set: ``control``; if ``advance``, ``window``
    after this boundary, and, unless it is skipped, ``steps + 1`` and ``scalars`` of those slots (``rule`` 2: neither).
    ``numerator / (weight + window[WEIGHT])``: factor from ``acc`` to the true gradient. ``weight``, ``weight_sq``: sum
    of the micro-batches' weights that the host knows, and of their squares. ``max_norm``: infinity for no clip.
    ``extra``: (2,) float64 or None, the two raw sums of squares kept elsewhere (another device).
``adam_step_``, ``sgd_step_``
    The update of the given slots, unless ``control`` says that it is skipped. ``params[i]``: float32, float16 or
    bfloat16, in its slot's memory order. ``exp_avg``, ``exp_avg_sq``: (n,) float32, laid out as ``acc``; ``master``,
    ``max_exp_avg_sq``, ``momentum_buffer``: float32, at the offsets of the slot's last two columns, None where no slot
    has any.

All raise RuntimeError on arguments that do not fit (a slot named twice too), before anything is written.
"""

from __future__ import annotations

import torch

from . import reference

NAMESPACE = "fusedaccum"

SCHEMAS = {
    "accumulate_": (
        "(Tensor(a!) acc, Tensor(b!) partials, Tensor(c!)? micro_partials, Tensor table, Tensor[] grads, int[] slots,"
        " int[] first, float scale, Tensor? factor) -> ()"
    ),
    "measure_": "(Tensor(a!) partials, Tensor acc, Tensor table, int[] slots, int[] n_elems) -> ()",
    "finalize_": (
        "(Tensor(a!) control, Tensor(b!) scalars, Tensor(c!) steps, Tensor(d!) window, Tensor partials,"
        " Tensor? micro_partials, Tensor table, Tensor hyper, Tensor active, int rule, float numerator, float weight,"
        " float weight_sq, float max_norm, Tensor? extra, bool advance) -> ()"
    ),
    "adam_step_": (
        "(Tensor(a!)[] params, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? max_exp_avg_sq,"
        " Tensor(e!)? master, Tensor acc, Tensor table, Tensor scalars, Tensor control, int[] slots) -> ()"
    ),
    "sgd_step_": (
        "(Tensor(a!)[] params, Tensor(b!)? momentum_buffer, Tensor(c!)? master, Tensor acc, Tensor table,"
        " Tensor scalars, Tensor control, int[] slots) -> ()"
    ),
}


def _nothing(*args: object, **kwargs: object) -> None:
    """The fake of an op that only writes in place."""


_library = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema)
    # Serves every device that has no kernel of its own; a backend's kernel for a device takes precedence.
    _library.impl(_name, getattr(reference, _name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _nothing, lib=_library)
