"""The Triton backend, as far as it can be asked about without importing Triton.

Triton is imported when a device is served by it, never by ``import fusedaccum``: it costs more than all the rest.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from types import ModuleType

DEVICE_TYPES = ("cuda", "xpu")
"""What torch calls the devices that Triton compiles for; AMD's are "cuda" too."""
OLDEST = (3, 6)
"""The Triton of torch 2.10. 3.5.0 flushes subnormals: its ``tl.div_rn`` is ``div.rn.ftz.f32``, the root likewise."""


@cache
def version() -> str | None:
    """Triton's version; None if it is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    for name in ("triton", "triton-rocm", "triton-xpu", "pytorch-triton-rocm", "pytorch-triton-xpu", "pytorch-triton"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(import_module("triton").__version__)


@cache
def why_not() -> str | None:
    """Why Triton serves no device here; None if it does, and then it is imported."""
    found = version()
    if found is None:
        return "triton is not installed; `pip install triton`"
    numbers = tuple(int(number) for number in found.split("+")[0].split(".")[:2] if number.isdigit())
    if numbers < OLDEST:
        return f"triton is {found}; accepted: {'.'.join(map(str, OLDEST))} or newer"
    try:
        launch()
    except Exception as error:  # whatever a foreign package raises, another backend has to serve
        return f"triton {found} does not work here: {type(error).__name__}: {error}"
    return None


def launch() -> ModuleType:
    """The module that has the ops."""
    return import_module("fusedaccum.triton_kernels.launch")


def compile_times(capability: int) -> Iterator[tuple[str, float]]:
    """(kernel, seconds that Triton takes to compile it anew) for a compute capability, as 90; no GPU is needed."""
    ahead = import_module("fusedaccum.triton_kernels.ahead")
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            for name, (function, constants) in ahead.VARIANTS.items():
                start = time.perf_counter()
                ahead.compile_kernel(function, constants, capability)
                yield name, time.perf_counter() - start
        finally:
            del os.environ["TRITON_CACHE_DIR"]
            if before is not None:
                os.environ["TRITON_CACHE_DIR"] = before
