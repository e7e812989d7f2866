"""Runs every op on fixed inputs and prints a digest of all that came out: test_isa.py compares such runs.

Usage: isa_workload.py THREADS...: one line, "isa digest", for each number of threads.
"""

from __future__ import annotations

import hashlib
import math
import sys

import torch
from helpers import DTYPES, Buffers, adam_hyper, assert_same_bits, finalize, sgd_hyper
from helpers import accumulate as accumulate_on

from fusedaccum import backends, layout
from fusedaccum.layout import CHUNK, RULE_ADAM, RULE_SGD

SIZES = (0, 1, 15, 17, 1023, 1025, CHUNK - 1, CHUNK, 3 * CHUNK + 77, 5, 70_000) * 2
SLOTS = range(len(SIZES))


RULES = {
    RULE_ADAM: [adam_hyper(weight_decay=0.1, amsgrad=True), adam_hyper(weight_decay=0.1, decoupled=False)],
    RULE_SGD: [sgd_hyper(momentum=0.9, nesterov=True, weight_decay=0.1), sgd_hyper(weight_decay=0.1)],
}


def windows(backend: backends.Backend, rule: int) -> Buffers:
    """All buffers after two windows by a rule, over parameters and gradients of every kind, and an overflow."""
    generator = torch.Generator().manual_seed(rule)
    kinds = [DTYPES[s % 3] for s in SLOTS]
    masters = [s for s in SLOTS if kinds[s] != torch.float32 and s % 2]
    groups = [s // (len(SIZES) // 2) for s in SLOTS]
    buffers = Buffers(SIZES, groups, masters, [s for s in SLOTS if groups[s] == 0], shift=1)
    for name in ("exp_avg", "exp_avg_sq", "extra", "steps"):
        getattr(buffers, name).zero_()
    for s in SLOTS:
        buffers.add_param(torch.randn(SIZES[s], generator=generator), kinds[s], s % 2)
        if s in masters:
            buffers.fill("master", s, buffers.params[s].float())
    states = (buffers.exp_avg, buffers.exp_avg_sq) if rule == RULE_ADAM else ()
    step = backend.adam_step_ if rule == RULE_ADAM else backend.sgd_step_
    slots = list(SLOTS)

    def accumulate(first: int, size: float, micro: bool, factor: float | None = None) -> None:
        values = [torch.randn(n, generator=generator) * size for n in SIZES]
        grads = [value.to(DTYPES[(s + 1) % 3]) for s, value in enumerate(values)]
        accumulate_on(backend, buffers, grads, [first] * len(slots), scale=1 / 3, factor=factor, micro=micro)

    for micro in (False, True):
        buffers.window[layout.WEIGHT], buffers.window[layout.WEIGHT_SQ] = 0.5, 0.25
        accumulate(1, 1.0, micro)
        accumulate(0, 1.0, micro)
        accumulate(0, 1.0, micro, 0.3)
        accumulate(0, math.inf, micro, 0.0)
        finalize(
            backend, buffers, RULES[rule], rule, numerator=0.7, weight=2.0, weight_sq=2.0, max_norm=100.0, micro=micro
        )
        shared = (buffers.acc, buffers.table, buffers.scalars, buffers.control, slots)
        step(buffers.params, *states, buffers.extra, buffers.master, *shared)
        assert buffers.control[layout.SKIPPED] == 0.0
    # Chunks whose squares overflow fp32 are looked at again.
    accumulate(0, 1e20, True)
    kept = buffers.partials.clone()
    backend.measure_(buffers.partials, buffers.acc, buffers.table, slots, list(SIZES))
    assert_same_bits(buffers.partials, kept, "measured partials")
    return buffers


def run(backend: backends.Backend) -> str:
    """The digest of every bit that came out."""
    digest = hashlib.sha256()
    for rule in RULES:
        for whole in windows(backend, rule).whole.values():
            digest.update(whole.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    for n_threads in map(int, sys.argv[1:]):
        torch.set_num_threads(n_threads)
        native = backends.choose(torch.device("cpu"), "native")
        print(native.detail, run(native))
