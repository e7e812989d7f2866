"""What the gradients tell: norms, skips, and the gradient noise scale, from which the useful batch size follows.

The gradient noise scale is that of McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (appendix A.1):
tr(covariance) / |gradient|^2, estimated without bias from the squared norms at two batch sizes, here the micro-batch's
and the window's. Numerator and denominator are averaged separately, as there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import layout
from .scaling import LossScale

DECAY = 0.99
"""Of the averages: about the last 100 windows count."""


def new_window(loss_scale: LossScale | None) -> Tensor:
    """(16,) float64: the ``window`` block of a device before its first boundary."""
    window = torch.zeros(layout.WINDOW_SIZE, dtype=torch.float64)
    window[layout.DECAY] = DECAY
    (loss_scale or LossScale(1.0, 1.0, 1.0)).write_to(window)
    return window


def read(control: Tensor, window: Tensor, statistics: bool) -> dict[str, Tensor]:
    """0-dim float64 tensors on the device, none of which waits for it. All but the first two cover all windows so far.

    ``grad_norm``: of the last window's gradient, before clipping.
    ``micro_batch_norm``: root mean square, weighted, of the norms of the last window's micro-batches. (*)
    ``windows``, ``skipped``: boundaries, and those of them that changed nothing.
    ``clip_fraction``: share of the steps that were clipped.
    ``noise_scale``: the batch size, in units of weight (micro-batches where none was given), at which the noise in the
    gradient is as large as the gradient: with 10 times as much, more batch buys next to nothing; with a tenth, twice
    the batch does nearly the work of two steps. NaN before the first window of two or more micro-batches. (*)
    ``useful_accumulation_steps``: the same in micro-batches of the last window's size. More steps than that slow
    training down for little. (*)
    ``loss_scale``: the present one.

    (*) Only there with ``statistics=True``. Without ``accumulation_steps`` and weights, they assume that the loss was
    divided by the number of micro-batches.
    """
    taken = window[layout.WINDOWS] - window[layout.SKIPPED_WINDOWS]
    result = {
        "grad_norm": control[layout.NORM].clone(),
        "windows": window[layout.WINDOWS].clone(),
        "skipped": window[layout.SKIPPED_WINDOWS].clone(),
        "clip_fraction": window[layout.CLIPPED_WINDOWS] / taken.clamp(min=1.0),
        "loss_scale": window[layout.LOSS_SCALE].clone(),
    }
    if statistics:
        noise = window[layout.NOISE] / window[layout.GRAD_SQ]
        result["micro_batch_norm"] = control[layout.MICRO_NORM].clone()
        result["noise_scale"] = noise
        result["useful_accumulation_steps"] = noise / window[layout.MICRO_WEIGHT]
    return result


def scale_lr(base_lr: float, base_batch: float, batch: float, rule: str = "linear") -> float:
    """The learning rate for another batch size.

    Args:
        base_lr: the learning rate that was tuned, at ``base_batch``.
        base_batch, batch: batch sizes in the same unit; the window's, not the micro-batch's.
        rule: "linear", base_lr * batch / base_batch, for SGD (Goyal et al. 2017, with warm-up); "sqrt", base_lr *
            sqrt(batch / base_batch), for Adam and its kin (Krizhevsky 2014; Malladi et al. 2022). Both hold below the
            gradient noise scale only.

    Raises:
        ValueError: an argument that is not accepted, by name.
    """
    for name, value in (("base_lr", base_lr), ("base_batch", base_batch), ("batch", batch)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value!r}; accepted: a finite number above 0")
    if rule not in ("linear", "sqrt"):
        raise ValueError(f"rule is {rule!r}; accepted: 'linear', 'sqrt'")
    ratio = batch / base_batch
    return base_lr * (ratio if rule == "linear" else math.sqrt(ratio))
