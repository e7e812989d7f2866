"""Element arithmetic of the Triton kernels: ``csrc/math.h``, formula by formula, in Triton's language.

Every operation is one IEEE operation, rounded once: kernels are compiled with ``enable_fp_fusion=False``, and ``/`` on
fp32 is never written, because Triton makes ``div.full`` of it. 16-bit values travel as their bits: Triton's own
conversions lose the sign of a NaN on a GPU and round ties away from even in the interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusedaccum import layout

LANES = tl.constexpr(layout.LANES)
CHUNK = tl.constexpr(layout.CHUNK)
SLOT_COLUMNS = tl.constexpr(len(layout.SLOT_COLUMNS))

FLOAT32 = tl.constexpr(0)
BFLOAT16 = tl.constexpr(1)
FLOAT16 = tl.constexpr(2)
"""``Dtype`` of csrc/layout.h."""


@triton.jit
def widened(bits, is_bfloat16):
    """fp32 of 16-bit values given as bits (uint16), exactly. Hardware keeps binary16's subnormals."""
    from_bfloat16 = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    from_float16 = bits.to(tl.float16, bitcast=True).to(tl.float32)
    return tl.where(is_bfloat16, from_bfloat16, from_float16)


@triton.jit
def rounded_to_bfloat16(value):
    """The bits (uint16) of fp32 values rounded to nearest, ties to even; a NaN becomes the quiet NaN of its sign."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = ((bits >> 16) & 0x8000) | 0x7FC0
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet_nan, rounded).to(tl.uint16)


@triton.jit
def rounded_to_float16(value):
    """As ``rounded_to_bfloat16``; overflow to infinity, subnormals kept: the hardware's own rounding but for NaN."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = value.to(tl.float16).to(tl.uint16, bitcast=True)
    quiet_nan = (((bits >> 16) & 0x8000) | 0x7E00).to(tl.uint16)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet_nan, rounded)


@triton.jit
def rounded_to(value, is_bfloat16):
    """The bits (uint16) of fp32 values in the 16-bit dtype. All programs of a tensor take the same branch."""
    if is_bfloat16:
        bits = rounded_to_bfloat16(value)
    else:
        bits = rounded_to_float16(value)
    return bits


@triton.jit
def adam_update(param, exp_avg, exp_avg_sq, max_exp_avg_sq, acc, amsgrad, scalars):
    """``adam_update`` of csrc/math.h, where the sources are named. ``scalars``: the first ten of ``AdamScalars``."""
    param = param * scalars[3]
    grad = acc * scalars[0] + scalars[9] * param
    exp_avg = scalars[4] * exp_avg + scalars[5] * grad
    exp_avg_sq = scalars[6] * exp_avg_sq + scalars[7] * (grad * grad)
    # NaN wins, as in torch.maximum.
    keep = (max_exp_avg_sq != max_exp_avg_sq) | (exp_avg_sq <= max_exp_avg_sq)
    second = tl.where(amsgrad & keep, max_exp_avg_sq, exp_avg_sq)
    denominator = tl.sqrt_rn(second) * scalars[2] + scalars[8]
    param = param - scalars[1] * tl.div_rn(exp_avg, denominator)
    return param, exp_avg, exp_avg_sq, second


@triton.jit
def sgd_update(param, momentum_buffer, acc, has_momentum, scalars):
    """``sgd_update`` of csrc/math.h. ``scalars``: the first seven of ``SgdScalars``."""
    direction = acc * scalars[0] + scalars[4] * param
    later = scalars[2] * momentum_buffer + scalars[3] * direction
    buffer = tl.where(scalars[6] != 0.0, direction, later)
    lookahead = direction + scalars[2] * buffer
    moved = tl.where(scalars[5] != 0.0, lookahead, buffer)
    param = param - scalars[1] * tl.where(has_momentum, moved, direction)
    return param, buffer


@triton.jit
def integer_power(base, exponent):
    """``base ** exponent`` by squaring, fp64 of int64. 25 bits hold every count that the fp32 steps can reach."""
    result = base * 0.0 + 1.0
    for _ in range(25):
        result = tl.where((exponent & 1) != 0, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result
