"""Random scalar programs in the common part of CUDA C++ and C++.

No program has undefined behaviour: signed arithmetic is done on unsigned types, shift counts are masked, divisors are
odd or at least 1, and floats are clamped before they become integers.
"""

from __future__ import annotations

import random

C_TYPES = {
    "i": "int",
    "u": "unsigned",
    "l": "long long",
    "m": "unsigned long long",
    "f": "float",
    "d": "double",
    "s": "short",
    "c": "signed char",
}
VARIABLES = {
    "i": ["i0", "i1", "i2"],
    "u": ["u0", "u1", "u2"],
    "l": ["l0", "l1"],
    "m": ["m0", "m1"],
    "f": ["f0", "f1", "f2"],
    "d": ["d0", "d1"],
    "s": ["s0"],
    "c": ["c0"],
}
_UNSIGNED = {"i": "u", "u": "u", "l": "m", "m": "m"}

_PRELUDE = r"""
#ifdef __CUDACC__
#define FN __device__ __forceinline__
#define BITS(x) __float_as_uint(NN(x))
#define MULHI(a, b) __umul64hi(a, b)
#else
#include <math.h>
#include <string.h>
#define FN static inline
static inline unsigned bits_(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
#define BITS(x) bits_(NN(x))
#define MULHI(a, b) (unsigned long long)(((unsigned __int128)(a) * (b)) >> 64)
#endif
FN float NN(float x) { return x == x ? x : 0.f; }
FN int F2I_i(float x) { return x == x ? (int)(x > 1e9f ? 1e9f : x < -1e9f ? -1e9f : x) : 0; }
FN unsigned F2I_u(float x) { return x == x ? (unsigned)(x > 4e9f ? 4e9f : x < 0.f ? 0.f : x) : 0u; }
#define FMA_f fmaf
#define FMA_d fma
#define SQRT_f sqrtf
#define SQRT_d sqrt
#define ABS_f fabsf
#define ABS_d fabs
#define FLOOR_f floorf
#define FLOOR_d floor
#define CEIL_f ceilf
#define CEIL_d ceil
#define TRUNC_f truncf
#define TRUNC_d trunc
#define RINT_f rintf
#define RINT_d rint
struct O {
  long long l0, l1;
  unsigned long long m0, m1;
  double d0, d1;
  int i0, i1, i2;
  unsigned u0, u1, u2;
  float f0, f1, f2;
  int s0, c0, pad;
};
FN void prog(int x, unsigned y, O* o) {
  int i0 = x, i1 = (int)(y >> 3), i2 = x ^ 77;
  unsigned u0 = y, u1 = (unsigned)x * 2654435761u, u2 = y >> 7;
  long long l0 = (long long)x * 1000003, l1 = (long long)y << 20;
  unsigned long long m0 = (unsigned long long)y * 0x9E3779B97F4A7C15ull, m1 = y;
  float f0 = x * 0.25f, f1 = (float)y * 1e-6f, f2 = 1.5f;
  double d0 = x * 0.3, d1 = y * 1e-3;
  short s0 = (short)x;
  signed char c0 = (signed char)y;
"""
_POSTLUDE = """
  o->l0 = l0; o->l1 = l1; o->m0 = m0; o->m1 = m1; o->d0 = d0; o->d1 = d1; o->i0 = i0; o->i1 = i1; o->i2 = i2;
  o->u0 = u0; o->u1 = u1; o->u2 = u2; o->f0 = f0; o->f1 = f1; o->f2 = f2; o->s0 = s0; o->c0 = c0; o->pad = 0;
}
"""
_DEVICE_MAIN = """
extern "C" __global__ void k(const int* x, const unsigned* y, O* o, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) prog(x[i], y[i], o + i);
}
"""
_HOST_MAIN = """
extern "C" void k(const int* x, const unsigned* y, O* o, int n) { for (int i = 0; i < n; i++) prog(x[i], y[i], o + i); }
"""


def _leaf(r, ty):
    variable = r.choice(VARIABLES[ty])
    if r.random() >= 0.2:
        return variable
    return {
        "i": lambda: str(r.randint(-100, 100)),
        "u": lambda: f"{r.getrandbits(32)}u",
        "l": lambda: f"{r.randint(-(10**12), 10**12)}ll",
        "m": lambda: f"{r.getrandbits(63)}ull",
        "f": lambda: f"{r.uniform(-9, 9):.4f}f",
        "d": lambda: f"{r.uniform(-9, 9):.6f}",
        "s": lambda: f"(short){r.randint(-999, 999)}",
        "c": lambda: f"(signed char){r.randint(-99, 99)}",
    }[ty]()


def expression(r, ty, depth):
    """A random expression of type ``ty``."""
    if depth <= 0 or r.random() < 0.12:
        return _leaf(r, ty)
    if ty in _UNSIGNED:
        return _integer(r, ty, lambda t: expression(r, t, depth - 1))
    if ty in "fd":
        return _float(r, ty, lambda t: expression(r, t, depth - 1))
    return f"({C_TYPES[ty]})({expression(r, 'i', depth - 1)})"


def _integer(r, ty, e):
    u, t, bits = C_TYPES[_UNSIGNED[ty]], C_TYPES[ty], 31 if ty in "iu" else 63
    case = r.randrange(15)
    if case < 5:
        return f"({t})(({u}){e(ty)} {r.choice('+-*&|^')} ({u}){e(ty)})"
    if case == 5:
        return f"({t})(({u}){e(ty)} << ({e('u')} & {bits}))"
    if case == 6:
        return f"({t})({e(ty)} >> ({e('u')} & {bits}))"
    if case == 7:
        return f"({t})(({u}){e(ty)} {r.choice('/%')} (({u}){e(ty)} | 1u))"
    if case == 8:
        return f"({t})({e(ty)} {r.choice('/%')} ((({t})({e(ty)} & 1023)) + 1))"
    if case == 9:
        compare = r.choice(["<", ">", "<=", ">=", "==", "!="])
        return f"({e(ty)} {compare} {e(ty)} ? {e(ty)} : {e(ty)})"
    if case == 10:
        clamped = "u" if ty in "um" else "i"
        return f"({t})F2I_{clamped}({e('f')})" if r.random() < 0.6 else f"({t})F2I_i((float){e('d')})"
    if case == 11:
        return f"({t})({e(r.choice([x for x in 'iulmsc' if x != ty]))})"
    if case == 12:
        return f"({t})~({u}){e(ty)}"
    if case == 13:
        return f"({t})BITS({e('f')})" if ty in "iu" else f"({t})MULHI({e('m')}, {e('m')})"
    return f"({t})({e(ty)} > {e(ty)} ? ({u}){e(ty)} - 1u : -({u}){e(ty)})"


def _float(r, ty, e):
    case = r.randrange(11)
    if case < 4:
        return f"({e(ty)} {r.choice('+-*/')} {e(ty)})"
    if case == 4:
        return f"FMA_{ty}({e(ty)}, {e(ty)}, {e(ty)})"
    if case == 5:
        return f"SQRT_{ty}(ABS_{ty}({e(ty)}))"
    if case == 6:
        return f"{r.choice(['FLOOR', 'CEIL', 'TRUNC', 'RINT', 'ABS'])}_{ty}({e(ty)})"
    if case == 7:
        return f"({e(ty)} {r.choice(['<', '>', '<=', '>='])} {e(ty)} ? {e(ty)} : {e(ty)})"
    if case == 8:
        return f"({C_TYPES[ty]})({e(r.choice('iulm'))})"
    if case == 9:
        return f"({C_TYPES[ty]})({e('d' if ty == 'f' else 'f')})"
    return f"(-({e(ty)}))"


def statements(r, depth, n):
    """``n`` random statements: assignments, branches and short loops."""
    out = []
    for _ in range(n):
        chance = r.random()
        if depth and chance < 0.2:
            condition = f"{expression(r, 'i', 1)} {r.choice('<>')} {expression(r, 'i', 1)}"
            yes, no = statements(r, depth - 1, 3), statements(r, depth - 1, 2)
            out.append(f"if ({condition}) {{ {yes} }} else {{ {no} }}")
        elif depth and chance < 0.35:
            k = f"k{r.getrandbits(30)}"
            head = f"for (int {k} = 0; {k} < (int)({expression(r, 'u', 1)} & 7); {k}++)"
            body = statements(r, depth - 1, 3)
            out.append(f"{head} {{ {body} if ({expression(r, 'i', 1)} == 7) break; }}")
        else:
            ty = r.choice("iiuulmffdsc")
            out.append(f"{r.choice(VARIABLES[ty])} = {expression(r, ty, 4)};")
    return "\n  ".join(out)


def program(seed):
    """(CUDA source of a kernel ``k``, C++ source of a function ``k``) that compute the same."""
    source = _PRELUDE + "  " + statements(random.Random(seed), 2, 7) + _POSTLUDE
    return source + _DEVICE_MAIN, source + _HOST_MAIN
