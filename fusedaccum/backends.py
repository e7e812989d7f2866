"""Which backend serves which device, and why another does not.

A backend is a set of functions with the names and meanings of ``ops.SCHEMAS``. ``native`` is the compiled library,
``reference`` plain torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import layout, ops, reference

NAMES = ("native", "reference")
_PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class Backend:
    """The ops of one backend. ``name``: as in ``NAMES``; ``detail``: what exactly serves (an instruction set)."""

    name: str
    detail: str
    accumulate_: Callable[..., None]
    measure_: Callable[..., None]
    finalize_: Callable[..., None]
    adam_step_: Callable[..., None]
    sgd_step_: Callable[..., None]


class BackendUnavailableError(RuntimeError):
    """A backend was asked for by name and cannot serve the device."""


@dataclass(frozen=True)
class _Library:
    loaded: bool
    detail: str  # the instruction set, or why there is none


def build_record() -> dict[str, Any]:
    """What ``setup.py`` wrote down of the build: whether the CPU library was built, by what, or why not."""
    path = _PACKAGE / "_build.json"
    if not path.exists():
        return {"cpu": {"built": False, "reason": "this copy was never built; run `pip install .`"}}
    record: dict[str, Any] = json.loads(path.read_text())
    return record


@cache
def cpu_library() -> _Library:
    """Loads the CPU library once. Never raises: the reason is in ``detail``."""
    candidates = sorted(_PACKAGE.glob("_cpu*.so")) + sorted(_PACKAGE.glob("_cpu*.pyd"))
    if not candidates:
        return _Library(False, build_record()["cpu"].get("reason", "the library is not in the package"))
    try:
        torch.ops.load_library(str(candidates[0]))
        library = ctypes.CDLL(str(candidates[0]))
    except OSError as error:
        return _Library(False, f"{candidates[0].name} does not load: {error}")
    library.fusedaccum_cpu_isa.restype = ctypes.c_char_p
    isa = library.fusedaccum_cpu_isa()
    if isa is None:
        # Let an op say which values the variable may take; nothing is computed.
        raise BackendUnavailableError(_isa_error())
    return _Library(True, isa.decode())


def _isa_error() -> str:
    empty = torch.zeros(0)
    table = torch.zeros(0, len(layout.SLOT_COLUMNS), dtype=torch.int64)
    try:
        torch.ops.fusedaccum.measure_(torch.zeros(0, dtype=torch.float64), empty, table, [])
    except RuntimeError as error:
        return str(error)
    return f"FUSEDACCUM_ISA is {os.environ.get('FUSEDACCUM_ISA')!r}, which does not run here"


def _backend(name: str, detail: str, namespace: Any) -> Backend:
    return Backend(name, detail, **{op: getattr(namespace, op) for op in ops.SCHEMAS})


@cache
def _native() -> Backend:
    # The default overload is looked up once: the packet would resolve it anew at each call.
    packets = torch.ops.fusedaccum

    class Overloads:
        pass

    for op in ops.SCHEMAS:
        setattr(Overloads, op, staticmethod(getattr(packets, op).default))
    return _backend("native", cpu_library().detail, Overloads)


@cache
def _reference() -> Backend:
    return _backend("reference", "plain torch", reference)


def why_not(name: str, device: torch.device) -> str | None:
    """Why backend ``name`` cannot serve ``device``; None if it can."""
    if name == "reference":
        return None
    if device.type != "cpu":
        return f"there are no native kernels for {device.type} devices"
    library = cpu_library()
    return None if library.loaded else library.detail


@cache
def _warn_fallback(device_type: str, reason: str) -> None:
    warnings.warn(
        f"fusedaccum: the slower reference backend serves {device_type} devices, because {reason}. "
        "`python -m fusedaccum doctor` tells more.",
        stacklevel=4,
    )


def choose(device: torch.device, requested: str = "auto") -> Backend:
    """The backend for ``device``.

    Args:
        device: where the parameters live.
        requested: ``"auto"`` (``FUSEDACCUM_BACKEND`` if set, else native where it can serve, else reference, said
            once), ``"native"`` or ``"reference"``, which never fall back.

    Raises:
        ValueError: an unknown name.
        BackendUnavailableError: a backend asked for by name that cannot serve the device.
    """
    source = "backend"
    if requested == "auto" and os.environ.get("FUSEDACCUM_BACKEND"):
        source, requested = "FUSEDACCUM_BACKEND", os.environ["FUSEDACCUM_BACKEND"]
    if requested not in ("auto", *NAMES):
        raise ValueError(f"{source} is {requested!r}; accepted: 'auto', {', '.join(map(repr, NAMES))}")
    if requested == "reference":
        return _reference()
    reason = why_not("native", device)
    if reason is None:
        return _native()
    if requested == "native":
        raise BackendUnavailableError(f"{source} is 'native', but {reason}")
    _warn_fallback(device.type, reason)
    return _reference()
