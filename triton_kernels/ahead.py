"""Every kernel in every form that ``launch.py`` asks for, compiled ahead of time: no GPU is needed for that."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import launch

_FLOAT32 = ("acc", "exp_avg", "exp_avg_sq", "scalars", "steps", "master")
_FLOAT64 = ("partials", "micro_partials", "factor", "control", "window", "hyper")
_POINTERS = {
    **dict.fromkeys(_FLOAT32, "*fp32"),
    **dict.fromkeys(_FLOAT64, "*fp64"),
    **dict.fromkeys(("table", "entries"), "*i64"),
    "active": "*u8",
}

# {name: (function in launch.py, its constants)}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"accumulate<{micro:d}, {factor:d}>": ("accumulate_kernel", {"KEEP_MICRO": micro, "HAS_FACTOR": factor})
        for micro in (False, True)
        for factor in (False, True)
    },
    "measure": ("measure_kernel", {}),
    **{
        f"finalize<{rule}, {micro:d}>": ("finalize_kernel", {"RULE": rule, "HAS_MICRO": micro})
        for rule in (0, 1, 2)
        for micro in (False, True)
    },
    "adam": ("adam_kernel", {}),
    "sgd": ("sgd_kernel", {}),
}


def compile_kernel(function: str, constants: dict[str, Any], capability: int) -> Any:
    """What Triton makes of a kernel for compute capability ``capability`` (90 is sm_90), as ``launch.py`` launches it.

    Returns:
        Triton's compiled kernel: ``asm["ptx"]``, ``asm["cubin"]``, ``metadata``.
    """
    kernel = getattr(launch, function)
    one_program = function == "finalize_kernel"
    pointers = {**_POINTERS, "extra": "*fp64" if one_program else "*fp32"}
    signature = {
        param.name: "constexpr" if param.is_constexpr else param.annotation_type or pointers[param.name]
        for param in kernel.params
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs={})
    options = launch.ONE_PROGRAM if one_program else launch.ELEMENTWISE
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
