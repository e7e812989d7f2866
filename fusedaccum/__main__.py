"""``python -m fusedaccum doctor``: what serves here, why something else does not, and whether it computes rightly."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time

import torch

from . import __version__, backends, selftest, triton_backend
from .capture import node_skips_undefined

_VARIABLES = ("FUSEDACCUM_BACKEND", "FUSEDACCUM_ISA")


def doctor(compile_triton: bool = False) -> int:
    """Prints the report; returns 1 if a check fails.

    Args:
        compile_triton: compile every Triton kernel, and print how long each took.
    """
    print(f"fusedaccum {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"platform   {platform.system()} {platform.machine()}, {torch.get_num_threads()} threads")
    for kind, build in backends.build_record().items():
        built = f"with torch {build['torch']}" if "torch" in build else f"for {build.get('architectures')}"
        print(f"build      {kind} library " + (built if build["built"] else f"not built: {build['reason']}"))
    for variable in _VARIABLES:
        if variable in os.environ:
            print(f"setting    {variable}={os.environ[variable]}")
    how = "at the AccumulateGrad node" if node_skips_undefined() else "behind the AccumulateGrad node (fallback)"
    print(f"capture    {how}")
    failures = [_report("capture", selftest.check_capture)]
    cpu = torch.device("cpu")
    for name in backends.NAMES:
        device = _device_of(name)
        try:
            reason = backends.why_not(name, device)
            if reason is None and device != cpu and not _sees(device.type):
                what = f"the library ({backends.cuda_library().detail})" if name == "cuda" else _triton_version()
                reason = f"{what} loads, but torch sees no GPU"
        except backends.BackendUnavailableError as error:
            failures.append(True)
            print(f"{name:<10} FAILED: {error}")
            continue
        if reason is not None:
            print(f"{name:<10} not available: {reason}")
            continue
        backend = backends.choose(device, name)
        print(f"{name:<10} {backend.detail}")
        if name != "reference":
            failures.append(_report(name, lambda backend=backend, device=device: selftest.check(backend, device)))  # type: ignore[misc]
    if compile_triton:
        failures.append(_compile_triton())
    try:
        print(f"in use     {backends.choose(cpu).name} on the CPU")
        for device_type, called in (("cuda", "ROCm" if torch.version.hip else "CUDA"), ("xpu", "XPU")):
            if _sees(device_type):
                print(f"in use     {backends.choose(torch.device(device_type)).name} on {called} devices")
    except (ValueError, backends.BackendUnavailableError) as error:
        failures.append(True)
        print(f"in use     FAILED: {error}")
    return int(any(failures))


def _sees(device_type: str) -> bool:
    return bool(torch.get_device_module(device_type).is_available())


def _device_of(name: str) -> torch.device:
    """Where a backend is looked at."""
    if name == "triton" and not _sees("cuda") and _sees("xpu"):
        return torch.device("xpu")
    return torch.device("cuda" if name in ("cuda", "triton") else "cpu")


def _triton_version() -> str:
    return f"triton {triton_backend.version()}"


def _compile_triton() -> bool:
    """Compiles each Triton kernel anew, for the GPU at hand or sm_90; returns whether one failed."""
    if not torch.cuda.is_available():
        capability = 90
    elif torch.version.hip:
        print(f"{'':<10} triton kernels are compiled ahead of time for NVIDIA GPUs only")
        return False
    else:
        major, minor = torch.cuda.get_device_capability()
        capability = 10 * major + minor
    try:
        for kernel, took in triton_backend.compile_times(capability):
            print(f"{'':<10} triton {kernel} for sm_{capability} compiled ({took:.1f} s)")
    except Exception as error:  # a report must not end at the first broken part
        print(f"{'':<10} triton kernels FAILED to compile: {type(error).__name__}: {error}")
        return True
    return False


def _report(name: str, check: object) -> bool:
    """Runs a check and prints how it went; returns whether it failed."""
    started = time.perf_counter()
    try:
        problem = check()  # type: ignore[operator]
    except Exception as error:  # a report must not end at the first broken part
        problem = f"{type(error).__name__}: {error}"
    took = time.perf_counter() - started
    print(f"{'':<10} {name} self-test {'ok' if problem is None else 'FAILED: ' + problem} ({took:.1f} s)")
    return problem is not None


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fusedaccum", description=__doc__)
    parser.add_argument("command", choices=["doctor"], help="report backends, versions and a self-test")
    parser.add_argument(
        "--triton", action="store_true", help="compile every Triton kernel anew and say how long it takes; needs no GPU"
    )
    return doctor(parser.parse_args(arguments).triton)


if __name__ == "__main__":
    sys.exit(main())
