"""The same bits from every instruction set and number of threads, and however gradients come in buckets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import isa_workload
import pytest
import torch
from conftest import ROOT
from helpers import DTYPES, SIZES, Buffers, accumulate, assert_same_buffers

from fusedaccum.backends import Backend
from fusedaccum.layout import CHUNK


def run_workload(isa: str, n_threads: Sequence[int]) -> list[list[str]]:
    """(isa, digest) for each number of threads, from a process of its own: the choice is made once a process."""
    command = [sys.executable, str(ROOT / "tests" / "isa_workload.py"), *map(str, n_threads)]
    environment = {**os.environ, "FUSEDACCUM_ISA": isa}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [line.split() for line in run.stdout.splitlines()]


def test_every_instruction_set_and_thread_count_gives_the_same_bits(isas: list[str], reference: Backend) -> None:
    expected = isa_workload.run(reference)
    for isa in isas:
        assert run_workload(isa, [1, 2]) == [[isa, expected]] * 2


def test_an_unknown_instruction_set_is_refused(isas: list[str]) -> None:
    program = "import torch\nfrom fusedaccum import backends\nbackends.choose(torch.device('cpu'), 'native')"
    environment = {**os.environ, "FUSEDACCUM_ISA": "AVX2"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert run.returncode != 0
    assert f"FUSEDACCUM_ISA is 'AVX2'; accepted by this processor and build: {', '.join(isas)}" in run.stderr


@pytest.mark.parametrize("order", ["one call each", "reversed", "in threes, shuffled"])
def test_buckets_do_not_change_a_bit(backend: Backend, order: str) -> None:
    slots = list(range(len(SIZES)))
    grads = [[torch.randn(n).to(DTYPES[(s + i) % 3]) for s, n in enumerate(SIZES)] for i in range(2)]
    shuffled = torch.randperm(len(slots)).tolist()
    buckets = {
        "one call each": [[s] for s in slots],
        "reversed": [slots[::-1]],
        "in threes, shuffled": [shuffled[at : at + 3] for at in range(0, len(slots), 3)],
    }[order]
    whole, split = Buffers(SIZES), Buffers(SIZES)
    for micro_batch, each in enumerate(grads):
        first = int(micro_batch == 0)
        accumulate(backend, whole, each, [first] * len(slots), scale=0.3, micro=True)
        for bucket in buckets:
            chosen = [each[s] for s in bucket]
            accumulate(backend, split, chosen, [first] * len(bucket), bucket, scale=0.3, micro=True)
    assert_same_buffers(split, whole)


@pytest.mark.parametrize(
    "sizes",
    [
        (4 * CHUNK,),
        (2 * CHUNK, 2 * CHUNK),
        (CHUNK + 1, 3 * CHUNK - 1),
        (1, 6 * CHUNK),
        (3 * CHUNK, 0, CHUNK),
        (700,) * 200,
    ],
    ids=["aligned", "aligned pair", "one beyond", "one before", "with an empty slot", "many small"],
)
def test_threads_share_chunks_without_gaps_or_repeats(backend: Backend, sizes: tuple[int, ...]) -> None:
    # A thread's range may end exactly at a chunk, one element before or after it, or in the midst of one.
    slots = list(range(len(sizes)))
    grads = [torch.ones(n) for n in sizes]
    threads_before = torch.get_num_threads()
    try:
        for n_threads in (1, 2, 3, 4):
            torch.set_num_threads(n_threads)
            buffers = Buffers(sizes)
            buffers.acc.fill_(1.0)
            accumulate(backend, buffers, grads, [0] * len(slots))
            for s in (slots[0], slots[-1], *slots[:: max(len(slots) // 8, 1)]):
                assert (buffers.of("acc", s) == 2.0).all(), (n_threads, s)
            assert buffers.partials.sum().item() == 4.0 * sum(sizes), n_threads
    finally:
        torch.set_num_threads(threads_before)
