"""What the interpreter's tests need beyond Python: they are skipped where it is missing."""

from __future__ import annotations

import os
import shutil
from types import SimpleNamespace

import pytest

from . import cuda


@pytest.fixture(scope="session")
def nvcc():
    """The path of nvcc."""
    path = cuda.nvcc_path()
    if path is None:
        pytest.skip("needs nvcc (CUDA toolkit) on PATH or in CUDA_HOME/bin")
    return path


@pytest.fixture(scope="session")
def host_compiler():
    """The path of a g++ that compiles for this machine, with FMA instructions."""
    path = shutil.which("g++")
    if path is None:
        pytest.skip("needs g++ to run the same program on the host")
    return path


@pytest.fixture(scope="session")
def triton_kernels():
    """``aot``, ``optim`` and ``language`` of tests/ptxrun/k."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cuda.cache_dir() / "triton"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)  # it is read when a kernel is defined, Triton's own too
        pytest.importorskip("triton", reason="needs triton, for its ahead-of-time compiler")
        import triton

        from .k import triton_language, triton_optim
        from .k.aot import aot
    if not isinstance(triton.language.sum, triton.runtime.JITFunction):
        pytest.skip("triton was imported with TRITON_INTERPRET=1: its own functions cannot be compiled in this process")
    return SimpleNamespace(aot=aot, optim=triton_optim, language=triton_language)
