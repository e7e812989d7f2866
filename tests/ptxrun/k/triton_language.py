"""Triton kernels that use more of the language: pipelining, 2d, scans, sorts, atomics, dot, fp8."""

# ruff: noqa: N803 - constexpr arguments are in capitals by custom

import triton
import triton.language as tl


@triton.jit
def p_sum(x_ptr, o_ptr, n, BLOCK: tl.constexpr, ST: tl.constexpr):
    acc = tl.zeros((BLOCK,), tl.float32)
    for s in tl.range(tl.program_id(0) * BLOCK, n, BLOCK * tl.num_programs(0), num_stages=ST):
        o = s + tl.arange(0, BLOCK)
        acc += tl.load(x_ptr + o, mask=o < n, other=0.0).to(tl.float32)
    tl.atomic_add(o_ptr, tl.sum(acc, axis=0))


@triton.jit
def softmax2d(x_ptr, o_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    r = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    c = tl.arange(0, BN)[None, :]
    k = (r < M) & (c < N)
    x = tl.load(x_ptr + r * N + c, mask=k, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    tl.store(o_ptr + r * N + c, e / tl.sum(e, axis=1)[:, None], mask=k)


@triton.jit
def scan(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + o, mask=o < n, other=0)
    tl.store(o_ptr + o, tl.cumsum(x, axis=0), mask=o < n)


@triton.jit
def scatter_add(i_ptr, v_ptr, o_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = o < n
    tl.atomic_add(o_ptr + tl.load(i_ptr + o, mask=k, other=0), tl.load(v_ptr + o, mask=k, other=0), mask=k)


@triton.jit
def srt(x_ptr, o_ptr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(o_ptr + o, tl.sort(tl.load(x_ptr + o)))


@triton.jit
def mm(a_ptr, b_ptr, c_ptr, B: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(a_ptr + i[:, None] * B + i[None, :])
    b = tl.load(b_ptr + i[:, None] * B + i[None, :])
    tl.store(c_ptr + i[:, None] * B + i[None, :], tl.dot(a, b))


@triton.jit
def f16x(x_ptr, y_ptr, o_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + o, mask=o < n)
    y = tl.load(y_ptr + o, mask=o < n)
    tl.store(o_ptr + o, tl.maximum(x * y + x, -x) - y, mask=o < n)


@triton.jit
def fp8(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + o, tl.load(x_ptr + o, mask=o < n).to(tl.float8e4nv), mask=o < n)
