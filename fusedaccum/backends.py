"""Which backend serves which device, and why another does not.

A backend is a set of functions with the names and meanings of ``ops.SCHEMAS``. ``native`` is the compiled library for
the CPU, ``cuda`` the one for NVIDIA GPUs, ``triton`` compiles for a GPU when it is first used, ``reference`` is plain
torch on any device.
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

from . import layout, ops, reference, triton_backend

NAMES = ("native", "cuda", "triton", "reference")
PREFERRED = {"cpu": ("native",), "cuda": ("cuda", "triton"), "xpu": ("triton",)}
"""What serves each type of device, the best first; after all of these, and everywhere else, reference."""
_LIBRARIES = {"native": "cpu", "cuda": "cuda"}  # the device type of each compiled library
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
    """What ``setup.py`` wrote down of the build: for "cpu" and "cuda", whether it was built, for what, or why not."""
    path = _PACKAGE / "_build.json"
    if not path.exists():
        never = {"built": False, "reason": "this copy was never built; run `pip install .`"}
        return {"cpu": never, "cuda": never}
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _load(kind: str) -> ctypes.CDLL | str:
    """The library of ``kind`` ("cpu", "cuda"), its ops registered with torch; or why there is none."""
    candidates = sorted(_PACKAGE.glob(f"_{kind}*.so")) + sorted(_PACKAGE.glob(f"_{kind}*.pyd"))
    if not candidates:
        reason: str = build_record().get(kind, {}).get("reason", "the library is not in the package")
        return reason
    try:
        torch.ops.load_library(str(candidates[0]))
        return ctypes.CDLL(str(candidates[0]))
    except OSError as error:
        return f"{candidates[0].name} does not load: {error}"


@cache
def cpu_library() -> _Library:
    """Loads the CPU library once.

    Raises:
        BackendUnavailableError: ``FUSEDACCUM_ISA`` names an instruction set that does not run here.
    """
    library = _load("cpu")
    if isinstance(library, str):
        return _Library(False, library)
    library.fusedaccum_cpu_isa.restype = ctypes.c_char_p
    isa = library.fusedaccum_cpu_isa()
    if isa is None:
        # Let an op say which values the variable may take; nothing is computed.
        raise BackendUnavailableError(_isa_error())
    return _Library(True, isa.decode())


@cache
def cuda_library() -> _Library:
    """Loads the CUDA library once; it loads beside a torch without CUDA too, where nothing can call it."""
    library = _load("cuda")
    if isinstance(library, str):
        return _Library(False, library)
    record = build_record()["cuda"]
    return _Library(True, f"CUDA {record.get('toolkit', '?')}, architectures {record.get('architectures', '?')}")


def _isa_error() -> str:
    empty = torch.zeros(0)
    table = torch.zeros(0, len(layout.SLOT_COLUMNS), dtype=torch.int64)
    try:
        torch.ops.fusedaccum.measure_(torch.zeros(0, dtype=torch.float64), empty, table, [], [])
    except RuntimeError as error:
        return str(error)
    return f"FUSEDACCUM_ISA is {os.environ.get('FUSEDACCUM_ISA')!r}, which does not run here"


def _backend(name: str, detail: str, namespace: Any) -> Backend:
    return Backend(name, detail, **{op: getattr(namespace, op) for op in ops.SCHEMAS})


@cache
def _compiled(name: str) -> Backend:
    # The default overload is looked up once: the packet would resolve it anew at each call.
    packets = torch.ops.fusedaccum

    class Overloads:
        pass

    for op in ops.SCHEMAS:
        setattr(Overloads, op, staticmethod(getattr(packets, op).default))
    return _backend(name, (cpu_library() if name == "native" else cuda_library()).detail, Overloads)


@cache
def _reference() -> Backend:
    return _backend("reference", "plain torch", reference)


@cache
def _triton() -> Backend:
    return _backend("triton", f"Triton {triton_backend.version()}, compiled at first use", triton_backend.launch())


def why_not(name: str, device: torch.device) -> str | None:
    """Why backend ``name`` cannot serve ``device``; None if it can."""
    if name == "reference":
        return None
    if name == "triton":
        if device.type not in triton_backend.DEVICE_TYPES:
            types = " and ".join(triton_backend.DEVICE_TYPES)
            return f"the triton backend serves {types} devices, not {device.type}"
        return triton_backend.why_not()
    if device.type != _LIBRARIES[name]:
        return f"the {name} backend serves {_LIBRARIES[name]} devices, not {device.type}"
    if name == "cuda" and torch.version.hip:
        return "this torch was built for ROCm"
    library = cpu_library() if name == "native" else cuda_library()
    return None if library.loaded else f"there is no compiled library: {library.detail}"


def _made(name: str) -> Backend:
    return {"triton": _triton, "reference": _reference}.get(name, lambda: _compiled(name))()


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
        requested: ``"auto"`` (``FUSEDACCUM_BACKEND`` if set, else the first of ``PREFERRED`` that can serve, else
            reference, said once), or one of ``NAMES``, which never fall back.

    Raises:
        ValueError: an unknown name.
        BackendUnavailableError: a backend asked for by name that cannot serve the device.
    """
    source = "backend"
    if requested == "auto" and os.environ.get("FUSEDACCUM_BACKEND"):
        source, requested = "FUSEDACCUM_BACKEND", os.environ["FUSEDACCUM_BACKEND"]
    if requested not in ("auto", *NAMES):
        raise ValueError(f"{source} is {requested!r}; accepted: 'auto', {', '.join(map(repr, NAMES))}")
    if requested != "auto":
        reason = why_not(requested, device)
        if reason is not None:
            raise BackendUnavailableError(f"{source} is {requested!r}, but {reason}")
        return _made(requested)
    reasons = []
    for name in PREFERRED.get(device.type, ()):
        unavailable = why_not(name, device)
        if unavailable is None:
            return _made(name)
        reasons.append(unavailable)
    _warn_fallback(device.type, "; ".join(reasons) or f"there are no compiled kernels for {device.type} devices")
    return _reference()
