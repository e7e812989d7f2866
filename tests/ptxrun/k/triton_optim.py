"""Triton kernels like those of a multi-tensor optimizer."""

# ruff: noqa: N803 - constexpr arguments are in capitals by custom

import triton
import triton.language as tl


@triton.jit
def t_acc(a_ptr, g_ptr, scale, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    a = tl.load(a_ptr + o, mask=m)
    g = tl.load(g_ptr + o, mask=m, other=0.0).to(tl.float32)
    tl.store(a_ptr + o, tl.fma(g, scale, a), mask=m)


@triton.jit
def t_accnorm(a_ptr, g_ptr, part_ptr, flag_ptr, scale, n, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    a = tl.load(a_ptr + o, mask=m, other=0.0)
    g = tl.load(g_ptr + o, mask=m, other=0.0).to(tl.float32)
    r = tl.fma(g, scale, a)
    tl.store(a_ptr + o, r, mask=m)
    ss = tl.sum(r * r, axis=0)
    bad = tl.max(((r != r) | (tl.abs(r) == float("inf"))).to(tl.int32), axis=0)
    if ATOMIC:
        tl.atomic_add(part_ptr, ss)
    else:
        tl.store(part_ptr + tl.program_id(0), ss)
    if bad != 0:
        tl.store(flag_ptr, 1)


@triton.jit
def t_adamw(
    p_ptr, m_ptr, v_ptr, g_ptr, pb_ptr, inv_scale_ptr, found_ptr, lr, b1, b2, eps, wd, bc1, bc2, n, BLOCK: tl.constexpr
):
    if tl.load(found_ptr) == 0.0:
        inv = tl.load(inv_scale_ptr)
        o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        k = o < n
        p = tl.load(p_ptr + o, mask=k)
        m = tl.load(m_ptr + o, mask=k)
        v = tl.load(v_ptr + o, mask=k)
        g = tl.load(g_ptr + o, mask=k).to(tl.float32) * inv
        p = p * (1.0 - lr * wd)
        m = b1 * m + (1.0 - b1) * g
        v = b2 * v + (1.0 - b2) * g * g
        d = tl.sqrt_rn(v) / bc2 + eps
        p = p - (lr / bc1) * (m / d)
        tl.store(p_ptr + o, p, mask=k)
        tl.store(m_ptr + o, m, mask=k)
        tl.store(v_ptr + o, v, mask=k)
        tl.store(pb_ptr + o, p.to(tl.bfloat16), mask=k)


@triton.jit
def t_sr(x_ptr, y_ptr, n, seed, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = o < n
    x = tl.load(x_ptr + o, mask=k)
    r = tl.randint(seed, o).to(tl.uint32)
    u = x.to(tl.uint32, bitcast=True)
    y = ((u + (r & 0xFFFF)) >> 16).to(tl.uint16)
    nf = (u & 0x7F800000) == 0x7F800000
    y = tl.where(nf, tl.where((u & 0x7FFFFF) != 0, 0x7FFF, u >> 16).to(tl.uint16), y)
    tl.store(y_ptr + o, y, mask=k)


@triton.jit
def t_rowsum(x_ptr, o_ptr, n, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    acc = tl.zeros((BLOCK,), tl.float32)
    for s in range(0, n, BLOCK):
        o = s + tl.arange(0, BLOCK)
        acc += tl.load(x_ptr + row * stride + o, mask=o < n, other=0.0).to(tl.float32)
    tl.store(o_ptr + row, tl.sum(acc, axis=0))
