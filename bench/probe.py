"""Builds ``probe.cpp`` for this processor and calls it on torch tensors."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from torch import Tensor

from .shapes import THREADS


@cache
def library() -> ctypes.CDLL:
    """Compiles once a process, into a folder that is gone again when the library is loaded.

    Raises:
        RuntimeError: no compiler, or it failed.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise RuntimeError(f"the probe needs a C++ compiler; {compiler} is not on PATH. Set CXX")
    source = Path(__file__).with_name("probe.cpp")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "probe.so"
        flags = ["-O3", "-march=native", "-pthread", "-shared", "-fPIC", "-std=c++17"]
        built = subprocess.run([compiler, *flags, str(source), "-o", str(target)], capture_output=True, text=True)
        if built.returncode != 0:
            raise RuntimeError(f"the probe does not compile:\n{built.stderr}")
        return ctypes.CDLL(str(target))


def _call(name: str, *buffers: Tensor) -> None:
    n = buffers[0].numel()
    assert all(buffer.numel() == n and buffer.is_contiguous() for buffer in buffers)
    pointers = [ctypes.c_void_p(buffer.data_ptr()) for buffer in buffers]
    library()[name](*pointers, ctypes.c_int64(n), ctypes.c_int(THREADS))


def accumulate(acc: Tensor, grad: Tensor) -> None:
    """Reads ``grad`` (n,) bfloat16, reads and writes ``acc`` (n,) float32: 10 bytes an element."""
    _call("probe_accumulate", acc, grad)


def first(acc: Tensor, grad: Tensor) -> None:
    """Reads ``grad`` (n,) bfloat16, writes ``acc`` (n,) float32: 6 bytes an element."""
    _call("probe_first", acc, grad)


def boundary(param: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, acc: Tensor) -> None:
    """Reads ``acc``, reads and writes the other three float32, writes ``param`` bfloat16: 30 bytes an element."""
    _call("probe_boundary", param, master, exp_avg, exp_avg_sq, acc)
