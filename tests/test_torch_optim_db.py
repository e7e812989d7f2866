"""torch's own optimizer tests, on wrapped optimizers: what passes, what is refused and why.

torch ships the data of its optimizer tests (``optim_db``: configurations, bad input, flags, schedulers), though not
the tests. Each of ``CHECKS`` is in the manner of one of them, run once with the plain optimizer and once with it
wrapped; ``TABLE`` says what comes of it, for every optimizer of torch. It is compared, so that it cannot go stale.
"""

from __future__ import annotations

import pytest
import torch
from models import U32
from optim_db_checks import CHECKS, NothingToRunError, tried
from torch.testing._internal.common_optimizers import optim_db

# What a check may find.
BITS = "same bits"
ROUNDING = "fp32 rounding"  # within the bound of ``_compare``; the same bits now and then
TORCH = "torch's error"  # the plain optimizer's, type and text
BEYOND = "runs, where torch does not on the CPU"
NEVER = "refused: the optimizer"
DIFFERENTIABLE = "refused: the step runs outside of autograd"
COMPLEX = "refused: the accumulator is fp32"
GAPS = "refused: the kernels walk through memory"
NONE = ""  # torch has no such case for this optimizer

REFUSALS = {
    "which cannot be wrapped": NEVER,
    "has differentiable=True; accepted: False": DIFFERENTIABLE,
    "has dtype complex64; accepted": COMPLEX,
    "has gaps or overlaps in memory": GAPS,
}


OWN_STEP = "Adadelta Adafactor Adagrad Adamax ASGD Muon NAdam RAdam RMSprop Rprop"
FUSED = "Adam AdamW SGD"
UNWRAPPED = "LBFGS SparseAdam"
_EVERYWHERE = {BITS: OWN_STEP, ROUNDING: FUSED, NEVER: UNWRAPPED}
_OWN_STEP_BUT_MUON = "Adadelta Adafactor Adagrad Adamax ASGD NAdam RAdam RMSprop Rprop"

TABLE = {
    "every configuration": _EVERYWHERE,
    "foreach=True": {BITS: _OWN_STEP_BUT_MUON, ROUNDING: FUSED},
    "fused=True": {BITS: "Adagrad", ROUNDING: FUSED},
    "capturable=True": {TORCH: "Adadelta Adamax ASGD NAdam RAdam RMSprop Rprop", BEYOND: "Adam AdamW"},
    "differentiable=True": {DIFFERENTIABLE: f"Adadelta Adagrad Adamax ASGD NAdam RAdam RMSprop Rprop {FUSED}"},
    "lr as a tensor": _EVERYWHERE,
    "parameter groups": {BITS: OWN_STEP, ROUNDING: FUSED, NEVER: "SparseAdam"},
    "closure": _EVERYWHERE,
    "its schedulers": _EVERYWHERE,
    "no gradients": _EVERYWHERE,
    "zero gradients": _EVERYWHERE,
    "sparse gradients": {ROUNDING: "Adagrad SGD", NEVER: "SparseAdam"},
    "complex parameters": {
        COMPLEX: f"Adadelta Adagrad Adamax ASGD NAdam RAdam RMSprop Rprop {FUSED}",
        NEVER: "LBFGS",
    },
    "strided parameters": {BITS: OWN_STEP, GAPS: FUSED, NEVER: UNWRAPPED},
    "empty parameter": {
        BITS: "Adadelta Adagrad Adamax ASGD Muon NAdam RAdam RMSprop Rprop",
        TORCH: "Adafactor",
        ROUNDING: FUSED,
        NEVER: UNWRAPPED,
    },
    "save and load": _EVERYWHERE,
    "older state_dict": _EVERYWHERE,
    "step as a number": _EVERYWHERE,
    "deepcopy": _EVERYWHERE,
    "bad input": {
        TORCH: f"Adadelta Adagrad Adamax ASGD LBFGS NAdam RAdam RMSprop Rprop {FUSED}",
        f"{COMPLEX} / {TORCH}": "Adafactor Muon",  # as they do, but already at construction
        f"{NEVER} / {TORCH}": "SparseAdam",
    },
}


# Outcomes ------------------------------------------------------------------------------------------------------------


def _compare(ours, plain):
    """BITS or ROUNDING; an AssertionError where they differ by more.

    Two fp32 runs of at most 12 steps with the same gradients: each step rounds the parameter (below 2^2 here) twice in
    either run, and its update is a handful of operations, which Adam's quotient magnifies by at most
    1 / sqrt(1 - beta2) = 32: 2^9 * U32 of the distance moved for both runs together, below 2^-1 here.
    ``test_torch_parity.py`` has 20 steps and the bound of each case.
    """
    atol = 12 * U32 * (4 * 2**2 + 2**9 * 2**-1)
    assert len(ours[0]) == len(plain[0])
    assert ours[1].keys() == plain[1].keys()
    pairs = list(zip(ours[0], plain[0], strict=True))
    for key, held in plain[1].items():
        assert ours[1][key].keys() == held.keys()
        pairs += [(ours[1][key][name], value) for name, value in held.items()]
    same = True
    for one, other in pairs:
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=2**-16, atol=atol)
            same = same and torch.equal(one, other)
        else:
            assert one == other
    return BITS if same else ROUNDING


def _outcome(run, backend):
    """What one run finds; anything that ``TABLE`` has no word for is an error."""
    plain, plain_error = tried(run, None)
    ours, error = tried(run, backend)
    if error is None:
        return _compare(ours, plain) if plain_error is None else BEYOND
    if plain_error is not None and (type(error), str(error)) == (type(plain_error), str(plain_error)):
        return TORCH
    refusals = [kind for text, kind in REFUSALS.items() if text in str(error)]
    if not refusals:
        raise error
    return refusals[0]


# Where torch's own step runs, it runs on the same sums whatever the backend.
CASES = [(info, "auto") for info in optim_db] + [(info, "reference") for info in optim_db if info.name in FUSED.split()]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("info", "backend"), CASES, ids=[f"{info.name}-{backend}" for info, backend in CASES])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch's own Adagrad
def test_the_table(info, backend, check):
    want = next((outcome for outcome, names in TABLE[check].items() if info.name in names.split()), NONE)
    try:
        runs = CHECKS[check](info)
    except NothingToRunError:
        runs = []
    found = {_outcome(run, backend) for run in runs}
    if ROUNDING in want:
        found = {ROUNDING if each == BITS else each for each in found}
    assert " / ".join(sorted(found)) == want


def test_the_table_is_whole():
    names = {info.name for info in optim_db}
    assert TABLE.keys() == CHECKS.keys()
    assert {*OWN_STEP.split(), *FUSED.split(), *UNWRAPPED.split()} == names
    for row in TABLE.values():
        listed = " ".join(row.values()).split()
        assert len(listed) == len(set(listed))
        assert set(listed) <= names
