"""Refusals: every message names the argument or parameter, what was found and what is accepted."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import dtensor, layout

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What gradients and parameters may be, for every op and backend."""


def dtype_name(dtype: torch.dtype) -> str:
    """As messages call it: without "torch."."""
    return str(dtype).removeprefix("torch.")


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a block of memory without gaps or overlaps, in whatever order."""
    return tensor.is_contiguous() or layout.dense_strides(tensor.shape, tensor.stride()) == tensor.stride()


def check_arguments(
    optimizer: Any, accumulation_steps: Any, max_grad_norm: Any, master_weights: Any, bucket_bytes: Any
) -> None:
    """Checks the constructor's arguments but for the parameters."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; accepted: an instance of torch.optim.Optimizer")
    if hasattr(optimizer, "inner") and hasattr(optimizer, "flush"):
        raise TypeError("optimizer is a FusedAccumOptimizer already; accepted: the optimizer that it wraps")
    if accumulation_steps is not None and not (_is_int(accumulation_steps) and accumulation_steps >= 1):
        raise ValueError(f"accumulation_steps is {accumulation_steps!r}; accepted: None or an integer of at least 1")
    if max_grad_norm is not None:
        check_number("max_grad_norm", max_grad_norm)
    if not (master_weights == "auto" or isinstance(master_weights, bool)):
        raise ValueError(f"master_weights is {master_weights!r}; accepted: 'auto', True, False")
    if not (_is_int(bucket_bytes) and bucket_bytes >= 1):
        raise ValueError(f"bucket_bytes is {bucket_bytes!r}; accepted: an integer of at least 1")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_number(name: str, value: Any) -> None:
    """A finite or infinite number of at least 0."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or math.isnan(value) or value < 0:
        raise ValueError(f"{name} is {value!r}; accepted: a number of at least 0")


def check_clip(max_norm: Any, norm_type: Any) -> None:
    """Checks the arguments of ``clip_grad_norm_``."""
    check_number("max_norm", max_norm)
    if norm_type != 2:
        raise ValueError(
            f"norm_type is {norm_type!r}; accepted: 2. torch.nn.utils.clip_grad_norm_ takes others, in one more pass"
        )


def check_weight(weight: Any) -> None:
    """A micro-batch's weight: a number, or a tensor of one element, which is looked at only where nobody waits."""
    if isinstance(weight, Tensor):
        if weight.dim() != 0 or weight.is_complex():
            found = f"a tensor of shape {tuple(weight.shape)} and dtype {dtype_name(weight.dtype)}"
            raise ValueError(f"weight is {found}; accepted: a number of at least 0, or a 0-dim real tensor")
        if not _is_readable(weight):
            return
        weight = weight.item()
    elif not isinstance(weight, numbers.Real) or isinstance(weight, bool):
        raise TypeError(f"weight is {weight!r}; accepted: a number of at least 0, or a 0-dim real tensor")
    if not 0 <= weight < math.inf:
        raise ValueError(f"weight is {weight!r}; accepted: a finite number of at least 0")


def _is_readable(tensor: Tensor) -> bool:
    """Whether the host has the value at hand."""
    return tensor.device.type == "cpu"


def check_nonfinite(policy: Any) -> None:
    """Checks the argument ``nonfinite``."""
    if policy not in ("skip_window", "skip_micro_batch", "raise"):
        raise ValueError(f"nonfinite is {policy!r}; accepted: 'skip_window', 'skip_micro_batch', 'raise'")


def check_has_window(accumulation_steps: int | None, method: str) -> None:
    """Raises RuntimeError where the loop decides the boundaries."""
    if accumulation_steps is None:
        raise RuntimeError(
            f"{method}: accumulation_steps is None, so every step() is a boundary and there is no window to end"
        )


def check_process_group(params: Iterable[Tensor] = ()) -> None:
    """Raises RuntimeError where the default process group has several ranks and nothing would reduce the gradients.

    Args:
        params: all parameters. DTensors that have gradients have them reduced by FSDP2 or tensor parallelism.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return
    trainable = [param for param in params if param.requires_grad]
    if not (trainable and all(dtensor.is_dtensor(param) for param in trainable)):
        raise RuntimeError(
            f"the default process group has {distributed.get_world_size()} ranks; accepted: 1, or parameters that are "
            "all sharded by fully_shard, or process_group=torch.distributed.group.WORLD (the ranks that train one "
            "model). Else the gradients would not be reduced over the ranks, and each would train a model of its own"
        )


def param_name(group_index: int, group: dict[str, Any], i: int) -> str:
    """How messages call a parameter: by the name that torch keeps where named_parameters() were given."""
    names = group.get("param_names")
    place = f"param_groups[{group_index}]['params'][{i}]"
    return f"{place} ({names[i]})" if names else place


def check_param(name: str, param: Tensor) -> None:
    """Raises for a parameter that cannot be accumulated in fp32."""
    if dtensor.is_dtensor(param):
        dtensor.check_param(name, param)
    elif is_traceable_wrapper_subclass(param):
        raise TypeError(f"{name} is a {type(param).__name__}; accepted: plain tensors, DTensors (fully_shard)")
    if param.layout is not torch.strided:
        raise TypeError(f"{name} has layout {param.layout}; accepted: torch.strided")
    if not param.is_leaf:
        raise ValueError(f"{name} is not a leaf of autograd; accepted: leaves, which accumulate a .grad")
    if not (param.is_floating_point() or param.is_complex()):
        if param.requires_grad:
            raise TypeError(f"{name} has dtype {dtype_name(param.dtype)}; accepted: float32, float16, bfloat16")
        return  # a frozen integer tensor never has a gradient
    if param.dtype not in DTYPES:
        raise TypeError(
            f"{name} has dtype {dtype_name(param.dtype)}; accepted: float32, float16, bfloat16. The accumulator is "
            "fp32; give such parameters to a plain optimizer of their own"
        )


def check_dense(name: str, param: Tensor) -> None:
    """Raises for a parameter that the fused kernels, which walk through memory, cannot update."""
    param = dtensor.local_of(param)
    if not is_dense(param):
        raise ValueError(
            f"{name} has gaps or overlaps in memory (shape {tuple(param.shape)}, strides {param.stride()}); accepted: "
            "dense, in any order of dimensions"
        )


def check_grad(name: str, grad: Tensor) -> None:
    """Raises for a gradient that cannot be added in fp32."""
    if grad.layout not in (torch.strided, torch.sparse_coo):
        raise RuntimeError(
            f"the gradient of {name} has layout {grad.layout}; accepted: torch.strided, torch.sparse_coo"
        )
    if not grad.is_floating_point():
        raise RuntimeError(
            f"the gradient of {name} has dtype {dtype_name(grad.dtype)}; accepted: a floating point type"
        )
