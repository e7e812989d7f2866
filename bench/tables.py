"""Rows as tables: of a terminal, and of a README."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from .accuracy import AccuracyRow
from .measure import FP32, OURS, PROBE
from .rows import Row, is_rival
from .targets import Target


def bytes_text(n_bytes: float) -> str:
    """Bytes an element, whole where they are."""
    return f"{n_bytes:.0f}" if n_bytes else "-"


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def timing_table(rows: Sequence[Row]) -> Table:
    """Each provider's times, for the terminal."""
    table = Table(title="Times (the providers of a case took turns)")
    left = ("op, case", "provider")
    columns = ("B/elem", "median ms", "p20 - p80", "GB/s", "of ceiling", "calls", "peak MB", "over ours", "rounds")
    for name in (*left, *columns):
        table.add_column(name, justify="left" if name in left else "right")
    last = ""
    for row in rows:
        label = f"{row.op}\n{row.case}"
        if label != last and last:
            table.add_section()
        provider = row.provider if row.precision == FP32 else f"{row.provider} *"
        table.add_row(
            label if label != last else "",
            f"[bold]{provider}[/]" if row.role == OURS else provider,
            bytes_text(row.bytes_an_element),
            _ms(row.median_ms),
            f"{_ms(row.p20_ms)} - {_ms(row.p80_ms)}",
            number(row.gb_per_s, 1),
            number(row.share_of_ceiling),
            "-" if row.op_calls is None or row.role == PROBE else str(row.op_calls),
            "-" if row.role == PROBE else f"{row.peak_bytes / 1e6:.1f}",
            number(row.over_ours),
            f"{row.rounds}{' (disturbed)' if row.disturbed else ''}",
        )
        last = label
    return table


def sweep_table(rows: Sequence[Row]) -> Table:
    """Ours against n."""
    table = Table("op", "case", "ms", "of ceiling", "time of the fastest peer over ours", title="How cost grows")
    for row in rows:
        if row.role == OURS:
            peers = [r.over_ours for r in rows if (r.op, r.case) == (row.op, row.case) and is_rival(r)]
            cells = (number(row.share_of_ceiling), number(min(peers, default=None)))
            table.add_row(row.op.removeprefix("sweep "), row.case, _ms(row.median_ms), *cells)
    return table


def target_table(targets: Sequence[Target]) -> Table:
    """Each number against its bound."""
    table = Table(title="Wanted")
    for name in ("what", "value", "bound", "met", "in"):
        table.add_column(name, justify="right" if name in ("value", "bound") else "left")
    for target in targets:
        met = "[green]yes[/]" if target.met else "[red]no[/]"
        sign = ">=" if target.at_least else "<="
        value, bound = f"{target.value:.3g} {target.unit}", f"{sign} {target.bound:.3g}"
        table.add_row(target.name, value, bound, met, target.of)
    return table


def accuracy_table(rows: Sequence[AccuracyRow]) -> Table:
    """Relative errors."""
    counts = sorted({row.micro_batches for row in rows})
    table = Table("way", *(f"K = {k}" for k in counts), title="Relative error of the accumulated gradient")
    for name in dict.fromkeys(row.provider for row in rows):
        errors = {row.micro_batches: row.relative_error for row in rows if row.provider == name}
        table.add_row(name, *(f"{errors[k]:.1e}" for k in counts))
    return table


# Markdown ------------------------------------------------------------------------------------------------------------


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def markdown(rows: Sequence[Row], accuracy: Sequence[AccuracyRow], absent: dict[str, str], demo: Sequence[str]) -> str:
    """All rows but those of the sweeps, which are a picture; errors; who is absent; the demo's rows."""
    first = rows[0]
    lines = [f"{first.device}; {first.versions}; commit {first.commit}; {first.date}.", ""]
    lines += [
        "Times are medians, the providers of a case took turns. Bytes an element: moved by the definition of the "
        "provider's passes. Ceiling: the fastest probe of the least possible traffic, in the same rounds. Peak: what a "
        "provider keeps besides parameters and gradients, and its temporaries. Over ours: its time over that of "
        "fusedaccum, so that below 1 we lose. \\*: not as exact as fp32.",
        "",
    ]
    columns = ["bytes an element", "ms", "GB/s", "of the ceiling", "op calls", "peak MB", "over ours"]
    for op in dict.fromkeys(row.op for row in rows if not row.op.startswith("sweep")):
        lines += [f"**{op}**", "", _line(["case", "provider", *columns]), _line(["---"] * 2 + ["--:"] * len(columns))]
        last = ""
        for row in (row for row in rows if row.op == op):
            star = "" if row.precision == FP32 else " \\*"
            is_probe = row.role == PROBE
            ratio = number(row.over_ours)
            loses = row.role != OURS and not is_probe and row.over_ours < 1
            cells = [
                row.case if row.case != last else "",
                f"**{row.provider}**" if row.role == OURS else row.provider + star,
                bytes_text(row.bytes_an_element),
                _ms(row.median_ms) + (" (disturbed)" if row.disturbed else ""),
                number(row.gb_per_s, 1),
                number(row.share_of_ceiling),
                "-" if row.op_calls is None or is_probe else str(row.op_calls),
                "-" if is_probe else f"{row.peak_bytes / 1e6:.1f}",
                f"**{ratio}**" if loses else ratio,
            ]
            lines.append(_line(cells))
            last = row.case
        lines.append("")
    if accuracy:
        counts = sorted({row.micro_batches for row in accuracy})
        lines += ["**relative error of the accumulated gradient, against fp64**", ""]
        lines += [_line(["way", *(f"K = {k}" for k in counts)]), _line(["---"] + ["--:"] * len(counts))]
        for name in dict.fromkeys(row.provider for row in accuracy):
            errors = {row.micro_batches: row.relative_error for row in accuracy if row.provider == name}
            lines.append(_line([name, *(f"{errors[k]:.1e}" for k in counts)]))
        lines.append("")
    lines += demo
    if absent:
        lines += ["**did not take part**", "", *(f"- {name}: {reason}" for name, reason in absent.items()), ""]
    return "\n".join(lines).rstrip() + "\n"
