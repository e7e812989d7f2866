"""Compiles Triton kernels ahead of time, with no GPU."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

WARP_SIZE = 32


def aot(fn, signature, constants, cc, num_warps=4, *, divisible=(), enable_fp_fusion=False, **options):
    """Compiles for compute capability ``cc`` (90 is sm_90); the result has ``asm["ptx"]`` and ``metadata``.

    Args:
        signature: {argument: Triton type}; the other arguments are ``constants``.
        divisible: arguments that are multiples of 16, as Triton finds out itself when it launches.
        enable_fp_fusion: lets mul and add become fma. Given always: its default differs between Triton versions.
    """
    source = ASTSource(
        fn=fn,
        signature={name: signature.get(name, "constexpr") for name in fn.arg_names},
        constexprs=constants,
        attrs={(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    options |= {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
    return triton.compile(source, target=GPUTarget("cuda", cc, WARP_SIZE), options=options)
