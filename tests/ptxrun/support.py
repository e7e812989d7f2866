"""What several of the interpreter's tests use: reference arithmetic, and multi-tensor arguments."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import numpy as np
import torch

from . import cuda

KERNELS = Path(__file__).resolve().parent / "k"
ARCHS = (80, 90, 100)
MAX_TENSORS, MAX_BLOCKS = 24, 80  # of struct Meta in k/multi_tensor.cu

_TORCH = {"f16": torch.float16, "bf16": torch.bfloat16}
_LIBM = ctypes.CDLL("libm.so.6")
_LIBM.fmaf.restype, _LIBM.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
_LIBM.fma.restype, _LIBM.fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3


def module(name, arch, *flags):
    """A fresh Module of k/<name>.cu, compiled with nvcc's defaults (which fuse mul and add) unless flags say else."""
    return cuda.load(KERNELS / f"{name}.cu", arch, ("-std=c++17", *flags)).module


def to16(x, ty):
    """float32 -> bits of f16 or bf16, by torch."""
    return torch.from_numpy(x).to(_TORCH[ty]).view(torch.int16).numpy().view(np.uint16)


def from16(bits, ty):
    """Bits of f16 or bf16 -> float32, by torch."""
    return torch.from_numpy(bits.view(np.int16).copy()).view(_TORCH[ty]).float().numpy()


def to_float(x, ty):
    """``x`` of type ty (float32, or bits) -> float32."""
    return x if ty == "f32" else from16(x, ty)


def fmaf(a, b, c):
    """Elementwise float32 fma by the C library."""
    a, b, c = np.broadcast_arrays(*(np.asarray(x, np.float32) for x in (a, b, c)))
    flat = zip(a.ravel().tolist(), b.ravel().tolist(), c.ravel().tolist(), strict=True)
    return np.array([_LIBM.fmaf(*x) for x in flat], np.float32).reshape(a.shape)


def fma(a, b, c):
    """Elementwise float64 fma by the C library."""
    return np.array([_LIBM.fma(*x) for x in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)])


def acc_and_grads(ty, sizes, seed=0):
    """[(fp32 accumulator, gradient of type ty)] of these sizes."""
    r = np.random.default_rng(seed)
    out = []
    for n in sizes:
        acc, grad = r.standard_normal(n).astype(np.float32), (r.standard_normal(n) * 3).astype(np.float32)
        out.append((acc, grad if ty == "f32" else to16(grad, ty)))
    return out


def multi_tensor_meta(mod, tensors, chunk, misalign=None):
    """Puts the tensors into memory; -> (struct Meta as bytes, blocks, addresses of the accumulators).

    ``misalign``: {tensor: (bytes for the accumulator, bytes for the gradient)}.
    """
    accs, grads, sizes, block_tensor, block_chunk = [], [], [], [], []
    for i, (acc, grad) in enumerate(tensors):
        for_acc, for_grad = (misalign or {}).get(i, (0, 0))
        accs.append(mod.mem.alloc(acc, f"acc{i}", misalign=for_acc))
        grads.append(mod.mem.alloc(grad, f"grad{i}", misalign=for_grad))
        sizes.append(acc.size)
        n_chunks = -(-acc.size // chunk)
        block_tensor += [i] * n_chunks
        block_chunk += range(n_chunks)
    assert len(accs) <= MAX_TENSORS
    assert len(block_tensor) <= MAX_BLOCKS
    columns = [(accs, "Q", MAX_TENSORS), (grads, "Q", MAX_TENSORS), (sizes, "q", MAX_TENSORS)]
    columns += [(block_tensor, "B", MAX_BLOCKS), (block_chunk, "i", MAX_BLOCKS)]
    meta = b"".join(struct.pack(f"<{n}{code}", *values, *[0] * (n - len(values))) for values, code, n in columns)
    return meta, len(block_tensor), accs
