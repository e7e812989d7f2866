"""fusedaccum/_cuda.so as a file and as a library, on a machine with no driver; and how setup.py decides on it."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fusedaccum import FusedAccumOptimizer, backends, ops

PACKAGE = Path(backends.__file__).parent


def tool_output(*command: str | Path) -> str:
    if shutil.which(command[0]) is None:
        pytest.fail(f"{command[0]} (binutils) is not installed; a compiler brings it")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def run_python(program: str, *arguments: str | Path, path: Path = PACKAGE.parent) -> str:
    """What the program prints, with the package from ``path``."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-W", "error", "-c", program, *map(str, arguments)]
    run = subprocess.run(command, env=environment, cwd=path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


class TestFile:
    def test_needs_no_cuda_and_no_python(self, cuda_library: Path) -> None:
        # The runtime is linked into it, the driver is opened by that when it is first used.
        dynamic = tool_output("readelf", "-d", cuda_library)
        needed = set(re.findall(r"\(NEEDED\).*\[(.*?)\.so", dynamic))
        assert needed <= {"libtorch_cpu", "libc10", "libstdc++", "libgcc_s", "libc", "libm", "ld-linux-x86-64"} | {
            "libdl", "libpthread", "librt", "ld-linux-aarch64"
        }  # fmt: skip
        assert "RPATH" not in dynamic
        assert "RUNPATH" not in dynamic

    def test_exports_one_function(self, cuda_library: Path) -> None:
        # Its copy of the CUDA runtime must not be taken for torch's, nor its kernels for another library's.
        exported = {line.split()[-1] for line in tool_output("nm", "-D", "--defined-only", cuda_library).splitlines()}
        linker = {"__bss_start", "_edata", "_end", "_init", "_fini"}
        standard = {name for name in exported if re.match(r"_ZN?K?(S|TIS|TSS|TVS|ZNS)", name)}
        assert exported - linker - standard == {"fusedaccum_cuda_finds_stream"}

    def test_uses_nothing_of_torch_but_its_stable_abi(self, cuda_library: Path) -> None:
        undefined = tool_output("nm", "-D", "--undefined-only", cuda_library)
        assert not re.findall(r" [Uw] (Py\w+|_ZNK?(?:2at|3c10|5torch)\w+|cu[A-Z]\w+|cuda[A-Z]\w+)", undefined)

    def test_holds_code_for_what_the_record_says(self, cuda_library: Path, build_script: ModuleType) -> None:
        # The images are compressed, the options that ptxas was given stand in the clear.
        images = set(re.findall(rb"-arch (sm_\w+) ", cuda_library.read_bytes()))
        flags = " ".join(build_script.gencode_flags(self.architectures()))
        assert images == {name.encode() for name in re.findall(r"code=(sm_\w+)", flags)}

    @staticmethod
    def architectures() -> str:
        return backends.build_record()["cuda"]["architectures"]


class TestLoading:
    def test_registers_a_kernel_for_every_op(self, cuda_library: Path) -> None:
        program = """
import torch
from fusedaccum import backends, ops
kernels = lambda: [torch._C._dispatch_has_kernel_for_dispatch_key(f"fusedaccum::{op}", "CUDA") for op in ops.SCHEMAS]
print(kernels(), backends.cuda_library().loaded, kernels())
"""
        n = len(ops.SCHEMAS)
        assert run_python(program).strip() == f"{[False] * n} True {[True] * n}"

    def test_loads_where_torch_has_no_cuda(self, cuda_library: Path) -> None:
        assert backends.cuda_library().loaded
        assert backends.cuda_library().detail.endswith(f"architectures {TestFile.architectures()}")
        if not torch.version.cuda:
            assert ctypes.CDLL(str(cuda_library)).fusedaccum_cuda_finds_stream() == 0

    def test_finds_the_stream_of_a_torch_that_python_loaded(self, cuda_library: Path, tmp_path: Path) -> None:
        # Python loads torch with RTLD_LOCAL: a weak symbol would stay null there, on every machine with a GPU.
        source, fake = tmp_path / "fake.c", tmp_path / "libtorch_cuda.so"
        source.write_text("int aoti_torch_get_current_cuda_stream(int device, void** stream) { return 0; }\n")
        compiler = os.environ.get("CC") or "gcc"
        tool_output(compiler, "-shared", "-fPIC", f"-Wl,-soname,{fake.name}", source, "-o", fake)
        program = """
import ctypes, os, sys, torch
fake = ctypes.CDLL(sys.argv[1], mode=os.RTLD_LOCAL)
print(ctypes.CDLL(sys.argv[2]).fusedaccum_cuda_finds_stream())
"""
        assert run_python(program, fake, cuda_library).strip() == "1"

    def test_doctor_tells_of_it(self, cuda_library: Path) -> None:
        run = subprocess.run([sys.executable, "-m", "fusedaccum", "doctor"], capture_output=True, text=True)
        assert run.returncode == 0, run.stdout
        assert f"build      cuda library for {TestFile.architectures()}" in run.stdout
        if not torch.cuda.is_available():
            assert re.search(
                r"^cuda +not available: the library \(CUDA .*\) loads, but torch sees no GPU$", run.stdout, re.M
            )


@pytest.fixture(scope="module")
def without_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package that was built with FUSEDACCUM_CUDA=0."""
    folder = tmp_path_factory.mktemp("without")
    shutil.copytree(PACKAGE, folder / "fusedaccum", ignore=shutil.ignore_patterns("_cuda.so", "__pycache__"))
    record = folder / "fusedaccum" / "_build.json"
    built = json.loads(record.read_text()) if record.exists() else {"cpu": {"built": False, "reason": "?"}}
    record.write_text(json.dumps({**built, "cuda": {"built": False, "reason": "no nvcc was there"}}))
    return folder


UNASKED = """
import torch, warnings
from fusedaccum import backends
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    names = [backends.choose(torch.device("cuda")).name for _ in range(2)]
print(names, [str(warning.message) for warning in caught])
"""


class TestAbsence:
    def test_cpu_backends_do_not_mind(self, without_library: Path, cuda_library: Path) -> None:
        program = """
import torch, fusedaccum
from fusedaccum import backends, selftest
assert not backends.cuda_library().loaded
cpu = torch.device("cpu")
print(backends.__file__, backends.choose(cpu).name, selftest.check(backends.choose(cpu), cpu), selftest.check_capture())
"""
        served = backends.choose(torch.device("cpu")).name
        expected = f"{without_library / 'fusedaccum' / 'backends.py'} {served} None None"
        assert run_python(program, path=without_library).strip() == expected

    def test_cuda_asked_for_by_name_is_refused_with_the_reason(self, without_library: Path) -> None:
        program = """
import torch
from fusedaccum import backends
try:
    backends.choose(torch.device("cuda"), "cuda")
except backends.BackendUnavailableError as error:
    print(error)
"""
        said = run_python(program, path=without_library).strip()
        assert said == "backend is 'cuda', but there is no compiled library: no nvcc was there"

    def test_without_being_asked_triton_serves_and_says_nothing(
        self, without_library: Path, triton_installed: str
    ) -> None:
        assert run_python(UNASKED, path=without_library).strip() == "['triton', 'triton'] []"

    def test_without_triton_too_the_reference_serves_and_says_so_once(self, without_library: Path) -> None:
        said = run_python("import sys\nsys.modules['triton'] = None\n" + UNASKED, path=without_library)
        assert said.startswith(
            "['reference', 'reference'] ['fusedaccum: the slower reference backend serves cuda devices"
        )
        assert "because there is no compiled library: no nvcc was there; triton is not installed" in said


def test_the_cuda_backend_refuses_cpu_parameters() -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(backends.BackendUnavailableError) as caught:
        FusedAccumOptimizer(torch.optim.AdamW([param]), backend="cuda")
    assert str(caught.value) == "backend is 'cuda', but the cuda backend serves cuda devices, not cpu"


class TestArchitectures:
    @pytest.mark.parametrize(
        ("listed", "flags"),
        [
            ("9.0", ["compute_90,code=sm_90"]),
            ("9.0+PTX", ["compute_90,code=sm_90", "compute_90,code=compute_90"]),
            ("8.0;9.0", ["compute_80,code=sm_80", "compute_90,code=sm_90"]),
            ("8.0 9.0a", ["compute_80,code=sm_80", "compute_90a,code=sm_90a"]),
            ("12.0f;", ["compute_120f,code=sm_120f"]),
            ("90", ["compute_90,code=sm_90"]),
        ],
    )
    def test_accepted(self, build_script: ModuleType, listed: str, flags: list[str]) -> None:
        assert build_script.gencode_flags(listed) == [f"-gencode=arch={flag}" for flag in flags]

    @pytest.mark.parametrize("listed", ["Hopper", "9.0;Ada", "9.0+ptx", "+PTX", "9.x", "a", "-9", "8.0,9.0"])
    def test_refused(self, build_script: ModuleType, listed: str) -> None:
        with pytest.raises(ValueError, match=r"TORCH_CUDA_ARCH_LIST has '.*'; accepted: numbers as 9\.0, or 9\.0\+PTX"):
            build_script.gencode_flags(listed)

    @pytest.mark.parametrize("listed", ["", " ", ";"])
    def test_nothing_would_leave_the_choice_to_nvcc(self, build_script: ModuleType, listed: str) -> None:
        with pytest.raises(ValueError, match=r"TORCH_CUDA_ARCH_LIST is '.*'; accepted: one architecture or more"):
            build_script.gencode_flags(listed)

    def test_default(self, build_script: ModuleType) -> None:
        flags = build_script.gencode_flags(build_script.DEFAULT_ARCHITECTURES)
        assert [flag for flag in flags if "code=compute" in flag] == ["-gencode=arch=compute_120,code=compute_120"]
        assert flags[-1] == "-gencode=arch=compute_120,code=compute_120"  # PTX of the newest, for those to come


class TestDecision:
    """FUSEDACCUM_CUDA, without a build: nvcc is not there, or fails."""

    @pytest.fixture
    def decide(self, build_script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        """Calls build_cuda on an empty package with the environment given."""

        def decide(**environment: str) -> dict[str, object]:
            for name in ("FUSEDACCUM_CUDA", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST"):
                monkeypatch.delenv(name, raising=False)
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            return build_script.build_cuda(tmp_path / "package", tmp_path / "work", [], [])

        return decide

    @pytest.fixture
    def toolkit(self, tmp_path: Path) -> Path:
        """A CUDA_HOME whose nvcc fails."""
        nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text("#!/bin/sh\necho unsupported gpu architecture >&2\nexit 1\n")
        nvcc.chmod(0o755)
        return nvcc.parent.parent

    def test_0_does_not_build(self, decide) -> None:
        assert decide(FUSEDACCUM_CUDA="0") == {"built": False, "reason": "FUSEDACCUM_CUDA=0 was set at build time"}

    def test_0_removes_what_an_earlier_build_left(self, decide, tmp_path: Path) -> None:
        library = tmp_path / "package" / "_cuda.so"
        library.parent.mkdir()
        library.touch()
        decide(FUSEDACCUM_CUDA="0")
        assert not library.exists()

    @pytest.mark.parametrize("value", ["yes", "2", "", "AUTO"])
    def test_anything_else_is_refused(self, decide, value: str) -> None:
        with pytest.raises(SystemExit, match=f"FUSEDACCUM_CUDA is '{value}'; accepted: auto, 0, 1"):
            decide(FUSEDACCUM_CUDA=value)

    def test_auto_without_nvcc_records_why(self, decide) -> None:
        reason = "nvcc was found neither in CUDA_HOME nor on the PATH"
        assert decide(PATH="") == {"built": False, "reason": reason}
        assert decide(FUSEDACCUM_CUDA="auto", CUDA_HOME="/nonexistent") == {"built": False, "reason": reason}

    def test_1_without_nvcc_fails_with_the_reason(self, decide) -> None:
        with pytest.raises(SystemExit, match="FUSEDACCUM_CUDA=1, but nvcc was found neither in CUDA_HOME nor on the"):
            decide(FUSEDACCUM_CUDA="1", PATH="")

    def test_a_compiler_that_fails(self, decide, toolkit: Path, capfd: pytest.CaptureFixture[str]) -> None:
        record = decide(CUDA_HOME=str(toolkit))
        assert record["built"] is False
        assert re.fullmatch(r"nvcc failed on \w+\.(cu|cpp)", record["reason"])
        with pytest.raises(SystemExit, match=r"FUSEDACCUM_CUDA=1, but nvcc failed on .*\nunsupported gpu architecture"):
            decide(FUSEDACCUM_CUDA="1", CUDA_HOME=str(toolkit))

    def test_a_compiler_that_cannot_be_run(self, decide, toolkit: Path) -> None:
        (toolkit / "bin" / "nvcc").write_bytes(b"\x7fELF nothing")
        assert decide(CUDA_HOME=str(toolkit))["built"] is False
        with pytest.raises(SystemExit, match="FUSEDACCUM_CUDA=1, but "):
            decide(FUSEDACCUM_CUDA="1", CUDA_HOME=str(toolkit))

    @pytest.mark.parametrize("listed", ["Hopper", ";"])
    def test_architectures_that_are_not_understood(self, decide, toolkit: Path, listed: str) -> None:
        # An install must not fail for what the environment happens to hold; where CUDA is asked for it must.
        record = decide(CUDA_HOME=str(toolkit), TORCH_CUDA_ARCH_LIST=listed)
        assert record["built"] is False
        assert record["reason"].startswith("TORCH_CUDA_ARCH_LIST ")
        with pytest.raises(SystemExit, match="FUSEDACCUM_CUDA=1, but TORCH_CUDA_ARCH_LIST"):
            decide(FUSEDACCUM_CUDA="1", CUDA_HOME=str(toolkit), TORCH_CUDA_ARCH_LIST=listed)

    def test_1_where_nothing_native_is_built(self, build_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        from setuptools import Distribution  # setup.py imports it too: build_script has skipped where it is missing

        command = build_script.without_libraries("torch is not there")(Distribution())
        monkeypatch.setenv("FUSEDACCUM_CUDA", "1")
        with pytest.raises(SystemExit, match="FUSEDACCUM_CUDA=1, but torch is not there"):
            command.run()
