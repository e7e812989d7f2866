"""``python -m bench.inspect_cuda``: what the compiler made of the CUDA kernels, one row a kernel and architecture.

regs: registers a thread; spill, stack, shared: bytes; warps: share of an sm_90 multiprocessor's warps that fit; ld, st
128: 16-byte accesses to global or generic addresses; local: accesses to local memory; RCP, RSQ: where divisions and
square roots begin. Needs nvcc and nvdisasm, and no GPU: nothing here is a measurement.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .cuda_code import ROOT, Kernel, MissingToolError, architectures, kernels

COLUMNS = (
    "kernel", "arch", "regs", "spill", "stack", "shared", "warps", "ld 128", "st 128", "local", "instr", "FFMA", "RCP",
    "RSQ", "other MUFU",
)  # fmt: skip


def row(kernel: Kernel) -> list[str]:
    """The kernel's cells."""
    special = kernel.in_sass(r"MUFU\..*")
    reciprocals, roots = kernel.in_sass(r"MUFU\.RCP(64H)?"), kernel.in_sass(r"MUFU\.RSQ(64H)?")
    cells = [
        kernel.registers, kernel.spill_bytes, kernel.stack_bytes, kernel.shared_bytes, f"{kernel.occupancy:.0%}",
        kernel.in_sass(r"LDG?\.E(\.\w+)*\.128(\.\w+)*"), kernel.in_sass(r"STG?\.E(\.\w+)*\.128(\.\w+)*"),
        kernel.in_sass(r"(LDL|STL).*"), len(kernel.sass), kernel.in_sass(r"FFMA2?(\.\w+)*"),
        reciprocals, roots, special - reciprocals - roots,
    ]  # fmt: skip
    return [kernel.name, f"sm_{kernel.architecture.replace('.', '')}", *map(str, cells)]


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    """The table without rich."""
    widths = [max(len(line[i]) for line in [COLUMNS, *rows]) for i in range(len(COLUMNS))]
    lines = []
    for line in [COLUMNS, *rows]:
        cells = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def show(rows: Sequence[Sequence[str]]) -> None:
    """Prints the table, with rich where it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain_table(rows))
        return
    table = Table(title="CUDA kernels as compiled")
    for i, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if i < 2 else "right")
    for line, after in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(*line, end_section=after is None or after[0] != line[0])
    console = Console() if Console().is_terminal else Console(width=140)  # a log has no width of its own
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.inspect_cuda", description=__doc__)
    parser.add_argument("--arch", nargs="*", help="as 9.0; by default all that the library is built for")
    parser.add_argument("--keep", type=Path, default=ROOT / "build" / "inspect", help="folder for the compiled code")
    options = parser.parse_args(arguments)
    try:
        show([row(kernel) for kernel in kernels(options.keep, options.arch or architectures())])
    except MissingToolError as error:
        print(f"cannot inspect: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
