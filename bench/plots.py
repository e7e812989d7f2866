"""Pictures of the rows, one function each. Colours are Okabe and Ito's, which the colour-blind tell apart; every line
has a marker of its own besides."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from .accuracy import AccuracyRow
from .measure import FP32, OURS, PROBE
from .providers import NAME
from .rows import Row
from .timeline import Point

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, BLACK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#B8A800",
    "#000000",
)
CEILING = "ceiling (probe)"
# A sum of few values may be exact, which a logarithm cannot show.
FLOOR = 1e-11
# Provider -> colour and marker; the same in every picture. A name that is not here gets the style of its beginning.
STYLES = {
    NAME: (BLUE, "o"),
    f"{NAME}[reference]": (SKY, "o"),
    "naive": (RED, "s"),
    "zero, naive": (RED, "s"),
    "foreach": (ORANGE, "^"),
    "zero, foreach": (ORANGE, "^"),
    "copy, scale": (YELLOW, "P"),
    "compiled": (GREEN, "D"),
    "grad_dtype": (PURPLE, "v"),
    "autograd": (PURPLE, "v"),
    "native": (BLACK, "x"),
    "torch fused, step alone": (SKY, "<"),
    "torch fused + GradScaler": (RED, "s"),
    "torch fused": (ORANGE, "^"),
    "torch foreach": (PURPLE, "v"),
    "torch for-loop": (YELLOW, "P"),
    "accelerate": (YELLOW, "P"),
    "optimi": (SKY, "*"),
    "Kahan": (GREEN, "D"),
    "DeepSpeed": (BLACK, "+"),
    CEILING: ("#777777", "|"),
}
PANELS = {
    "accumulate": "one more micro-batch",
    "first": "the first micro-batch",
    "boundary": "boundary",
    "window": "whole window",
    "host": "1,000 tiny parameters",
}


def style(name: str) -> tuple[str, str]:
    """Colour and marker."""
    best = max((key for key in STYLES if name.startswith(key)), key=len, default="")
    return STYLES.get(best, ("#777777", "."))


def save(figure: Figure, path: Path) -> None:
    """As a PNG of few colours, without a date, so that the same rows give the same small file."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100, metadata={"Software": None})
    plt.close(figure)
    with Image.open(drawn) as picture:
        picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def _plain_axes(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)


def _small(axes: Axes, legend_at: tuple[float, float]) -> None:
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique, fontsize=8, loc="upper left", bbox_to_anchor=legend_at, frameon=False)


# Ratios --------------------------------------------------------------------------------------------------------------


def _panel_of(row: Row) -> str | None:
    return next((key for key in PANELS if row.op.startswith(key)), None)


def _case_label(row: Row) -> str:
    extra = row.op.removeprefix("boundary ").removeprefix("window ").removeprefix("host: ")
    case = row.case.removesuffix(", bf16").replace("Llama 1.1B", "Llama").replace(", bf16, K", ", K")
    if row.op.startswith("host"):
        return extra
    return case if extra in ("accumulate", "first") else f"{case}: {extra}"


def ratios(rows: Sequence[Row], path: Path) -> None:
    """Each provider's time over ours, a line for each case."""
    shown = [row for row in rows if _panel_of(row) and not row.op.startswith("sweep")]
    panels = {key: [row for row in shown if _panel_of(row) == key] for key in PANELS}
    panels = {key: found for key, found in panels.items() if found}
    counts = [max(len({(row.op, row.case) for row in found}), 4) for found in panels.values()]
    figure, grid = plt.subplots(
        len(panels),
        1,
        figsize=(9.5, 0.24 * sum(counts) + 0.75 * len(panels) + 0.4),
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": counts},
        layout="constrained",
    )
    for axes, (key, found) in zip(grid[:, 0], panels.items(), strict=True):
        cases = list(dict.fromkeys((row.op, row.case) for row in found))
        labels = {(row.op, row.case): _case_label(row) for row in found}
        for row in found:
            if row.role == OURS or (row.role == PROBE and row.share_of_ceiling != 1):
                continue
            name = CEILING if row.role == PROBE else row.provider + ("" if row.precision == FP32 else " *")
            colour, marker = style(name)
            axes.plot(
                row.over_ours,
                -cases.index((row.op, row.case)),
                marker,
                color=colour,
                label=name,
                markersize=7,
                alpha=0.9,
            )
        axes.axvline(1.0, color=BLUE, linewidth=1.5)
        axes.set_yticks([-i for i in range(len(cases))], [labels[case] for case in cases], fontsize=8)
        axes.set_ylim(-len(cases) + 0.4, 0.6)
        axes.set_xscale("log")
        axes.set_title(PANELS[key], loc="left", fontsize=10, fontweight="bold")
        _plain_axes(axes)
        axes.axvspan(1e-3, 1.0, color="#f3f3f3", zorder=-1)
        _small(axes, (1.01, 1.04))
    last = grid[-1, 0]
    values = [row.over_ours for row in shown]
    last.set_xlim(min(0.25, 0.8 * min(values)), 1.25 * max(values))
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200) if last.get_xlim()[0] <= t <= last.get_xlim()[1]]
    last.set_xticks(ticks, [f"{t:g}x" for t in ticks])
    last.minorticks_off()
    last.set_xlabel(f"time over that of {NAME} (blue line; grey: faster than it).  * not as exact as fp32")
    save(figure, path)


# Speed against n -----------------------------------------------------------------------------------------------------


def sweep(rows: Sequence[Row], path: Path) -> None:
    """Least bytes of the op over the time, against n."""
    ops = [op for op in ("accumulate", "first", "boundary") if any(row.op == f"sweep {op}" for row in rows)]
    figure, grid = plt.subplots(
        1, len(ops), figsize=(4.1 * len(ops), 4.3), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, op in zip(grid[0], ops, strict=True):
        found = [row for row in rows if row.op == f"sweep {op}" and not row.provider.endswith("[reference]")]
        least = next(row.bytes_an_element for row in found if row.role == OURS)
        fastest: dict[int, float] = {}
        for row in found:
            if row.role == PROBE:
                fastest[row.n] = max(fastest.get(row.n, 0.0), least * row.n / row.median_ms / 1e6)
        axes.plot(list(fastest), list(fastest.values()), "--", color="#777777", label=CEILING, linewidth=1.8)
        for name in dict.fromkeys(row.provider for row in found if row.role != PROBE):
            points = [(row.n, least * row.n / row.median_ms / 1e6) for row in found if row.provider == name]
            colour, marker = style(name)
            width = 2.2 if name == NAME else 1.2
            label = name.removeprefix("zero, ")
            axes.plot(
                *zip(*points, strict=True), marker=marker, color=colour, label=label, linewidth=width, markersize=5
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"{PANELS[op]} ({least:.0f} bytes an element)", fontsize=10)
        axes.set_xlabel("elements n, in one tensor")
        _plain_axes(axes)
    grid[0, 0].set_ylabel("least possible bytes / time, GB/s")
    ticks = [
        t for t in (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000) if grid[0, 0].get_ylim()[0] <= t <= grid[0, 0].get_ylim()[1]
    ]
    grid[0, 0].set_yticks(ticks, [f"{t:g}" for t in ticks])
    handles: dict[str, object] = {}
    for axes in grid[0]:
        handles.update(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    save(figure, path)


# Bytes ---------------------------------------------------------------------------------------------------------------


def bytes_an_element(rows: Sequence[Row], path: Path) -> None:
    """Bars: what ours moves, what others move, what is the least."""
    wanted = {
        "accumulate": "one more micro-batch",
        "first": "the first micro-batch",
        "boundary AdamW, clip": "boundary: AdamW, clip, fp32 masters",
        "window AdamW, clip": "window of 4 micro-batches, AdamW, clip",
    }
    panels = {op: _widest(rows, op) for op in wanted}
    panels = {op: found for op, found in panels.items() if found}
    counts = [len(found) for found in panels.values()]
    figure, grid = plt.subplots(
        len(panels),
        1,
        figsize=(7.5, 0.25 * sum(counts) + 0.65 * len(panels) + 0.4),
        squeeze=False,
        gridspec_kw={"height_ratios": counts},
        layout="constrained",
    )
    for axes, (op, found) in zip(grid[:, 0], panels.items(), strict=True):
        found = sorted(found, key=lambda row: (row.role != OURS, row.bytes_an_element))
        least = next(row.bytes_an_element for row in found if row.role == OURS)
        names = [row.provider + ("" if row.precision == FP32 else " *") for row in found]
        colours = [BLUE if row.role == OURS else ORANGE if row.precision == FP32 else "#999999" for row in found]
        values = [row.bytes_an_element for row in found]
        bars = axes.barh(range(len(found)), values, color=colours, height=0.7)
        axes.bar_label(bars, [f"{value:.0f}" for value in values], padding=3, fontsize=8)
        axes.set_yticks(range(len(found)), names, fontsize=8)
        axes.invert_yaxis()
        axes.axvline(least, color=BLACK, linewidth=1, linestyle="--")
        axes.set_xlim(0, 1.12 * max(values))
        axes.set_title(wanted[op], loc="left", fontsize=10, fontweight="bold")
        _plain_axes(axes)
        axes.grid(False, axis="y")
    grid[-1, 0].set_xlabel("bytes moved for each element (dashed: least possible at fp32)\n* not as exact as fp32")
    save(figure, path)


def _widest(rows: Sequence[Row], op: str) -> list[Row]:
    """The bf16 case of ``op`` with most providers; of windows, those of 4 micro-batches."""
    k = 4 if op.startswith("window") else 1
    found = [row for row in rows if row.op == op and "bf16" in row.case and row.micro_batches == k]
    cases: dict[str, list[Row]] = {}
    for row in found:
        if row.role != PROBE and not row.provider.startswith(f"{NAME}["):
            cases.setdefault(row.case, []).append(row)
    return max(cases.values(), key=len, default=[])


# Memory and accuracy -------------------------------------------------------------------------------------------------


def memory(points: Sequence[Point], path: Path) -> None:
    """Bytes held over one window, each way's time scaled to its own length."""
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    names = list(dict.fromkeys(point.provider for point in points))
    for name in names:
        own = [point for point in points if point.provider == name]
        end = own[-1].time_ms
        colour, _ = style(name)
        width, line = (2.0, "-") if name == NAME else (1.1, "-" if name.startswith("naive") else "--")
        peak = max(point.n_bytes for point in own) / 1e6
        axes.step(
            [point.time_ms / end for point in own],
            [point.n_bytes / 1e6 for point in own],
            where="post",
            color=colour,
            linewidth=width,
            linestyle=line,
            label=f"{name}{' *' if name.startswith('native') else ''}: peak {peak:.0f} MB",
        )
    axes.set_xlabel("share of the window: 4 micro-batches and the boundary.  * 16-bit sums, states and no masters")
    axes.set_ylabel("MB held, without parameters and activations")
    axes.set_ylim(0, 1.22 * max(point.n_bytes for point in points) / 1e6)
    axes.set_xlim(0, 1)
    _plain_axes(axes)
    axes.legend(loc="upper center", ncols=3, fontsize=9, frameon=False)
    save(figure, path)


def accuracy(rows: Sequence[AccuracyRow], path: Path) -> None:
    """Relative error against K."""
    figure, axes = plt.subplots(figsize=(8, 4.4), layout="constrained")
    names = list(dict.fromkeys(row.provider for row in rows))
    # Ours last and hollow: the fp32 ways lie upon each other.
    for name in sorted(names, key=lambda name: name == NAME):
        own = [row for row in rows if row.provider == name]
        colour, marker = style(name)
        is_ours = name == NAME
        axes.plot(
            [row.micro_batches for row in own],
            [max(row.relative_error, FLOOR) for row in own],
            marker=marker,
            color=colour,
            label=name,
            linewidth=1.5,
            markersize=13 if is_ours else 7,
            markerfacecolor="none" if is_ours else colour,
            markeredgewidth=2 if is_ours else 1,
        )
    counts = sorted({row.micro_batches for row in rows})
    axes.axhline(1e-6, color="#777777", linestyle="--", linewidth=1)
    axes.text(counts[0], 1.4e-6, "wanted: below 1e-6", fontsize=8, color="#555555")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(k) for k in counts])
    axes.minorticks_off()
    axes.set_xlabel("micro-batches K")
    axes.set_ylabel("relative error of the accumulated gradient\nagainst fp64")
    _plain_axes(axes)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=9, frameon=False)
    save(figure, path)


PICTURES: dict[str, Callable[[Sequence[Row], Path], None]] = {
    "ratios.png": ratios,
    "sweep.png": sweep,
    "bytes.png": bytes_an_element,
}
