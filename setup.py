"""Builds the native library where a compiler and torch's headers are at hand, and records what happened.

Everything that is not native lives in pyproject.toml. The library uses PyTorch's stable ABI only, so one build serves
torch 2.10 and later and every Python; a build that fails leaves the reference backend, never a failed install.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
import sysconfig
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
TARGET = "((2ULL << 56) | (10ULL << 48))"  # TORCH_TARGET_VERSION: the oldest torch that the library runs on


def find_torch() -> str | None:
    """Why torch cannot be imported, None if it can.

    An isolated build does not see the environment it builds for. Its torch is the right one to build with, so it is
    looked for there before pip is asked to download another.
    """
    if importlib.util.find_spec("torch") is None:
        for key in ("purelib", "platlib"):
            folder = sysconfig.get_paths(vars={"base": sys.prefix, "platbase": sys.prefix})[key]
            if (Path(folder) / "torch" / "__init__.py").exists() and folder not in sys.path:
                sys.path.append(folder)
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed where the build can see it"
    return None


def write_record(command: Command, cpu: dict[str, object]) -> None:
    """Puts what happened beside the package's modules, for `python -m fusedaccum doctor`."""
    in_place = getattr(command, "inplace", False) or getattr(command, "editable_mode", False)
    package = (ROOT if in_place else Path(command.build_lib)) / "fusedaccum"
    package.mkdir(parents=True, exist_ok=True)
    (package / "_build.json").write_text(json.dumps({"cpu": cpu}, indent=2) + "\n")


def without_library(reason: str) -> type[build_py]:
    """A build_py for packages without native code."""
    print(f"fusedaccum: CPU library: NOT built: {reason}")

    class BuildAndRecord(build_py):
        def run(self) -> None:
            super().run()
            write_record(self, {"built": False, "reason": reason})

    return BuildAndRecord


def native() -> dict[str, object]:
    """setup() arguments for the native library."""
    if os.environ.get("FUSEDACCUM_NATIVE", "1") == "0":
        return {"cmdclass": {"build_py": without_library("FUSEDACCUM_NATIVE=0 was set at build time")}}
    missing = find_torch()
    if missing is not None:
        # Only what is really missing: an isolated build then downloads torch, any other is told above.
        return {"cmdclass": {"build_py": without_library(missing)}, "setup_requires": ["torch>=2.10"]}

    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    flags = ["-O3", "-std=c++17", "-fvisibility=hidden", f"-DTORCH_TARGET_VERSION={TARGET}"]
    # No contraction: a*b+c rounds twice, on every processor. The other two change no result; they let the compiler
    # turn selects into blends and sqrtf into an instruction.
    flags += ["-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"]
    extension = CppExtension(
        "fusedaccum._cpu",
        sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc" / "cpu").glob("*.cpp")),
        depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h")),
        extra_compile_args={"cxx": flags},
        py_limited_api=True,
    )

    class BuildOrRecord(BuildExtension):
        """BuildExtension, but a failure is recorded instead of failing the install."""

        def build_extensions(self) -> None:
            try:
                super().build_extensions()
                cpu = {"built": True, "torch": torch.__version__, "machine": platform.machine()}
            except Exception as error:
                self.extensions = []
                cpu = {"built": False, "reason": f"the compiler failed: {str(error).strip().splitlines()[0]}"}
            print(f"fusedaccum: CPU library: {'built' if cpu['built'] else 'NOT built: ' + str(cpu['reason'])}")
            write_record(self, cpu)

    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildOrRecord.with_options(no_python_abi_suffix=True)},
        # Nothing links to Python: the tag only has to say "any Python 3 from here on".
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**native())
