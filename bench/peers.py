"""Libraries that may be there, and why not where they are not."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .providers import AbsentError

_HINTS = {
    "optimi": "pip install torch-optimi",
    "accelerate": "pip install accelerate",
    "deepspeed": "pip install deepspeed",
}


@cache
def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # such libraries fail on import in many ways, and must not stop a measurement
        return f"{type(error).__name__}: {error}"


def module(name: str, needs_gpu: bool = False, device: torch.device | None = None) -> Any:
    """The module.

    Raises:
        AbsentError: it is not installed, or does not load.
    """
    if needs_gpu and device is not None and device.type != "cuda":
        raise AbsentError("serves CUDA devices only")
    found = _imported(name)
    if isinstance(found, str):
        hint = _HINTS.get(name.partition(".")[0])
        raise AbsentError(found + (f"; {hint}" if hint else ""))
    return found


def deepspeed_adam(may_build: bool) -> Callable[..., torch.optim.Optimizer]:
    """The class of DeepSpeed's CPU Adam. It compiles itself when it is first made, which takes minutes.

    Args:
        may_build: whether to wait for that.

    Raises:
        AbsentError: it is not there, does not build, or would have to be built first.
    """
    if torch.cuda.is_available():
        raise AbsentError("measured on the CPU only")
    adam = module("deepspeed.ops.adam")
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    if not may_build and not any(root.rglob("cpu_adam.so")):
        raise AbsentError("its kernel is not built yet; the full run builds it")
    try:
        adam.DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(1))])
    except Exception as error:  # a build may fail in any way
        raise AbsentError(f"its kernel does not build: {type(error).__name__}: {str(error)[:200]}") from None
    return adam.DeepSpeedCPUAdam
