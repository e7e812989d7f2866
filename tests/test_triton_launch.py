"""Around the Triton kernels: launches, uploads, what is compiled anew, what ptxas makes of it. No GPU takes part."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cuda_cases import KINDS, Param, every_grad, ready_to_step, step
from helpers import Buffers, accumulate, assert_same_buffers
from torch import Tensor
from triton_cases import check_roundings, check_widenings

from bench.cuda_code import REGISTER_UNIT, REGISTERS, WARPS
from fusedaccum import __main__, backends, triton_backend
from fusedaccum.backends import Backend
from fusedaccum.layout import CHUNK, RULE_ADAM

pytestmark = pytest.mark.usefixtures("one_thread")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ARCHS = (80, 90, 100)
# What every launch of ``launch.py`` asks for: accumulate with and without statistics and a factor, and so on.
VARIANTS = [
    *(f"accumulate<{micro}, {factor}>" for micro in (0, 1) for factor in (0, 1)),
    "measure",
    *(f"finalize<{rule}, {micro}>" for rule in (0, 1, 2) for micro in (0, 1)),
    "adam",
    "sgd",
]
# Registers a thread, and the share of an sm_90 multiprocessor's warps that then fits. At 700 ns, the 4.8 TB/s of an
# H200 are 25 KB in flight on each of its 132 multiprocessors; a thread of accumulate has 48 bytes, one of adam 112.
BUDGETS = {
    "accumulate": (88, 0.3),
    "statistics": (120, 0.25),
    "measure": (64, 0.5),
    "adam": (128, 0.25),
    "sgd": (64, 0.5),
    "finalize": (80, 0.0),
}


@pytest.fixture(scope="module")
def kernels(triton_installed: str) -> ModuleType:
    """``triton_harness``, which imports Triton."""
    import triton_harness

    return triton_harness


class TestInterpreted:
    def test_every_value_of_16_bits(self, native: Backend, interpreted_triton: Backend) -> None:
        check_widenings(native, interpreted_triton)
        check_roundings(native, interpreted_triton)


class TestPlan:
    @pytest.fixture
    def plan(self, kernels: ModuleType) -> ModuleType:
        return kernels.package().plan

    def test_entries(self, plan: ModuleType) -> None:
        tensors = [(4096, CHUNK + 1, 1), (0, 0, 0), (64, 1, 2)]
        made = plan.Plan(tensors, [7, 3, 0], [1, 0, 0])
        assert (made.n_entries, made.n_programs) == (2, 3)
        assert made.words.tolist() == [4096, 64, 2, 3, 7 << 3 | 1 << 1 | 1, 0 << 3 | 2 << 1]

    def test_nothing_to_do(self, plan: ModuleType) -> None:
        assert plan.Plan([], []).n_programs == plan.Plan([(0, 0, 0)], [1]).n_programs == 0

    def test_more_than_a_grid_holds(self, plan: ModuleType) -> None:
        with pytest.raises(RuntimeError, match="2147483648 chunks in one call"):
            plan.Plan([(0, 2**31 * CHUNK, 0)], [0])


class TestUpload:
    @pytest.fixture
    def upload(self, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        """The module as it works for a GPU; its device memory is the host's."""
        module = kernels.package().upload
        monkeypatch.setattr(module, "_page_locked", lambda n: torch.empty(n, dtype=torch.int64))
        monkeypatch.setattr(module, "_reserves", {})
        monkeypatch.setattr(module, "_captured", [])
        monkeypatch.setattr(module, "_plans", type(module._plans)())
        monkeypatch.setattr(module, "_is_capturing", lambda device: self.capturing)
        monkeypatch.setattr(torch.Tensor, "to", lambda *arguments, **options: self._to(*arguments, **options))
        self.capturing, self.copies = False, []
        return module

    def _to(self, tensor: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        self.copies.append(tensor)
        return tensor.clone()

    def test_words_arrive(self, upload: ModuleType, kernels: ModuleType) -> None:
        words = kernels.package().plan.Plan([(64, 5, 1)], [2]).words
        assert upload.uploaded(words, CPU).tolist() == [64, 1, 2 << 3 | 1 << 1]
        assert self.copies == []
        assert upload.uploaded(words, CUDA).tolist() == [64, 1, 2 << 3 | 1 << 1]
        assert len(self.copies) == 1

    def test_memory_that_a_graph_reads_is_never_used_again(self, upload: ModuleType, kernels: ModuleType) -> None:
        plan = kernels.package().plan.Plan
        upload.uploaded(plan([(0, 1, 0)], [0]).words, CUDA)  # the warm-up reserves memory
        self.capturing = True
        self.copies.clear()
        for i in range(5):
            upload.uploaded(plan([(i, 1, 0)] * 3, [0, 1, 2]).words, CUDA)
        self.capturing = False
        upload.uploaded(plan([(99, 1, 0)], [0]).words, CUDA)
        assert [pinned[0].item() for pinned in self.copies] == [0, 1, 2, 3, 4, 99]
        places = [range(p.data_ptr(), p.data_ptr() + 8 * p.numel()) for p in self.copies]
        assert len({at for place in places for at in (place[0], place[-1])}) == 12
        assert all(a.stop <= b.start for a, b in pairwise(places[:5]))

    def test_a_capture_without_a_warm_up_is_refused(self, upload: ModuleType, kernels: ModuleType) -> None:
        self.capturing = True
        with pytest.raises(RuntimeError, match=r"needs 3 words of page-locked memory.* run the window once outside"):
            upload.uploaded(kernels.package().plan.Plan([(0, 1, 0)], [0]).words, CUDA)

    def test_once_until_an_address_a_size_or_the_slots_change(self, upload: ModuleType) -> None:
        tensors, slots = [(64, 5, 1), (128, 7, 0)], [2, 0]
        first = upload.uploaded_once(tensors, slots, CUDA)
        assert upload.uploaded_once(list(tensors), list(slots), CUDA) is first
        assert len(self.copies) == 1
        for changed in ([(64, 5, 1), (132, 7, 0)], [(64, 6, 1), (128, 7, 0)], [(64, 5, 2), (128, 7, 0)]):
            assert upload.uploaded_once(changed, slots, CUDA) is not first
        assert upload.uploaded_once(tensors, [2, 1], CUDA)[0].tolist() != first[0].tolist()
        assert len(self.copies) == 5
        assert upload.uploaded_once(tensors, slots, CUDA) is first

    def test_what_a_graph_reads_is_kept(self, upload: ModuleType) -> None:
        tensors, slots = [(64, 5, 1)], [0]
        first = upload.uploaded_once(tensors, slots, CUDA)
        self.capturing = True
        assert upload.uploaded_once(tensors, slots, CUDA) is first
        assert upload._captured[-1] is first[0]
        # Made in a capture it has no contents before the first replay, so nobody else may have it.
        other = upload.uploaded_once([(64, 6, 1)], slots, CUDA)
        self.capturing = False
        assert upload.uploaded_once([(64, 6, 1)], slots, CUDA) is not other

    def test_old_plans_go(self, upload: ModuleType) -> None:
        for i in range(upload.MAX_PLANS + 9):
            upload.uploaded_once([(64 * i, 5, 1)], [0], CUDA)
        assert len(upload._plans) == upload.MAX_PLANS


def test_a_step_notices_that_a_parameter_has_moved(native: Backend, interpreted_triton: Backend) -> None:
    results = []
    for backend in (native, interpreted_triton):
        buffers = ready_to_step(RULE_ADAM, [Param(40, *KINDS[1], 0)], 0, lambda n, dtype, g: torch.ones(n), 0.0)
        step(backend, buffers, RULE_ADAM, [1])
        buffers.params[1] = buffers.params[1].clone()
        buffers.whole["moved"] = buffers.params[1]
        step(backend, buffers, RULE_ADAM, [1])
        results.append(buffers)
    assert_same_buffers(*results[::-1])


class TestOneCompilation:
    """Triton compiles anew when what it specialises on changes: that must be the dtypes and nothing else."""

    @pytest.fixture
    def key(self, kernels: ModuleType) -> Callable[..., Any]:
        """What Triton looks a compiled kernel up by."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime import jit

        def key(kernel: Any, *arguments: Any, **constants: Any) -> Any:
            backend = make_backend(GPUTarget("cuda", 90, 32))
            binder = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
            return binder(*arguments, **constants, debug=False)[1]

        return key

    def test_numbers_and_alignments_do_not_matter(self, kernels: ModuleType, key: Callable[..., Any]) -> None:
        launch = kernels.package().launch
        keys = []
        for n_entries, scale, shift in ((1, 0.3, 0), (16, 1.0, 1), (2**31 - 1, 0.0, 2), (7, 1e300, 4)):
            acc, partials = torch.empty(99)[shift:], torch.empty(99, dtype=torch.float64)[shift:]
            table = torch.empty(99, dtype=torch.int64)[shift:]
            arguments = (acc, partials, partials, table, table, partials, n_entries, scale)
            keys.append(key(launch.accumulate_kernel, *arguments, KEEP_MICRO=False, HAS_FACTOR=True))
        assert all(other == keys[0] for other in keys[1:])
        other = key(launch.accumulate_kernel, *arguments, KEEP_MICRO=True, HAS_FACTOR=True)
        assert other != keys[0]

    def test_of_a_boundary(self, kernels: ModuleType, key: Callable[..., Any]) -> None:
        launch = kernels.package().launch
        keys, steps = [], []
        for number, weight, shift in ((1, 0.3, 0), (16, 1.0, 1), (17, 0.0, 2)):
            wide, real = torch.empty(99, dtype=torch.float64)[shift:], torch.empty(99)[shift:]
            table, active = torch.empty(99, dtype=torch.int64)[shift:], torch.empty(99, dtype=torch.uint8)[shift:]
            tensors = (wide, real, real, wide, wide, wide, table, wide, active, wide)
            numbers = (number,) * 4 + (weight,) * 4 + (number % 2, number % 2)
            keys.append(key(launch.finalize_kernel, *tensors, *numbers, RULE=0, HAS_MICRO=True))
            steps.append(key(launch.adam_kernel, *[real] * 5, table, real, wide, table, number))
        assert all(other == keys[0] for other in keys[1:])
        assert all(other == steps[0] for other in steps[1:])


@pytest.fixture(
    scope="module", params=[(name, arch) for name in VARIANTS for arch in ARCHS], ids=lambda p: f"{p[0]}-{p[1]}"
)
def code(request: pytest.FixtureRequest, kernels: ModuleType) -> tuple[str, Any]:
    """(op, what Triton and ptxas made of it) for each kernel and architecture."""
    name, arch = request.param
    op = "statistics" if name.startswith("accumulate<1") else name.partition("<")[0]
    function, constants = kernels.package().ahead.VARIANTS[name]
    return op, kernels.compiled(kernels.PACKAGE, function, tuple(constants.items()), arch)


def test_these_are_all_kernels(kernels: ModuleType) -> None:
    assert sorted(kernels.package().ahead.VARIANTS) == sorted(VARIANTS)


class TestMachineCode:
    def test_every_operation_is_rounded_by_itself(self, code: tuple[str, Any]) -> None:
        op, made = code
        ptx = re.sub(r"//.*", "", made.asm["ptx"])
        floats = set(re.findall(r"\b((?:add|sub|mul|div|sqrt|rcp|rsqrt|fma|mad|ex2|lg2)\.[\w.]*f(?:16|32|64)\w*)", ptx))
        assert {
            f
            for f in floats
            if not re.fullmatch(r"((add|sub|mul)\.rn\.f32x2|(add|sub|mul|div|sqrt|rcp)(\.rn)?\.f(32|64))", f)
        } == set()
        assert not re.search(r"\.(ftz|approx|full|sat)\b", ptx)
        roots = {f for f in floats if f.startswith(("div", "sqrt", "rcp"))}
        assert all(".rn." in f for f in roots)
        assert bool(roots) == (op in ("adam", "finalize"))

    def test_nothing_lies_in_local_memory_and_registers_leave_room(
        self, code: tuple[str, Any], tmp_path: Any, request: pytest.FixtureRequest
    ) -> None:
        op, made = code
        registers, stack, shared = _resources(made, tmp_path)
        assert stack <= 8  # Triton 3.6.0 has 8 bytes in sgd for sm_80, 3.9.0 has none
        most, share = BUDGETS[op]
        assert registers <= most
        warps = made.metadata.num_warps
        of_a_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
        assert REGISTERS // of_a_warp // warps * warps / WARPS >= share
        assert shared <= 16 * 1024

    def test_accesses_of_16_bytes(self, code: tuple[str, Any]) -> None:
        """Every array has its wide form: fp32 in two halves, 16-bit values in one access."""
        op, made = code
        loads, stores = (len(re.findall(rf"\b{way}\.global[\w.]*\.v4\.b32", made.asm["ptx"])) for way in ("ld", "st"))
        wanted = {
            "accumulate": (2 + 2 + 1, 2),
            "measure": (2, 0),
            "adam": (5 * 2 + 1, 4 * 2 + 1),
            "sgd": (3 * 2 + 1, 5),
        }
        if op in wanted:
            assert (loads, stores) == wanted[op]


def _resources(made: Any, folder: Any) -> tuple[int, int, int]:
    """(registers, bytes of stack, bytes of shared memory) of a kernel in machine code."""
    from triton import knobs

    (folder / "code.cubin").write_bytes(made.asm["cubin"])
    said = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", folder / "code.cubin"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    numbers = dict(re.findall(r"(REG|STACK|SHARED):(\d+)", said))
    return int(numbers["REG"]), int(numbers["STACK"]), int(made.metadata.shared)


class TestChoice:
    """backends.py, of devices that this machine need not have."""

    @pytest.fixture(autouse=True)
    def _fresh(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("FUSEDACCUM_BACKEND", raising=False)
        backends._warn_fallback.cache_clear()

    def test_cuda_before_triton_before_reference(self, monkeypatch: pytest.MonkeyPatch, triton_installed: str) -> None:
        loaded, missing = backends._Library(True, "CUDA 13"), backends._Library(False, "nvcc was not found")
        monkeypatch.setattr(backends, "cuda_library", lambda: loaded)
        backends._compiled.cache_clear()
        assert backends.choose(CUDA).name == "cuda"
        monkeypatch.setattr(backends, "cuda_library", lambda: missing)
        chosen = backends.choose(CUDA)
        assert (chosen.name, chosen.detail) == ("triton", f"Triton {triton_installed}, compiled at first use")
        monkeypatch.setattr(triton_backend, "why_not", lambda: "triton is not installed")
        with pytest.warns(UserWarning, match="nvcc was not found; triton is not installed"):
            assert backends.choose(CUDA).name == "reference"

    def test_rocm_and_xpu(self, monkeypatch: pytest.MonkeyPatch, triton_installed: str) -> None:
        assert backends.choose(torch.device("xpu")).name == "triton"
        monkeypatch.setattr(torch.version, "hip", "7.0")
        assert backends.choose(CUDA).name == "triton"
        assert backends.why_not("cuda", CUDA) == "this torch was built for ROCm"

    def test_a_name_never_falls_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(backends.BackendUnavailableError, match="serves cuda and xpu devices, not cpu"):
            backends.choose(CPU, "triton")
        monkeypatch.setattr(triton_backend, "why_not", lambda: "triton is 3.5.1; accepted: 3.6 or newer")
        with pytest.raises(backends.BackendUnavailableError, match=r"backend is 'triton', but triton is 3.5.1"):
            backends.choose(CUDA, "triton")
        monkeypatch.setenv("FUSEDACCUM_BACKEND", "triton")
        with pytest.raises(backends.BackendUnavailableError, match=r"FUSEDACCUM_BACKEND is 'triton', but triton is"):
            backends.choose(CUDA)

    @pytest.mark.parametrize(
        ("found", "reason"),
        [(None, "triton is not installed; `pip install triton`"), ("3.5.0", "triton is 3.5.0; accepted: 3.6 or newer")],
    )
    def test_what_is_said_of_a_missing_triton(
        self, monkeypatch: pytest.MonkeyPatch, found: str | None, reason: str
    ) -> None:
        monkeypatch.setattr(triton_backend, "version", lambda: found)
        assert triton_backend.why_not.__wrapped__() == reason

    def test_a_triton_that_does_not_import(self, monkeypatch: pytest.MonkeyPatch, triton_installed: str) -> None:
        def broken() -> ModuleType:
            raise ImportError("libtriton.so: no such file")

        monkeypatch.setattr(triton_backend, "launch", broken)
        said = triton_backend.why_not.__wrapped__()
        assert said == f"triton {triton_installed} does not work here: ImportError: libtriton.so: no such file"


class TestDoctor:
    def test_says_what_triton_is_here(
        self, triton_installed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(__main__.selftest, "check", lambda backend, device: None)
        monkeypatch.setattr(__main__.selftest, "check_capture", lambda: None)
        monkeypatch.setattr(triton_backend, "compile_times", lambda capability: iter([("adam", 0.4)]))
        assert __main__.main(["doctor", "--triton"]) == 0
        said = capsys.readouterr().out
        if not torch.cuda.is_available():
            assert f"triton     not available: triton {triton_installed} loads, but torch sees no GPU" in said
            assert "triton adam for sm_90 compiled (0.4 s)" in said

        def broken(capability: int) -> Iterator[tuple[str, float]]:
            raise RuntimeError("no ptxas")

        monkeypatch.setattr(triton_backend, "compile_times", broken)
        assert __main__.main(["doctor", "--triton"]) == 1
        assert "triton kernels FAILED to compile: RuntimeError: no ptxas" in capsys.readouterr().out

    def test_kernels_are_compiled_anew_and_the_cache_is_left_alone(
        self, triton_installed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        times = triton_backend.compile_times(90)
        names = [next(times)[0] for _ in range(2)]
        times.close()
        assert names == VARIANTS[:2]
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_importing_fusedaccum_imports_no_triton() -> None:
    script = "import sys, torch\nbefore = set(sys.modules)\nimport fusedaccum\nprint(*(set(sys.modules) - before))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    added = run.stdout.split()
    assert "fusedaccum.backends" in added
    assert not [name for name in added if name.partition(".")[0] == "triton" or "triton_kernels" in name]


def test_bad_devices_are_named(interpreted_triton: Backend) -> None:
    buffers = Buffers([6])
    meta = torch.empty(6, device="meta")
    with pytest.raises(RuntimeError, match=r"accumulate_: grads\[0\] is on meta; accepted: cpu, the device of acc"):
        accumulate(interpreted_triton, buffers, [meta], [1])
    buffers.partials = torch.empty(1, dtype=torch.float64, device="meta")
    with pytest.raises(RuntimeError, match="accumulate_: partials is on meta; accepted: cpu, as the first argument"):
        accumulate(interpreted_triton, buffers, [torch.ones(6)], [1])


def test_one_launch_for_every_dtype_and_size(interpreted_triton: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import GridExecutor

    launches = []
    original = GridExecutor.__call__
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *a, **k: (launches.append(1), original(self, *a, **k)))
    grads = every_grad((3, CHUNK + 1))
    buffers = Buffers([grad.n for grad in grads])
    buffers.acc.zero_()
    accumulate(interpreted_triton, buffers, [torch.ones(g.n, dtype=g.dtype) for g in grads], [g.first for g in grads])
    assert launches == [1]
