"""What nvcc makes of csrc/cuda: PTX, machine code and ptxas's own report, for each kernel and architecture.

Compiled with the flags of ``setup.py``, one architecture at a time, into files that are found again by content.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import site
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
CUDA_SOURCES = ROOT / "csrc" / "cuda"

# An sm_90 multiprocessor (CUDA programming guide, technical specifications by compute capability).
WARPS = 64
BLOCKS = 32
REGISTERS = 65536
REGISTER_UNIT = 256  # registers are handed out a warp at a time, in these units
SHARED_BYTES = 228 * 1024
SHARED_BYTES_RESERVED = 1024  # of each block, by the system
# Threads a block, as csrc/cuda launches them.
THREADS = {"finalize": 1024}
DEFAULT_THREADS = 128

_PTX_INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][a-z0-9_]*(?:\.[\w:]+)*)(?=[\s;])", re.MULTILINE)
_SASS_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_ENTRY = re.compile(r"ptxas info\s*: Compiling entry function '(\w+)' for 'sm_\w+'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


class MissingToolError(RuntimeError):
    """A program that is not part of Python is not installed; the message says which."""


@cache
def build_script() -> ModuleType:
    """``setup.py``, whose functions know how the library is built.

    Raises:
        MissingToolError: it cannot be imported.
    """
    spec = importlib.util.spec_from_file_location("fusedaccum_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise MissingToolError(f"setup.py needs {error.name}, which is not installed") from error
    return module


def architectures() -> list[str]:
    """What the library is built for unless told otherwise, as ``TORCH_CUDA_ARCH_LIST`` has it, without the PTX."""
    return [item.removesuffix("+PTX") for item in build_script().DEFAULT_ARCHITECTURES.split(";")]


def find_nvcc() -> Path:
    """The compiler that ``setup.py`` would take.

    Raises:
        MissingToolError: there is none.
    """
    found: Path | None = build_script().find_nvcc()
    if found is None:
        raise MissingToolError("nvcc (CUDA toolkit) was found neither in CUDA_HOME nor on the PATH")
    return found


def find_nvdisasm() -> Path:
    """The disassembler: of a toolkit, of triton's wheel, or of the package nvidia-cuda-nvdisasm.

    Raises:
        MissingToolError: there is none.
    """
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    folders += [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    for packages in map(Path, [*site.getsitepackages(), site.getusersitepackages()]):
        folders += sorted((packages / "nvidia").glob("*/bin"), reverse=True)
        folders.append(packages / "triton" / "backends" / "nvidia" / "bin")
    for folder in folders:
        found = shutil.which("nvdisasm", path=folder)
        if found:
            return Path(found)
    raise MissingToolError(
        "nvdisasm was found neither on the PATH nor in CUDA_HOME; `pip install nvidia-cuda-nvdisasm` brings it"
    )


@dataclass(frozen=True)
class Kernel:
    """One kernel for one architecture.

    Attributes:
        name: without namespaces; the capacity of the parameter block, where there are two, in angle brackets.
        architecture: as "9.0".
        spill_bytes: stored and loaded.
        shared_bytes: of a block, static.
        ptx, sass: every instruction with its modifiers, in order.
    """

    name: str
    architecture: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    ptx: tuple[str, ...]
    sass: tuple[str, ...]

    @property
    def op(self) -> str:
        """The name without the capacity."""
        return self.name.partition("<")[0]

    def in_sass(self, pattern: str) -> int:
        """Machine instructions that match in full."""
        return sum(re.fullmatch(pattern, instruction) is not None for instruction in self.sass)

    def in_ptx(self, pattern: str) -> int:
        """PTX instructions that match in full."""
        return sum(re.fullmatch(pattern, instruction) is not None for instruction in self.ptx)

    @property
    def occupancy(self) -> float:
        """The share of an sm_90 multiprocessor's warps that its registers, shared memory and blocks admit."""
        warps = THREADS.get(self.op, DEFAULT_THREADS) // 32
        registers_a_warp = -(-self.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
        blocks = min(
            BLOCKS,
            WARPS // warps,
            REGISTERS // registers_a_warp // warps,
            SHARED_BYTES // (self.shared_bytes + SHARED_BYTES_RESERVED),
        )
        return blocks * warps / WARPS


def short_name(mangled: str) -> str:
    """``accumulate<120>`` of the mangled ``accumulate_kernel<120, false>``, ``accumulate_micro<120>`` of the one with
    statistics; a file's name and hash go with the namespace."""
    found = re.search(r"([a-z]+)_kernel(?:ILi(\d+)E(?:Lb([01])E)?)?", mangled)
    if found is None:
        raise ValueError(f"{mangled!r} is not the name of a kernel of ours")
    return found[1] + ("_micro" if found[3] == "1" else "") + (f"<{found[2]}>" if found[2] else "")


def _by_entry(pieces: list[str]) -> dict[str, str]:
    """[text before the first, name, text, name, text...] -> texts by name."""
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def _report_of(report: str) -> dict[str, tuple[int, int, int, int]]:
    """Registers, stack, spills and shared bytes of each entry function in ptxas's report."""
    found = {}
    for name, text in _by_entry(_ENTRY.split(report)).items():
        frame, used = _FRAME.search(text), _USED.search(text)
        assert frame is not None, f"{name}: ptxas reported no stack frame"
        assert used is not None, f"{name}: ptxas reported no registers"
        spilled = int(frame[2]) + int(frame[3])
        found[name] = (int(used[1]), int(frame[1]), spilled, int(used[2] or 0))
    return found


def _ptx_of(text: str) -> dict[str, tuple[str, ...]]:
    pieces = re.split(r"\.entry\s+(\w+)\s*\(", re.sub(r"//.*", "", text))
    return {name: tuple(_PTX_INSTRUCTION.findall(body)) for name, body in _by_entry(pieces).items()}


def _sass_of(text: str) -> dict[str, tuple[str, ...]]:
    pieces = re.split(r"^\s*\.section\s+\.text\.(\w+),.*$", text, flags=re.MULTILINE)
    return {name: tuple(_SASS_INSTRUCTION.findall(body)) for name, body in _by_entry(pieces).items()}


def _run(command: list[object]) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(str(command[0])).name} failed:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def _compile(source: Path, architecture: str, folder: Path) -> None:
    """Fills ``folder`` with code.ptx, code.cubin, code.sass and report.txt, or leaves no folder behind."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        work = Path(name)
        flags = build_script().kernel_flags(architecture)
        report = _run(
            [find_nvcc(), *flags, "-Xptxas=-v", "--keep", f"--keep-dir={work}", "-cubin", source, "-o", work / "cubin"]
        )
        done = work / "done"
        done.mkdir()
        (done / "report.txt").write_text(report)
        (work / "cubin").rename(done / "code.cubin")
        (work / f"{source.stem}.ptx").rename(done / "code.ptx")
        (done / "code.sass").write_text(_run([find_nvdisasm(), "--print-code", done / "code.cubin"]))
        try:
            done.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was first
                raise


def _key(source: Path, architecture: str) -> str:
    """Of all that the code depends on."""
    key = hashlib.sha256()
    parts = [architecture, *build_script().kernel_flags(architecture), _version(find_nvcc()), _version(find_nvdisasm())]
    for part in parts:
        key.update(part.encode() + b"\0")
    for path in [source, *sorted((ROOT / "csrc").glob("*.h")), *sorted(CUDA_SOURCES.glob("*.*h"))]:
        key.update(path.read_bytes() + b"\0")
    return key.hexdigest()[:16]


@cache
def _version(tool: Path) -> str:
    return _run([tool, "--version"])


def kernels(folder: Path, of: list[str] | None = None) -> list[Kernel]:
    """All kernels for the architectures ``of``, by default those of ``architectures()``.

    Args:
        folder: where compiled code is kept from one call to the next.

    Raises:
        MissingToolError: nvcc or the disassembler is not there.
    """
    jobs = []
    for source in sorted(CUDA_SOURCES.glob("*.cu")):
        for architecture in of or architectures():
            jobs.append((source, architecture, folder / f"{source.stem}-{architecture}-{_key(source, architecture)}"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: _compile(*job), [job for job in jobs if not job[2].exists()]))
    found = []
    for _, architecture, place in jobs:
        report = _report_of((place / "report.txt").read_text())
        ptx, sass = _ptx_of((place / "code.ptx").read_text()), _sass_of((place / "code.sass").read_text())
        assert report.keys() == ptx.keys() == sass.keys(), f"{place.name}: PTX, report and machine code do not agree"
        found += [Kernel(short_name(name), architecture, *report[name], ptx[name], sass[name]) for name in report]
    return sorted(found, key=lambda kernel: (kernel.name, float(kernel.architecture)))
