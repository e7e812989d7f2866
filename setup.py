"""Builds the native libraries where compilers and torch's headers are at hand, and records what happened.

Everything that is not native lives in pyproject.toml. The libraries use PyTorch's stable ABI only, so one build serves
torch 2.10 and later and every Python; a build that fails leaves the reference backend, never a failed install.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
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


def write_record(package: Path, record: dict[str, object]) -> None:
    """Puts what happened beside the package's modules, for `python -m fusedaccum doctor`."""
    package.mkdir(parents=True, exist_ok=True)
    (package / "_build.json").write_text(json.dumps(record, indent=2) + "\n")


def say(library: str, record: dict[str, object]) -> dict[str, object]:
    """Prints the decision on one library, and passes it on."""
    detail = record.get("architectures", record.get("torch", "")) if record["built"] else record["reason"]
    print(f"fusedaccum: {library} library: {'built' if record['built'] else 'NOT built'}: {detail}")
    return record


def without_libraries(reason: str) -> type[build_py]:
    """A build_py for packages without native code."""
    record = {name: say(name, {"built": False, "reason": reason}) for name in ("cpu", "cuda")}

    class BuildAndRecord(build_py):
        def run(self) -> None:
            if os.environ.get("FUSEDACCUM_CUDA") == "1":
                raise SystemExit(f"FUSEDACCUM_CUDA=1, but {reason}")
            super().run()
            write_record((ROOT if self.editable_mode else Path(self.build_lib)) / "fusedaccum", record)

    return BuildAndRecord


# CUDA. nvcc is called by hand: torch's own CUDAExtension wants a torch with CUDA, of the same CUDA version, and links
# the shared runtime; this library needs neither, and CI builds it beside a CPU torch.

DEFAULT_ARCHITECTURES = "8.0;8.6;8.9;9.0;10.0;12.0+PTX"


def find_nvcc() -> Path | None:
    """nvcc, from CUDA_HOME or the PATH."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = str(Path(home) / "bin" / "nvcc") if home else shutil.which("nvcc")
    return Path(found) if found and Path(found).exists() else None


def gencode_flags(architectures: str) -> list[str]:
    """nvcc's flags for TORCH_CUDA_ARCH_LIST ("8.0;9.0+PTX", or with spaces).

    Raises:
        ValueError: the list names nothing, or something that is no number.
    """
    flags = []
    for item in architectures.replace(" ", ";").split(";"):
        number = item.removesuffix("+PTX").replace(".", "")
        if not item:
            continue
        if not number.rstrip("af").isdigit():
            raise ValueError(f"TORCH_CUDA_ARCH_LIST has {item!r}; accepted: numbers as 9.0, or 9.0+PTX")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if item.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    if not flags:
        raise ValueError(f"TORCH_CUDA_ARCH_LIST is {architectures!r}; accepted: one architecture or more, as 9.0")
    return flags


def cuda_flags() -> list[str]:
    """nvcc's flags for all sources, but for architectures."""
    return [
        "-std=c++17",
        "-O3",
        f"-DTORCH_TARGET_VERSION={TARGET}",
        "-DUSE_CUDA",
        "-Xcompiler=-fPIC,-fvisibility=hidden",
    ]


def kernel_flags(architectures: str) -> list[str]:
    """nvcc's flags for a .cu file. As on the CPU: no contraction, IEEE division and root (nvcc's default), subnormals
    kept. ``bench/cuda_code.py`` looks at the machine code that comes of them."""
    return [*cuda_flags(), "--fmad=false", *gencode_flags(architectures)]


def build_cuda(package: Path, work: Path, include: list[str], lib: list[str]) -> dict[str, object]:
    """Builds fusedaccum/_cuda.so; returns the record of it.

    Raises:
        SystemExit: FUSEDACCUM_CUDA=1 and it cannot be built, or FUSEDACCUM_CUDA is something else.
    """
    wanted = os.environ.get("FUSEDACCUM_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"FUSEDACCUM_CUDA is {wanted!r}; accepted: auto, 0, 1")
    target = package / "_cuda.so"
    target.unlink(missing_ok=True)
    nvcc = find_nvcc()
    if wanted == "0":
        return {"built": False, "reason": "FUSEDACCUM_CUDA=0 was set at build time"}
    try:
        if nvcc is None:
            raise RuntimeError("nvcc was found neither in CUDA_HOME nor on the PATH")
        architectures = os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_ARCHITECTURES
        package.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
        sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
        kernels = kernel_flags(architectures)
        host = [*cuda_flags(), *[f"-I{folder}" for folder in include]]
        commands = [[nvcc, *kernels, "-c", source, "-o", work / f"{source.stem}.o"] for source in sources]
        commands.append([nvcc, *host, "-c", ROOT / "csrc" / "cuda" / "bind.cpp", "-o", work / "bind.o"])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(run_command, commands))
        objects = [command[-1] for command in commands]
        # torch_cpu has the shims of the stable ABI but for the CUDA stream, which bind.cpp looks up by itself.
        libraries = [*[f"-L{folder}" for folder in lib], "-ltorch_cpu", "-lc10", "-ldl"]
        # No device link: no kernel here calls into another object, and it would add an empty image for nvcc's default
        # architecture.
        run_command([nvcc, "-shared", "--no-device-link", "--cudart=static", *objects, *libraries, "-o", target])
        version = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
        toolkit = re.search(r"release ([\d.]+)", version)
        return {"built": True, "architectures": architectures, "toolkit": toolkit[1] if toolkit else "unknown"}
    except (OSError, RuntimeError, ValueError) as error:
        if wanted == "1":
            raise SystemExit(f"FUSEDACCUM_CUDA=1, but {error}") from error
        return {"built": False, "reason": str(error).splitlines()[0]}


def run_command(command: list[object]) -> None:
    """Runs a compiler; raises RuntimeError with what it said."""
    words = [str(word) for word in command]
    print(" ".join(words), flush=True)
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    if result.returncode:
        said = (result.stdout + result.stderr).strip()
        raise RuntimeError(f"{Path(words[0]).name} failed on {Path(words[-3]).name}\n{said}")


def native() -> dict[str, object]:
    """setup() arguments for the native libraries."""
    if os.environ.get("FUSEDACCUM_NATIVE", "1") == "0":
        return {"cmdclass": {"build_py": without_libraries("FUSEDACCUM_NATIVE=0 was set at build time")}}
    missing = find_torch()
    if missing is not None:
        # Only what is really missing: an isolated build then downloads torch, any other is told above.
        return {"cmdclass": {"build_py": without_libraries(missing)}, "setup_requires": ["torch>=2.10"]}

    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    flags = ["-O3", "-std=c++17", "-fvisibility=hidden", f"-DTORCH_TARGET_VERSION={TARGET}"]
    # No contraction: a*b+c rounds twice, on every processor. The other two change no result; they let the compiler
    # turn selects into blends and sqrtf into an instruction.
    flags += ["-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-g0"]
    extension = CppExtension(
        "fusedaccum._cpu",
        sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc" / "cpu").glob("*.cpp")),
        # The CUDA sources too: what is named here goes into a source distribution.
        depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")),
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
            package = Path(self.build_lib) / "fusedaccum"
            cuda = build_cuda(package, Path(self.build_temp) / "cuda", extension.include_dirs, extension.library_dirs)
            write_record(package, {"cpu": say("CPU", cpu), "cuda": say("CUDA", cuda)})

        def copy_extensions_to_source(self) -> None:
            """For an editable install: everything goes through build_lib, and from there beside the sources."""
            super().copy_extensions_to_source()
            for name in ("_build.json", "_cuda.so"):
                built, source = Path(self.build_lib) / "fusedaccum" / name, ROOT / "fusedaccum" / name
                source.unlink(missing_ok=True)
                if built.exists():
                    shutil.copy2(built, source)

    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildOrRecord.with_options(no_python_abi_suffix=True)},
        # Nothing links to Python: the tag only has to say "any Python 3 from here on".
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


if __name__ == "__main__":  # the tests import the functions
    setup(**native())
