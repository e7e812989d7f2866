"""Fixtures that every test file may use, and the only place where tests are skipped."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from ptxrun import cuda as ptx_cuda

from bench import cuda_code
from bench.on_device import on_device
from fusedaccum import backends, triton_backend

# Where each backend is tested.
BACKEND_DEVICES = {"native": "cpu", "reference": "cpu", "cuda": "cuda", "triton": "cuda"}
# The Triton kernels on CPU tensors: what no GPU is needed for, and no user can ask for.
INTERPRETED = "triton-interpreted"

ROOT = Path(__file__).parent.parent


# The interpreter takes a tenth of a millisecond for each operation on a row. Of these parameters it gets one value:
# alignment only decides how a GPU accesses memory, which test_triton_ptx.py looks at, and the rest is arithmetic on two
# numbers.
_FEWER_INTERPRETED = {"acc_shift": 0, "interval": 3}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def is_spared(item: pytest.Item) -> bool:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if params.get("backend") != INTERPRETED:
            return False
        return any(params.get(name, value) != value for name, value in _FEWER_INTERPRETED.items())

    spared = [item for item in items if is_spared(item)]
    if spared:
        config.hook.pytest_deselected(items=spared)
        items[:] = [item for item in items if not is_spared(item)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(0)


def _skip_unless_served(name: str) -> str:
    reason = backends.why_not(name, torch.device(BACKEND_DEVICES[name]))
    if reason is None and BACKEND_DEVICES[name] == "cuda" and not torch.cuda.is_available():
        reason = "torch sees no GPU"
    if reason is not None:
        pytest.skip(f"the {name} backend cannot serve {BACKEND_DEVICES[name]}: {reason}")
    return name


# Session scope lets hypothesis tests take the backend too.
@pytest.fixture(scope="session", params=[name for name, device in BACKEND_DEVICES.items() if device == "cpu"])
def backend_name(request: pytest.FixtureRequest) -> str:
    """The name of each backend that serves the CPU, in turn: for tests whose parameters lie there."""
    return _skip_unless_served(request.param)


@pytest.fixture(scope="session")
def triton_installed() -> str:
    """Triton's version, for tests that compile its kernels or interpret them."""
    found = triton_backend.version()
    if found is None:
        pytest.skip("triton is not installed")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        pytest.skip("TRITON_INTERPRET is set: Triton's own functions cannot be compiled in this process")
    return found


@pytest.fixture(scope="session")
def interpreted_triton(triton_installed: str) -> backends.Backend:
    """The Triton kernels on CPU tensors, run by Triton's interpreter."""
    if triton_installed.startswith("3.6.") and tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip("the interpreter of triton 3.6 does not work with numpy 2.4 or newer")
    from triton_interpreter import interpreted

    return interpreted()


@pytest.fixture(scope="session", params=[*BACKEND_DEVICES, INTERPRETED])
def backend(request: pytest.FixtureRequest) -> backends.Backend:
    """Each backend in turn, asked for by name, so that it never falls back. All take CPU tensors, which are carried to
    the device of the backend and back."""
    if request.param == INTERPRETED:
        return request.getfixturevalue("interpreted_triton")
    name = _skip_unless_served(request.param)
    device = torch.device(BACKEND_DEVICES[name])
    chosen = backends.choose(device, name)
    return chosen if device.type == "cpu" else on_device(chosen, device)


def need_host_table(backend: backends.Backend) -> None:
    """For bad input that only ``table`` shows."""
    if BACKEND_DEVICES[backend.name] != "cpu":
        pytest.skip(f"the {backend.name} backend cannot look into a table on the device; the arena vouches for it")


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """A GPU that the CUDA library serves."""
    return torch.device(BACKEND_DEVICES[_skip_unless_served("cuda")])


@pytest.fixture(scope="session")
def build_script() -> ModuleType:
    """``setup.py``."""
    try:
        return cuda_code.build_script()
    except cuda_code.MissingToolError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def cuda_kernels(request: pytest.FixtureRequest) -> list[cuda_code.Kernel]:
    """Every CUDA kernel for every architecture; compiled when the sources, the flags or the tools change."""
    try:
        return cuda_code.kernels(Path(request.config.cache.mkdir("cuda_code")))
    except cuda_code.MissingToolError as error:
        pytest.skip(f"the machine code of the CUDA kernels cannot be looked at: {error}")


@pytest.fixture(scope="session")
def cuda_library() -> Path:
    """The built CUDA library."""
    record = backends.build_record()["cuda"]
    if not record["built"]:
        pytest.skip(f"the CUDA library was not built: {record['reason']}")
    return Path(backends.__file__).parent / "_cuda.so"


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tests of many small ops, whose threads would mostly wait for each other. test_isa.py has the threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def reference() -> backends.Backend:
    """What the other backends are compared with."""
    return backends.choose(torch.device("cpu"), "reference")


@pytest.fixture(scope="session")
def native() -> backends.Backend:
    """The compiled CPU library."""
    return backends.choose(torch.device("cpu"), _skip_unless_served("native"))


def _compiled(request: pytest.FixtureRequest, name: str, headers: tuple[str, ...]) -> ModuleType:
    """The extension module ``tests/<name>.cpp``, compiled when it or one of ``headers``, below csrc, changes."""
    tested = f"csrc/{headers[0]} cannot be tested by itself"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip(f"{tested}: neither g++ nor clang++ is on PATH")
    if importlib.util.find_spec("pybind11") is None:
        pytest.skip(f"{tested}: pybind11 is not installed")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip(f"{tested}: Python.h is not installed")
    import pybind11

    # The floating-point flags are those of setup.py: they are part of what is tested.
    command = [compiler, "-O2", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden"]
    command += ["-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"]
    command += [f"-I{sysconfig.get_path('include')}", f"-I{pybind11.get_include()}", f"-I{ROOT / 'csrc'}"]
    sources = [ROOT / "tests" / f"{name}.cpp", *(ROOT / "csrc" / header for header in headers)]
    key = hashlib.sha256("\0".join([sys.version, pybind11.__version__, *command]).encode())
    for source in sources:
        key.update(source.read_bytes())
    folder = Path(request.config.cache.mkdir(name))
    library = folder / f"{name}_{key.hexdigest()[:16]}.so"
    if not library.exists():
        unfinished = library.with_suffix(f".{os.getpid()}")
        build = subprocess.run([*command, str(sources[0]), "-o", str(unfinished)], capture_output=True, text=True)
        assert build.returncode == 0, build.stderr
        unfinished.replace(library)
    spec = importlib.util.spec_from_file_location(name, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def math_module(request: pytest.FixtureRequest) -> ModuleType:
    """``csrc/math.h``, element by element (``math_module.cpp``)."""
    return _compiled(request, "math_module", ("math.h", "layout.h"))


@pytest.fixture(scope="session")
def plan_module(request: pytest.FixtureRequest) -> ModuleType:
    """``csrc/cuda/plan.h``: the grids and parameter blocks of CUDA launches (``plan_module.cpp``)."""
    return _compiled(request, "plan_module", ("cuda/plan.h", "layout.h"))


@pytest.fixture(scope="session")
def ptx_plan(plan_module: ModuleType) -> ModuleType:
    """``plan_module``, for tests that run the PTX of csrc/cuda in the interpreter."""
    if ptx_cuda.nvcc_path() is None:
        pytest.skip("the PTX of csrc/cuda cannot be made: nvcc (CUDA toolkit) is neither on PATH nor in CUDA_HOME")
    return plan_module


@pytest.fixture(scope="session")
def inductor() -> None:
    """A C++ compiler, without which torch.compile's default backend does nothing on the CPU."""
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX") or "g++", "g++", "clang++")):
        pytest.skip("torch.compile's inductor needs a C++ compiler: neither g++ nor clang++ is on PATH")


@pytest.fixture(scope="session")
def far_memory() -> Callable[[int, torch.dtype], torch.Tensor]:
    """Makes tensors of gigabytes whose pages are never touched, and so never there."""
    try:
        torch.empty(2**33, dtype=torch.uint8)
    except RuntimeError:
        pytest.skip("the system does not promise 8 GiB of address space beyond its memory")
    return lambda n_elems, dtype: torch.empty(n_elems, dtype=dtype)


# Here and not in tests/distributed, as modules find this file under the name "conftest".
@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, str], str]:
    """What became of a check of tests/distributed: "" if all is well. A set of modules of checks is launched once for
    each number of ranks."""
    if not torch.distributed.is_available():
        pytest.skip("this torch is built without torch.distributed")
    from launch import run_checks

    found: dict[tuple[str, int], dict[str, str]] = {}
    # Each process of pytest-xdist has a session of its own; the folder above theirs is one for all.
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base

    def of(modules: str, n_ranks: int, name: str) -> str:
        key = (modules, n_ranks)
        if key not in found:
            folder = shared / f"{modules}-on-{n_ranks}"
            folder.mkdir(exist_ok=True)
            # The first to come here launches the group, and the others wait for what it finds.
            with open(folder / "lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                outcome = folder / "outcome.json"
                if not outcome.exists():
                    outcome.write_text(json.dumps(run_checks(modules, n_ranks, folder)))
            found[key] = json.loads(outcome.read_text())
        return found[key][name]

    return of


@pytest.fixture(scope="session")
def trainer_installed() -> None:
    """transformers with accelerate, for processes that train by its Trainer."""
    missing = [name for name in ("accelerate", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: pip install fusedaccum[integration]")
    if not torch.distributed.is_available():
        pytest.skip("this torch is built without torch.distributed")


@pytest.fixture(scope="session")
def wire_rows() -> list[dict[str, Any]]:
    """What ``bench.wire`` measures on a small model."""
    if not torch.distributed.is_available():
        pytest.skip("this torch is built without torch.distributed")
    from bench import wire

    rows, is_isolated = wire.measure(n_rounds=3, width=64, n_tokens=4)
    if not is_isolated:
        pytest.skip("the loopback device's counters are shared with other programs: unshare --net is not allowed here")
    return rows


@contextmanager
def _denormals_flushed() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        assert (np.array([2.0**-130], np.float32) * np.float32(1.0)).item() == 0.0, "denormals are not flushed"
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.fixture(params=["denormals kept", "denormals flushed"])
def denormals(request: pytest.FixtureRequest) -> Callable[[], AbstractContextManager[None]]:
    """A context for the call under test: nothing, and as users of torch.set_flush_denormal have it."""
    if request.param == "denormals kept":
        return nullcontext
    if not torch.set_flush_denormal(True):
        pytest.skip("torch.set_flush_denormal does not work on this processor")
    torch.set_flush_denormal(False)
    return _denormals_flushed


@pytest.fixture(scope="session")
def isas(native: backends.Backend) -> list[str]:
    """The instruction sets that this processor runs and the library was built with, from the library itself."""
    run = subprocess.run(
        [sys.executable, "-c", "import torch\nfrom fusedaccum import backends\nbackends.cpu_library()"],
        env={**os.environ, "FUSEDACCUM_ISA": "none such"},
        capture_output=True,
        text=True,
    )
    found = re.search(r"accepted by this processor and build: (.*)", run.stderr)
    assert found, run.stderr
    accepted = found[1].split(", ")
    if len(accepted) == 1:
        pytest.skip(f"only one instruction set runs here: {accepted[0]}")
    return accepted
