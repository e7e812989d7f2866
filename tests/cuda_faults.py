"""Faults that the kernels' tests should find: test_cuda_planted_faults.py plants them in a copy of csrc."""

from __future__ import annotations

import math
from functools import partial

from cuda_cases import (
    check_accumulate,
    check_finalize,
    check_overflow,
    every_grad,
    tiny_grads,
    wide,
)
from planted_faults import DIFFERS, FAR, HUGE, NARROW, UNINITIALISED, Fault, adam, boundary, sgd

from fusedaccum.layout import CHUNK, RULE_NONE

grads = partial(check_accumulate, grads=every_grad((7, 1025, CHUNK + 9)))
micro = partial(check_accumulate, grads=every_grad((7, 1025, CHUNK + 9), parity=1), micro=True)

FAULTS = {
    # Tails and lanes.
    "accumulate: no tail guard": Fault(
        "accumulate.cu",
        "const int end = n < full + first_lane + kPerThread ? n : full + first_lane + kPerThread;",
        "const int end = full + first_lane + kPerThread;",
        grads,
        UNINITIALISED,
    ),
    "step: no tail guard": Fault(
        "step.cu", "if (full + first + j < rule.at.n) rule.one", "rule.one", sgd, UNINITIALISED
    ),
    "rescan: no tail guard": Fault(
        "accumulate.cu",
        "const int end = n < row + kPerThread ? n : row + kPerThread;",
        "const int end = row + kPerThread;",
        partial(check_overflow, op="accumulate_", sizes=(2049,)),
        UNINITIALISED,
    ),
    "accumulate: tail in a wrong lane": Fault(
        "accumulate.cu", "i % kPerThread == j ?", "0 == j ?", grads, f"partials: {DIFFERS}"
    ),
    "accumulate: a row too few": Fault(
        "accumulate.cu",
        "for (int row = 0; row < full; row += kLanes) {",
        "for (int row = kLanes; row < full; row += kLanes) {",
        grads,
        "never written",
    ),
    # The tree.
    "tree: wrong partner": Fault(
        "launch.cuh",
        "lanes[j] += shared[j][thread];",
        "lanes[j] += shared[j][thread ^ 1];",
        partial(grads, make=wide),
        DIFFERS,
    ),
    "tree: strides upwards": Fault(
        "launch.cuh",
        "for (int stride = kPerThread / 2; stride > 0; stride /= 2) {",
        "for (int stride = 1; stride < kPerThread; stride *= 2) {",
        partial(grads, make=wide),
        DIFFERS,
    ),
    "finalize: wrong lane": Fault(
        "finalize.cu",
        "lanes[thread].acc += lanes[thread + stride].acc;",
        "lanes[thread].acc += lanes[2 * stride - 1 - thread].acc;",
        partial(check_finalize, boundary=boundary),
        f"control: {DIFFERS}",
    ),
    # Barriers.
    "tree: no barrier after the stores": Fault(
        "launch.cuh",
        "    __syncthreads();\n    if (thread < stride) {",
        "    if (thread < stride) {",
        grads,
        "race|uninitialised shared",
    ),
    "tree: no barrier after the loads": Fault(
        "launch.cuh",
        "    __syncthreads();\n  }\n  if (thread < 32) {",
        "  }\n  if (thread < 32) {",
        grads,
        "race",
    ),
    "accumulate: no barrier before the total": Fault(
        "accumulate.cu",
        "total = sum;\n  __syncthreads();",
        "total = sum;",
        grads,
        "race|uninitialised shared",
    ),
    "step: no barrier after the start": Fault("step.cu", "  __syncthreads();\n", "", sgd, "race|uninitialised shared"),
    "finalize: no barrier in the tree": Fault(
        "finalize.cu",
        "thread + stride].micro;\n    }\n    __syncthreads();",
        "thread + stride].micro;\n    }",
        partial(check_finalize, boundary=boundary),
        "race",
    ),
    # Indices of 32 bits.
    "chunk's place in its tensor": Fault(
        "launch.cuh",
        "static_cast<int64_t>(chunk.index) * kChunk",
        "static_cast<int32_t>(chunk.index * static_cast<uint32_t>(kChunk))",
        grads,
        "out of bounds",
        HUGE,
    ),
    "accumulate: offset": Fault(
        "accumulate.cu",
        "offset_elems = slot->offset_elems",
        "offset_elems = static_cast<int32_t>(slot->offset_elems)",
        grads,
        "out of bounds",
        FAR,
    ),
    "accumulate: chunk": Fault(
        "accumulate.cu",
        "place = {slot->first_chunk + chunk.index,",
        "place = {static_cast<int32_t>(slot->first_chunk + chunk.index),",
        grads,
        "out of bounds",
        FAR,
    ),
    "step: offset": Fault("step.cu", "const int64_t at =", "const int at = (int)", adam, "out of bounds", FAR),
    "step: master offset": Fault(
        "step.cu",
        "args.master + slot.master_offset_elems",
        "args.master + static_cast<int32_t>(slot.master_offset_elems)",
        sgd,
        "out of bounds",
        FAR,
    ),
    # Wrong data.
    "first add reads the accumulator": Fault(
        "accumulate.cu",
        "const float result = kFirst ? scaled(value, scale) : accumulated(acc[i], value, scale);",
        "const float result = accumulated(acc[i], value, scale);",
        grads,
        "read of uninitialised global memory",
    ),
    "wrong entry": Fault(
        "launch.cuh",
        "block.entries[middle].end <= at",
        "block.entries[middle].end < at",
        grads,
        f"{UNINITIALISED}|race",
    ),
    "wrong entry of many": Fault(
        "launch.cuh",
        "high = middle;",
        "high = middle == 1500 ? 1499 : middle;",
        partial(check_accumulate, grads=tiny_grads(2040)),
        f"{UNINITIALISED}|race",
    ),
    "every step takes the first slot's scalars": Fault(
        "step.cu", "(block.args.scalars)[chunk.entry.slot]", "(block.args.scalars)[0]", sgd, UNINITIALISED
    ),
    "a fused product": Fault(
        "../math.h", "return acc + grad * scale;", "return fmaf(grad, scale, acc);", grads, f"acc: {DIFFERS}"
    ),
    "every other parameter loses a bit": Fault(
        "vec.cuh",
        "static_cast<uint32_t>(high.bits) << 16",
        "static_cast<uint32_t>(high.bits & 0xfffe) << 16",
        adam,
        DIFFERS,
    ),
    # What is not finite.
    "no second look": Fault(
        "accumulate.cu",
        "if (total - total != 0.0) {",
        "if (false) {",
        partial(check_overflow, op="accumulate_", sizes=(2049,)),
        f"partials: {DIFFERS}|, not ",
    ),
    "a second look at NaN only": Fault(
        "accumulate.cu",
        "if (total - total != 0.0) {",
        "if (total != total) {",
        partial(check_overflow, op="measure_", sizes=(2049,)),
        f"partials: {DIFFERS}|, not ",
    ),
    "step never skips": Fault(
        "step.cu", "if (block.args.control[kSkipped] != 0.0) return;", "", partial(sgd, skipped=1.0), UNINITIALISED
    ),
    "step looks at found_inf": Fault(
        "step.cu", "control[kSkipped]", "control[kFoundInf]", partial(adam, skipped=1.0), UNINITIALISED
    ),
    "finalize ages slots on found_inf": Fault(
        "finalize.cu",
        "if (!args.advance || skipped) return;",
        "if (!args.advance) return;",
        partial(check_finalize, boundary=partial(boundary, partial_=math.inf)),
        f"{UNINITIALISED}|read-only",
    ),
    "finalize counts inactive slots": Fault(
        "finalize.cu",
        "if (!args.active[slot]) continue;",
        "",
        partial(check_finalize, boundary=partial(boundary, inactive=True)),
        UNINITIALISED,
    ),
    # A scale that the device knows.
    "the factor is not looked at": Fault(
        "accumulate.cu",
        "effective_scale(block.args.scale, block.args.factor)",
        "effective_scale(block.args.scale, nullptr)",
        partial(grads, factor=0.7),
        f"not |{DIFFERS}",
    ),
    "a scale of zero is one as any other": Fault(
        "accumulate.cu", "scale == 0.0f", "false", partial(grads, factor=0.0), UNINITIALISED
    ),
    "a scale of zero stores nothing": Fault(
        "accumulate.cu", "zero_chunk(acc, n);", "", partial(grads, factor=0.0), "uninitialised|never written"
    ),
    "a scale of zero is a first add": Fault(
        "accumulate.cu", "if (scale == 0.0f && !first) return;", "", partial(grads, factor=0.0), "read-only|written"
    ),
    # Statistics.
    "micro: squares of the accumulator": Fault(
        "accumulate.cu",
        "lanes.micro[half + j] += scaled(value, scale) * scaled(value, scale);",
        "lanes.micro[half + j] += result[j] * result[j];",
        micro,
        f"micro_partials: {DIFFERS}",
    ),
    "micro: squares of the gradient": Fault(
        "accumulate.cu", "scaled(value, scale) * scaled(value, scale)", "value * value", micro, DIFFERS
    ),
    "micro: tail in a wrong lane": Fault(
        "accumulate.cu",
        "add_to_lane(lanes.micro, i,",
        "add_to_lane(lanes.micro, 0,",
        micro,
        f"micro_partials: {DIFFERS}",
    ),
    "micro: stored, not added": Fault(
        "accumulate.cu",
        "micro_partials[place.partial] += micro",
        "micro_partials[place.partial] = micro",
        micro,
        "not .* \\+|differ",
    ),
    "micro: a first add is added": Fault(
        "accumulate.cu",
        "if (kMicro && first) block.args.micro_partials[place.partial] = sum;",
        "if (kMicro && first) block.args.micro_partials[place.partial] += sum;",
        micro,
        UNINITIALISED,
    ),
    "micro: a first add is left out": Fault(
        "accumulate.cu",
        "if (kMicro && first) block.args.micro_partials[place.partial] = sum;",
        "",
        micro,
        "never written",
    ),
    "micro: read where it is not kept": Fault(
        "finalize.cu",
        "if (args.has_micro) sums.micro",
        "sums.micro",
        partial(check_finalize, boundary=boundary, micro=False),
        "out of bounds",
    ),
    "finalize: the wrong sum from elsewhere": Fault(
        "finalize.cu",
        "sums.micro += args.extra[1];",
        "sums.micro += args.extra[0];",
        partial(check_finalize, boundary=boundary, extra=[1.5, 2.5]),
        f"control: {DIFFERS}",
    ),
    # The window.
    "the window's weight is not begun afresh": Fault(
        "../math.h",
        "  window[kWeight] = 0.0;\n",
        "",
        partial(check_finalize, boundary=boundary),
        f"window: {DIFFERS}",
    ),
    "the window is advanced by every thread": Fault(
        "finalize.cu",
        "if (args.advance) advance_window(args.window, b,",
        "}\n  {\n    const Boundary b = boundary(args.window, lanes[0].acc, lanes[0].micro, args.numerator,"
        " args.weight, args.weight_sq, args.max_norm);\n    if (args.advance) advance_window(args.window, b,",
        partial(check_finalize, boundary=boundary),
        "race",
    ),
    "no barrier before the scalars": Fault(
        "finalize.cu",
        "  __syncthreads();\n  if (!args.advance",
        "  if (!args.advance",
        partial(check_finalize, boundary=boundary),
        "race|uninitialised shared",
    ),
    "the device's weight is not looked at": Fault(
        "../math.h",
        "const double total = weight + window[kWeight];\n  const double total_sq",
        "const double total = weight;\n  const double total_sq",
        partial(check_finalize, boundary=boundary),
        f"control: {DIFFERS}",
    ),
    "a window without weight is a step": Fault(
        "../math.h",
        "b.found_inf == 0.0 && total > 0.0",
        "b.found_inf == 0.0",
        partial(check_finalize, boundary=boundary, weight=-9.0),
        f"{UNINITIALISED}|read-only",
    ),
    "scalars without a rule": Fault(
        "finalize.cu",
        "else if (args.rule == kSgd)",
        "else",
        partial(check_finalize, boundary=boundary, rule=RULE_NONE),
        f"{UNINITIALISED}|read-only",
    ),
    "advances though it should not": Fault(
        "finalize.cu",
        "if (args.advance) advance_window",
        "advance_window",
        partial(check_finalize, boundary=boundary, advance=False),
        f"{UNINITIALISED}|read-only",
    ),
    # Accesses.
    "the master's alignment is not looked at": Fault(
        "step.cu", "is_aligned(here.master) && ", "", partial(sgd, unaligned="master"), "misaligned global"
    ),
    "the gradient's alignment is not looked at": Fault(
        "accumulate.cu",
        "is_aligned(acc) && is_aligned(grad)",
        "is_aligned(acc)",
        partial(check_accumulate, grads=every_grad((1025,), shifts=(1,))),
        "misaligned global",
    ),
    "narrow loads": Fault(
        "vec.cuh",
        "if (kAligned) {\n    const uint4 words = load16<kGlobal>(from);\n    out[0]",
        "if (false) {\n    const uint4 words = load16<kGlobal>(from);\n    out[0]",
        grads,
        NARROW,
    ),
    "narrow stores": Fault(
        "vec.cuh",
        "if (kAligned) {\n    store16<kGlobal>(to, make_uint4(bits_of",
        "if (false) {\n    store16<kGlobal>(to, make_uint4(bits_of",
        grads,
        NARROW,
    ),
}
