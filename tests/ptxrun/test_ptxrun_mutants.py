"""Does the interpreter notice broken kernels? One PTX line is changed at a time: the run must fail or differ."""

from __future__ import annotations

import re

import numpy as np
import pytest

from . import Module, PtxError, Uninit, cuda
from .support import KERNELS, acc_and_grads, multi_tensor_meta, to16


def _wider_butterfly(line):
    return re.sub(r", (\d+), 31", lambda m: f", {int(m[1]) * 2 % 32 or 1}, 31", line)


MUTATIONS = {
    "no barrier": (r"^\s*(bar\.sync|barrier\.sync)\s", lambda line: ""),
    "lt becomes le": (r"setp\.lt\.", lambda line: line.replace("setp.lt", "setp.le", 1)),
    "ge becomes gt": (r"setp\.ge\.", lambda line: line.replace("setp.ge", "setp.gt", 1)),
    "no guard": (r"^\s*@%p\d+ (ld|st)", lambda line: re.sub(r"@%p\d+ ", "", line)),
    "no store": (r"^\s*(@!?%p\d+ )?st\.", lambda line: ""),
    "another lane": (r"shfl\.sync\.bfly.*", _wider_butterfly),
    "fma becomes mul": (
        r"fma\.rn\.f32",
        lambda line: re.sub(r"fma\.rn\.f32(\s+\S+ \S+ \S+), \S+;", r"mul.f32\1;", line),
    ),
}


def mutants(ptx):
    """Yields (mutation, line number, line, mutated PTX)."""
    lines = ptx.split("\n")
    for i, line in enumerate(lines):
        for name, (pattern, mutate) in MUTATIONS.items():
            if re.search(pattern, line) and mutate(line) != line:
                yield name, i + 1, line.strip(), "\n".join([*lines[:i], mutate(line), *lines[i + 1 :]])


def unnoticed(ptx, run):
    """(Counter-like dict of mutants made, list of those that changed nothing)."""
    good, made, missed = run(ptx), {}, []
    for name, number, line, mutant in mutants(ptx):
        made[name] = made.get(name, 0) + 1
        try:
            if run(mutant) == good:
                missed.append((name, number, line))
        except PtxError:
            pass
    return made, missed


@pytest.mark.usefixtures("nvcc")
@pytest.mark.parametrize("arch", [90, 100])
def test_cuda(arch):
    source = cuda.compile_ptx(KERNELS / "multi_tensor.cu", arch, ("-std=c++17",))
    start = source.index(".visible .entry accnorm_bf16(")
    head = source[: source.index(".visible .entry")]
    kernel = head + source[start : source.index(".visible .entry", start + 10)]

    def run(ptx):
        mod = Module(ptx)
        tensors = acc_and_grads("bf16", [1, 1000, 4096, 777])
        meta, n_blocks, addresses = multi_tensor_meta(mod, tensors, 2048)
        out, flag = np.zeros(n_blocks, np.float32), np.zeros(1, np.int32)
        args = [meta, 2048, 0.5, Uninit(out), flag]
        mod.launch("accnorm_bf16", n_blocks, 256, args, check_races="all", max_steps=100_000)
        accs = [mod.mem.read(p, np.float32, acc.size) for (acc, _), p in zip(tensors, addresses, strict=True)]
        return b"".join(x.tobytes() for x in (*accs, out, flag))

    made, missed = unnoticed(kernel, run)
    assert sum(made.values()) >= 20
    # Equivalent or out of reach of these inputs: loop bounds that are tested again inside, and the store of the flag
    # for a nonfinite value, of which there is none.
    allowed = {"ge becomes gt": 2, "lt becomes le": 1, "no store": 1}
    counts = {name: sum(m[0] == name for m in missed) for name in made}
    assert all(n <= allowed.get(name, 0) for name, n in counts.items()), missed


@pytest.mark.parametrize("cc", [80, 90, 100])
def test_triton(triton_kernels, cc):
    signature = {"a_ptr": "*fp32", "g_ptr": "*bf16", "part_ptr": "*fp32", "flag_ptr": "*i32"}
    signature |= {"scale": "fp32", "n": "i32"}
    options = {"divisible": ["a_ptr", "g_ptr", "part_ptr"], "enable_fp_fusion": True}
    constants = {"BLOCK": 1024, "ATOMIC": False}
    compiled = triton_kernels.aot(triton_kernels.optim.t_accnorm, signature, constants, cc, **options)

    def run(ptx):
        n, r = 5003, np.random.default_rng(0)
        acc, grad = r.standard_normal(n).astype(np.float32), to16(r.standard_normal(n).astype(np.float32), "bf16")
        grad[77] = 0x7F80
        part, flag = np.zeros(5, np.float32), np.zeros(1, np.int32)
        args = [acc, grad, Uninit(part), flag, 0.37, n, 0, 0]
        options = {"shared_bytes": compiled.metadata.shared, "check_races": "all", "max_steps": 100_000}
        Module(ptx).launch("t_accnorm", 5, 128, args, **options)
        return acc.tobytes() + part.tobytes() + flag.tobytes()

    made, missed = unnoticed(compiled.asm["ptx"], run)
    assert sum(made.values()) >= 60
    # Equivalent: masks of elements none of which is element n, guards of elements that lie below n in every block, and
    # guards of stores of one value by all threads. Out of reach of these inputs: without its store, the flag's word
    # in shared memory holds an older nonzero value, and the flag is set anyhow.
    allowed = {"lt becomes le": 14, "no guard": 6, "no store": 1}
    counts = {name: sum(m[0] == name for m in missed) for name in made}
    assert all(n <= allowed.get(name, 0) for name, n in counts.items()), missed
