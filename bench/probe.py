"""Builds ``probe.cpp`` for this processor and calls it on torch tensors."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
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


def _address(buffer: Tensor, n: int) -> ctypes.c_void_p:
    # Streaming stores go by whole cache lines.
    if buffer.numel() != n or not buffer.is_contiguous() or buffer.data_ptr() % 64:
        raise ValueError("probe: buffers are contiguous, of one size and aligned to 64 bytes")
    return ctypes.c_void_p(buffer.data_ptr())


def add(acc: Tensor, grad: Tensor, threads: int = THREADS) -> None:
    """Reads ``grad`` (n,), reads and writes ``acc`` (n,), each of 2 or 4 bytes an element; ``acc`` is no narrower."""
    n = acc.numel()
    sizes = (ctypes.c_int(acc.element_size()), ctypes.c_int(grad.element_size()))
    library().probe_add(_address(acc, n), _address(grad, n), *sizes, ctypes.c_int64(n), ctypes.c_int(threads))


def store(acc: Tensor, grad: Tensor, streaming: bool, threads: int = THREADS) -> None:
    """Reads ``grad`` (n,) of 2 or 4 bytes an element, writes ``acc`` (n,) float32. ``streaming``: past the caches."""
    n = acc.numel()
    numbers = (ctypes.c_int64(n), ctypes.c_int(streaming), ctypes.c_int(threads))
    library().probe_store(_address(acc, n), _address(grad, n), ctypes.c_int(grad.element_size()), *numbers)


def update(
    param: Tensor | None, buffers: Sequence[Tensor], acc: Tensor, streaming: bool, threads: int = THREADS
) -> None:
    """Reads ``acc``, reads and writes ``buffers`` (master and one or two states), all (n,) float32; writes ``param``,
    (n,) of 2 bytes an element, if there is one."""
    n = acc.numel()
    addresses = (ctypes.c_void_p * len(buffers))(*(_address(buffer, n).value for buffer in buffers))
    library().probe_update(
        None if param is None else _address(param, n),
        addresses,
        ctypes.c_int(len(buffers) - 1),
        _address(acc, n),
        ctypes.c_int64(n),
        ctypes.c_int(streaming),
        ctypes.c_int(threads),
    )
