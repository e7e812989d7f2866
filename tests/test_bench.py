"""The benchmark's own code: every provider's check on small shapes, rows and files, pictures. Nothing is timed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from bench import accuracy, cases, plots, probe, report, session, tables, targets, timeline
from bench.measure import LESS, OURS, PROBE, Provider, Run, Samples, gathered
from bench.memory import Memory, memory_of
from bench.providers import NAME, AbsentError, Given, Makers
from bench.rows import ROWS, Row, make_rows, read_csv, write_csv, write_json

CPU = torch.device("cpu")
SMALL = [(33, 5), (64,), (1000,)]
WHERE = {"device": "a", "versions": "b", "commit": "c", "date": "d"}


def small(case: cases.Case) -> Given:
    """The case's settings with few elements; a sweep keeps its n."""
    given = case.given()
    if case.op.startswith("sweep"):
        return given
    shapes = [(16,)] * 8 if case.op.startswith("host") else SMALL
    return dataclasses.replace(given, shapes=shapes, n_groups=min(given.n_groups, len(shapes)))


def without_slow_ones(makers: Makers) -> Makers:
    """Without those that call a compiler for seconds."""
    return {name: make for name, make in makers.items() if name != "compiled" and "DeepSpeed" not in name}


CASES = [
    case
    for case in cases.all_cases(CPU, quick=False)
    if not case.op.startswith("sweep")
    or (case.given().n <= 2**12 or (case.op, case.name[:4]) == ("sweep boundary", "2^18"))
]


@pytest.mark.parametrize("case", CASES, ids=[case.label for case in CASES])
def test_providers_are_right(case: cases.Case) -> None:
    lineup = cases.line_up(without_slow_ones(case.makers(small(case))))
    assert lineup.wrong == {}
    assert not [why for why in lineup.absent.values() if why.startswith("fails")]
    ours = lineup.providers[0]
    assert ours.role == OURS
    # A probe of other traffic would make the share of the ceiling meaningless.
    assert {p.bytes_an_element for p in lineup.providers if p.role == PROBE} <= {ours.bytes_an_element}


def test_wrong_absent_and_failing_providers_have_no_rows() -> None:
    def wrong() -> Provider:
        raise AssertionError("off by one")

    def absent() -> Provider:
        raise AbsentError("not here")

    def failing() -> Provider:
        raise OSError("broken")

    good = Provider(NAME, lambda: None, role=OURS)
    lineup = cases.line_up({NAME: lambda: good, "wrong": wrong, "absent": absent, "failing": failing})
    assert lineup.providers == [good]
    assert lineup.wrong == {"wrong": "off by one"}
    assert lineup.absent == {"absent": "not here", "failing": "fails: OSError: broken"}
    with pytest.raises(AssertionError, match="off by one"):
        cases.line_up({NAME: wrong})


def test_a_case_without_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "free_bytes", lambda device: 0)
    one = session.Session(WHERE)
    one.measure(cases.all_cases(CPU, quick=True)[0], lambda fraction: None)
    assert "not free" in one.absent["accumulate, GPT-2 124M, bf16"]
    assert one.rows == []


def test_memory_of_a_provider() -> None:
    kept = torch.zeros(1000)
    # A product is 4,000 bytes, a sum of it 4 more; one of them is alive with the other.
    used = memory_of(Provider("a", lambda: (kept * 2).sum(), held=lambda: [kept, kept[:10]]))
    assert used.held_bytes == 4000
    assert 4000 <= used.temporary_bytes <= 4200
    assert used.op_calls == 2


def providers_and_samples() -> tuple[list[Provider], Samples]:
    ours = Provider(NAME, lambda: None, bytes_an_element=10, role=OURS)
    providers = [
        ours,
        dataclasses.replace(ours, name=f"{NAME}[reference]", role="peer"),
        Provider("foreach", lambda: None, bytes_an_element=10),
        Provider("naive fp32", lambda: None, bytes_an_element=26),
        Provider("native bf16", lambda: None, bytes_an_element=6, precision=LESS),
        Provider("probe", lambda: None, bytes_an_element=10, role=PROBE),
        Provider("probe, streaming", lambda: None, bytes_an_element=10, role=PROBE),
    ]
    medians = (2.0, 1.0, 3.0, 5.0, 1.5, 1.0, 1.6)
    times = {provider.name: [value] * 5 for provider, value in zip(providers, medians, strict=True)}
    return providers, Samples(times, 0, False)


def make(op: str, case: str, n: int = 10**6, k: int = 1) -> list[Row]:
    providers, samples = providers_and_samples()
    memory = {provider.name: Memory(3, 4, 5) for provider in providers}
    return make_rows(op, case, n, k, providers, samples, memory, WHERE)


def test_rows() -> None:
    rows = {row.provider: row for row in make("accumulate", "x")}
    assert rows[NAME].gb_per_s == pytest.approx(5.0)
    assert rows[NAME].ceiling_gb_per_s == pytest.approx(10.0)
    assert rows[NAME].share_of_ceiling == pytest.approx(0.5)
    assert rows[NAME].over_ours == 1.0
    # The strongest peer of equal precision: neither our other backend nor the 16-bit sum.
    assert rows[NAME].over_best_peer == pytest.approx(2 / 3)
    assert rows["native bf16"].over_best_peer == pytest.approx(0.5)
    assert rows["naive fp32"].bytes_moved == 26 * 10**6
    assert rows[NAME].peak_bytes == 9


def test_targets_see_a_faster_peer() -> None:
    found = {target.name: target for target in targets.timed(make("accumulate", "x", 2**20))}
    share, peer = found.values()
    assert (share.value, share.met) == (pytest.approx(0.5), False)
    assert (peer.value, peer.met) == (pytest.approx(1.5), True)
    assert targets.timed(make("accumulate", "x", 2**19))[0].name.startswith("time of the fastest")


def test_disturbed_rounds_are_left_out() -> None:
    quiet, disturbed = {"a": Run(1.0, False)}, {"a": Run(9.0, True)}
    assert gathered([quiet] * 5 + [disturbed] * 3) == Samples({"a": [1.0] * 5}, 3, False)
    assert gathered([quiet] * 2 + [disturbed] * 4).disturbed


def test_rows_survive_their_file(tmp_path: Path) -> None:
    rows = make("accumulate", "x") + [dataclasses.replace(make("host: step", "y")[0], op_calls=None, gb_per_s=None)]
    write_csv(tmp_path / ROWS, rows)
    for got, row in zip(read_csv(tmp_path / ROWS, Row), rows, strict=True):
        for field in dataclasses.fields(Row):
            expected = getattr(row, field.name)
            wanted = pytest.approx(expected, rel=1e-5) if isinstance(expected, float) else expected
            assert getattr(got, field.name) == wanted
    with pytest.raises(FileNotFoundError, match="run `python -m bench` first"):
        read_csv(tmp_path / "other.csv", Row)


def test_report_draws_from_files_alone(tmp_path: Path) -> None:
    rows = [
        row for op in ("accumulate", "first", "boundary AdamW, clip", "host: backward") for row in make(op, "x, bf16")
    ]
    rows += make("window AdamW, clip", "x, bf16, K=4", k=4)
    rows += [row for op in ("accumulate", "first") for n in (2**10, 2**12) for row in make(f"sweep {op}", str(n), n)]
    write_csv(tmp_path / ROWS, rows)
    write_csv(tmp_path / accuracy.FILE, [accuracy.AccuracyRow(NAME, "fp32", k, 1, 0.0, 0.0, **WHERE) for k in (4, 16)])
    write_csv(tmp_path / timeline.FILE, [timeline.Point(NAME, t, 100, **WHERE) for t in (0.0, 1.0)])
    write_json(tmp_path / "bench.json", {"absent": {"Apex": "not here"}})
    (tmp_path / report.DEMO).write_text("task,way,peak_mb,date\ndigits,naive,44,d\n")
    written = report.report(tmp_path, lambda text: None)
    assert {path.name for path in written} == {*plots.PICTURES, "accuracy.png", "memory.png", "table.md"}
    assert all(0 < path.stat().st_size < 100_000 for path in written)
    text = (tmp_path / "table.md").read_text()
    # Where we lose stays in the table, and is marked.
    assert "| native bf16 \\* | 6 | 1.5 | 4.0 | 0.40 | 3 | 0.0 | **0.75** |" in text
    assert "- Apex: not here" in text
    assert "| digits | naive | 44 |" in text


def test_every_provider_has_a_style() -> None:
    names = {name for case in CASES for name in case.makers(small(case)) if not name.startswith("probe")}
    unknown = {name for name in names if plots.style(name)[1] == "."}
    assert unknown <= {"Apex", "Transformer Engine"}


def test_accuracy() -> None:
    rows, _ = accuracy.measure(WHERE, lambda fraction: None, counts=(4, 16))
    errors = {(row.provider, row.micro_batches): row.relative_error for row in rows}
    assert errors[NAME, 16] <= 1e-6
    # A bf16 sum rounds 15 times by up to 2^-9 of it.
    assert 1e-4 < errors["native bf16", 16] < 15 * 2**-9
    assert tables.accuracy_table(rows).row_count == len({row.provider for row in rows})
    assert [target.met for target in targets.accurate(rows)] == [True]


def test_timeline_of_a_small_model() -> None:
    shapes = [(200, 100)] * 4
    points = timeline.measure(WHERE, lambda fraction: None, Given(shapes))
    by_way = {name: [p.n_bytes for p in points if p.provider == name] for name in timeline.WAYS}
    n = 80_000
    # Accumulator, master, two averages: 16 bytes an element; a twentieth for padding and tables.
    assert 16 * n <= by_way[NAME][0] <= 16.8 * n
    assert by_way["naive fp32"][0] >= 16 * n
    # After a window everything but these is gone again.
    assert by_way[NAME][-1] == by_way[NAME][0]


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("streaming", [False, True])
def test_probe_moves_every_element(n: int, streaming: bool) -> None:
    grad, acc = torch.randn(n).to(torch.bfloat16), torch.zeros(n)
    bits = grad.view(torch.int16).int() & 0xFFFF
    probe.store(acc, grad, streaming)
    assert torch.equal(acc.view(torch.int32), bits)
    probe.add(acc, grad)
    assert torch.equal(acc, torch.zeros(n))
    param, buffers = torch.zeros(n, dtype=torch.bfloat16), [torch.zeros(n) for _ in range(3)]
    probe.update(param, buffers, torch.ones(n), streaming)
    assert all(torch.equal(t, torch.ones_like(t)) for t in (param, *buffers))
