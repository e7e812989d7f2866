"""``python -m fusedaccum doctor``: what serves here, why something else does not, and whether it computes rightly."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time

import torch

from . import __version__, backends, selftest
from .capture import node_skips_undefined

_VARIABLES = ("FUSEDACCUM_BACKEND", "FUSEDACCUM_ISA")


def doctor() -> int:
    """Prints the report; returns 1 if a check fails."""
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
        device = torch.device("cuda") if name == "cuda" else cpu
        try:
            reason = backends.why_not(name, device)
            if reason is None and name == "cuda" and not torch.cuda.is_available():
                reason = f"the library ({backends.cuda_library().detail}) loads, but torch sees no GPU"
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
    try:
        print(f"in use     {backends.choose(cpu).name} on the CPU")
        if torch.cuda.is_available():
            print(f"in use     {backends.choose(torch.device('cuda')).name} on CUDA devices")
    except (ValueError, backends.BackendUnavailableError) as error:
        failures.append(True)
        print(f"in use     FAILED: {error}")
    return int(any(failures))


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
    parser.parse_args(arguments)
    return doctor()


if __name__ == "__main__":
    sys.exit(main())
