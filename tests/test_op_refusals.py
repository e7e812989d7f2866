"""Bad input: each op names itself, the argument, what it got and what it accepts, and writes nothing.

The same texts from every backend: they are compared in full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import need_host_table
from helpers import Buffers, adam_hyper
from torch import Tensor

from fusedaccum import layout
from fusedaccum.backends import Backend
from fusedaccum.layout import CHUNK

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = (6, CHUNK + 1)
Arguments = dict[str, Any]


def good_arguments(op: str) -> tuple[Buffers, Arguments]:
    """Arguments that the op takes, by name. Slot 0 has a bfloat16 parameter with a master."""
    buffers = Buffers(SIZES, masters=[0], extras=[0, 1])
    for whole in buffers.whole.values():
        whole.fill_(1.0)
    buffers.control[layout.SKIPPED] = 0.0
    acc, partials, table = buffers.acc, buffers.partials, buffers.table
    if op in ("adam_step_", "sgd_step_"):
        params = [
            buffers.add_param(torch.ones(2, 3), torch.bfloat16),
            buffers.add_param(torch.ones(SIZES[1]), torch.float32),
        ]
        states: Arguments = {"momentum_buffer": buffers.extra}
        if op == "adam_step_":
            states = {"exp_avg": buffers.exp_avg, "exp_avg_sq": buffers.exp_avg_sq, "max_exp_avg_sq": buffers.extra}
        rest = {"acc": acc, "table": table, "scalars": buffers.scalars, "control": buffers.control, "slots": [0, 1]}
        return buffers, {"params": params, **states, "master": buffers.master, **rest}
    if op == "measure_":
        return buffers, {"partials": partials, "acc": acc, "table": table, "slots": [0, 1], "n_elems": [6, SIZES[1]]}
    if op == "accumulate_":
        grads = [torch.ones(2, 3), torch.ones(SIZES[1], dtype=torch.bfloat16)]
        lists = {"grads": grads, "slots": [0, 1], "first": [1, 0]}
        sums = {"partials": partials, "micro_partials": buffers.micro_partials}
        factor = torch.ones(1, dtype=torch.float64)
        return buffers, {"acc": acc, **sums, "table": table, **lists, "scale": 1.0, "factor": factor}
    return buffers, {
        "control": buffers.control,
        "scalars": buffers.scalars,
        "steps": buffers.steps,
        "window": buffers.window,
        "partials": partials,
        "micro_partials": buffers.micro_partials,
        "table": table,
        "hyper": torch.tensor([adam_hyper()], dtype=torch.float64),
        "active": torch.ones(2, dtype=torch.uint8),
        "rule": layout.RULE_ADAM,
        "numerator": 1.0,
        "weight": 1.0,
        "weight_sq": 1.0,
        "max_norm": 1.0,
        "extra": torch.zeros(2, dtype=torch.float64),
        "advance": True,
    }


def cell(row: int, column: int, value: int) -> Callable[[Tensor], Tensor]:
    """``table`` with another value in one place."""

    def changed(table: Tensor) -> Tensor:
        table = table.clone()
        table[row, column] = value
        return table

    return changed


def entry(i: int, value: object) -> Callable[[list], list]:
    """A list with another entry."""
    return lambda old: [*old[:i], value(old[i]) if callable(value) else value, *old[i + 1 :]]


def gappy(tensor: Tensor) -> Tensor:
    """The same shape, every second element of its memory."""
    return torch.ones(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., ::2]


def has_dtype(name: str, got: str, accepted: str) -> str:
    return f"{name} has dtype {got}; accepted: {accepted}"


FLOATS = "float32, float16, bfloat16"
END = 64 + SIZES[1]  # of slot 1, which is at element 64
N_ACC = Buffers(SIZES).acc.numel()
COLUMNS = "accepted: 2 dimensions, the last of"

ONLY_TABLE_SHOWS = (" within the ", "; accepted: the ", " has group ", "and a master", " needs ")

# (argument, what becomes of it, the message after "op: ")
TABLE = [
    ("table", lambda t: t.int(), has_dtype("table", "int32", "int64")),
    ("table", lambda t: t.t(), "table is not contiguous; accepted: contiguous"),
    ("table", lambda t: t[:, :5].contiguous(), f"table has 2 dimensions, the last of 5; {COLUMNS} 6"),
    ("table", lambda t: t.flatten(), f"table has 1 dimensions, the last of 12; {COLUMNS} 6"),
]
SLOTS = [
    ("slots", entry(1, 2), "slots[1] is 2; accepted: 0 to 1"),
    ("slots", entry(0, -1), "slots[0] is -1; accepted: 0 to 1"),
    ("slots", entry(1, 0), "slots[1] is 0 again; accepted: each slot once"),
]
ACC = [
    ("acc", lambda t: t.double(), has_dtype("acc", "float64", "float32")),
    ("acc", lambda t: gappy(t), "acc is not contiguous; accepted: contiguous"),
]
PARTIALS = [
    ("partials", lambda t: t.float(), has_dtype("partials", "float32", "float64")),
    ("partials", lambda t: gappy(t), "partials is not contiguous; accepted: contiguous"),
]
MICRO_PARTIALS = [
    ("micro_partials", lambda t: t.float(), has_dtype("micro_partials", "float32", "float64")),
    ("micro_partials", lambda t: gappy(t), "micro_partials is not contiguous; accepted: contiguous"),
    ("micro_partials", lambda t: t[:2], "micro_partials has 2 elements; accepted: at least 3"),
]
SCALARS = [
    ("scalars", lambda t: t.double(), has_dtype("scalars", "float64", "float32")),
    ("scalars", lambda t: t.flatten(), f"scalars has 1 dimensions, the last of 24; {COLUMNS} 12"),
    ("scalars", lambda t: t.reshape(4, 6), f"scalars has 2 dimensions, the last of 6; {COLUMNS} 12"),
    ("scalars", lambda t: t[:1], "scalars has 1 rows; accepted: at least 2"),
]
CONTROL = [
    ("control", lambda t: t.float(), has_dtype("control", "float32", "float64")),
    ("control", lambda t: t[:4], "control has 4 elements; accepted: at least 8"),
]


def placement_cases(listed: str) -> list:
    """Rows that point outside of acc; ``listed``: the argument named in the message."""
    outside = f"accepted: within the {N_ACC} elements of acc"
    return [
        ("table", cell(1, 0, N_ACC), f"{listed}[1] has slot 1 at elements {N_ACC} to {N_ACC + SIZES[1]}; {outside}"),
        ("table", cell(0, 0, -64), f"{listed}[0] has slot 0 at elements -64 to -58; {outside}"),
        ("table", cell(0, 1, -1), f"{listed}[0] has slot 0 at elements 0 to -1; {outside}"),
        (
            "acc",
            lambda t: t[: END - 1],
            f"{listed}[1] has slot 1 at elements 64 to {END}; accepted: within the {END - 1} elements of acc",
        ),
    ]


def chunk_cases(listed: str) -> list:
    """Rows that point outside of partials."""
    inside = "accepted: within the 3 entries of partials"
    return [
        ("table", cell(1, 2, 2), f"{listed}[1] has chunks 2 to 4; {inside}"),
        ("table", cell(0, 2, -1), f"{listed}[0] has chunks -1 to 0; {inside}"),
    ]


def tensor_cases(listed: str) -> list:
    """Gradients or parameters that are not their slot's."""
    return [
        (listed, entry(1, lambda t: t.int()), has_dtype(f"{listed}[1]", "int32", FLOATS)),
        (listed, entry(0, lambda t: t.double()), has_dtype(f"{listed}[0]", "float64", FLOATS)),
        (listed, entry(0, lambda t: t[:, :2].contiguous()), f"{listed}[0] has 4 elements; accepted: the 6 of its slot"),
        (
            listed,
            entry(0, gappy),
            f"{listed}[0] has gaps or overlaps in memory; accepted: dense, in the order of its slot",
        ),
        (
            listed,
            entry(0, lambda t: t[:, :1].expand(2, 3)),
            f"{listed}[0] has gaps or overlaps in memory; accepted: dense, in the order of its slot",
        ),
    ]


def step_cases(extra: str) -> list:
    return [
        *ACC,
        *TABLE,
        *SLOTS,
        *SCALARS,
        *CONTROL,
        *placement_cases("params"),
        *tensor_cases("params"),
        ("slots", lambda old: old[:1], "slots has 1 entries; accepted: 2, one for each of params"),
        ("table", cell(1, 4, 0), "params[1] has dtype float32 and a master; accepted: no master"),
        ("master", lambda t: t.half(), has_dtype("master", "float16", "float32")),
        ("master", lambda t: None, "params[0] needs master elements 0 to 6; found 0"),
        ("master", lambda t: t[:5], "params[0] needs master elements 0 to 6; found 5"),
        (extra, lambda t: t.bfloat16(), has_dtype(extra, "bfloat16", "float32")),
        (extra, lambda t: gappy(t), f"{extra} is not contiguous; accepted: contiguous"),
        (extra, lambda t: None, f"params[0] needs {extra} elements 0 to 6; found 0"),
        (extra, lambda t: t[: END - 1], f"params[1] needs {extra} elements 64 to {END}; found {END - 1}"),
    ]


CASES = {
    "accumulate_": [
        *ACC,
        *PARTIALS,
        *TABLE,
        *SLOTS,
        *placement_cases("grads"),
        *chunk_cases("grads"),
        *MICRO_PARTIALS,
        ("factor", lambda t: t.float(), has_dtype("factor", "float32", "float64")),
        ("factor", lambda t: t[:0], "factor has 0 elements; accepted: at least 1"),
        ("factor", lambda t: gappy(t.expand(2)), "factor is not contiguous; accepted: contiguous"),
        *tensor_cases("grads"),
        ("slots", lambda old: [*old, 0], "slots has 3 entries; accepted: 2, one for each of grads"),
        ("first", lambda old: old[:1], "first has 1 entries; accepted: 2, one for each of grads"),
    ],
    "measure_": [
        *ACC,
        *PARTIALS,
        *TABLE,
        *SLOTS,
        *placement_cases("slots"),
        *chunk_cases("slots"),
        ("n_elems", lambda old: old[:1], "n_elems has 1 entries; accepted: 2, one for each of slots"),
        (
            "n_elems",
            lambda old: [old[0], old[1] + 1],
            f"n_elems[1] is {SIZES[1] + 1}; accepted: the {SIZES[1]} of its slot",
        ),
    ],
    "finalize_": [
        *PARTIALS,
        *TABLE,
        *SCALARS,
        *CONTROL,
        *chunk_cases("active"),
        *MICRO_PARTIALS,
        ("window", lambda t: t.float(), has_dtype("window", "float32", "float64")),
        ("window", lambda t: gappy(t), "window is not contiguous; accepted: contiguous"),
        ("window", lambda t: t[:15], "window has 15 elements; accepted: at least 16"),
        ("steps", lambda t: t.double(), has_dtype("steps", "float64", "float32")),
        ("steps", lambda t: t[:1], "steps has 1 elements; accepted: at least 2"),
        ("active", lambda t: t.bool(), has_dtype("active", "bool", "uint8")),
        ("active", lambda t: t[:1], "active has 1 elements; accepted: at least 2"),
        ("hyper", lambda t: t.float(), has_dtype("hyper", "float32", "float64")),
        ("hyper", lambda t: t[:, :7].contiguous(), f"hyper has 2 dimensions, the last of 7; {COLUMNS} 8"),
        ("hyper", lambda t: t[:0], "table[0] has group 0; accepted: 0 to -1"),
        ("table", cell(1, 3, 1), "table[1] has group 1; accepted: 0 to 0"),
        ("table", cell(0, 3, -1), "table[0] has group -1; accepted: 0 to 0"),
        ("rule", lambda old: 3, "rule is 3; accepted: 0 (Adam), 1 (SGD), 2 (none)"),
        ("rule", lambda old: -1, "rule is -1; accepted: 0 (Adam), 1 (SGD), 2 (none)"),
        ("extra", lambda t: t.float(), has_dtype("extra", "float32", "float64")),
        ("extra", lambda t: t[:1], "extra has 1 elements; accepted: at least 2"),
        ("extra", lambda t: gappy(t), "extra is not contiguous; accepted: contiguous"),
    ],
    "adam_step_": [
        *step_cases("max_exp_avg_sq"),
        ("exp_avg", lambda t: t.half(), has_dtype("exp_avg", "float16", "float32")),
        ("exp_avg", lambda t: t[1:], f"exp_avg has {N_ACC - 1} elements; accepted: at least {N_ACC}"),
        ("exp_avg_sq", lambda t: t.double(), has_dtype("exp_avg_sq", "float64", "float32")),
        ("exp_avg_sq", lambda t: t[1:], f"exp_avg_sq has {N_ACC - 1} elements; accepted: at least {N_ACC}"),
    ],
    "sgd_step_": step_cases("momentum_buffer"),
}


@pytest.mark.parametrize(
    ("op", "argument", "spoil", "message"), [(op, *case) for op, cases in CASES.items() for case in cases]
)
def test_refusal(backend: Backend, op: str, argument: str, spoil: Callable, message: str) -> None:
    if any(words in message for words in ONLY_TABLE_SHOWS):
        need_host_table(backend)
    buffers, arguments = good_arguments(op)
    arguments[argument] = spoil(arguments[argument])
    before = buffers.snapshot()
    with pytest.raises(RuntimeError) as caught:
        getattr(backend, op)(*arguments.values())
    assert str(caught.value).splitlines()[0] == f"{op}: {message}"
    buffers.assert_only_changed(before, {})


@pytest.mark.parametrize("op", CASES)
def test_the_unspoilt_arguments_are_taken(backend: Backend, op: str) -> None:
    buffers, arguments = good_arguments(op)
    before = buffers.snapshot()
    getattr(backend, op)(*arguments.values())
    assert any(not torch.equal(before[name], after) for name, after in buffers.snapshot().items())


@pytest.mark.parametrize("column", [2, 3])
def test_rows_of_slots_that_do_not_take_part_are_not_judged(backend: Backend, column: int) -> None:
    # A slot whose parameter has left keeps its row.
    _, arguments = good_arguments("finalize_")
    arguments["table"] = cell(1, column, 99)(arguments["table"])
    arguments["active"] = torch.tensor([1, 0], dtype=torch.uint8)
    backend.finalize_(*arguments.values())
    assert arguments["control"][layout.SUM_SQ] == 1.0
