"""``python -m bench.wire``: a window over two processes against DistributedDataParallel, in bytes and in time.

Both ranks run here, on gloo, in a network of their own where the system allows it (``unshare``), so that the loopback
device's counters hold nothing else. All ways take turns in one run; a window is K micro-batches, clip and AdamW. With
few tokens in a micro-batch (``--tokens 16``) there is little to compute, and the time is that of adding gradients: 10
bytes an element in fp32, 6 in bfloat16. The last table is an estimate on paper, from the bandwidths it names; nothing
here has run on several GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fusedaccum import FusedAccumOptimizer

from .measure import environment

K = 8
N_RANKS = 2
WIDTH, DEPTH, TOKENS = 512, 8, 256
MAX_NORM = 1.0
ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
GB_S = {8: ("NVLink 4, one direction of a GPU", 450.0), 64: ("one 400 Gb/s adapter a GPU", 50.0)}
"""For the estimate: what carries a ring of so many GPUs, and its GB/s."""


class _Way(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    window: Callable[[list[Tensor]], None]


def _model(dtype: torch.dtype, width: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers).to(dtype)


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _ours(model: nn.Module, reduce_dtype: torch.dtype, **options: Any) -> _Way:
    optimizer = FusedAccumOptimizer(
        _adamw(model), accumulation_steps=K, max_grad_norm=MAX_NORM, process_group=dist.group.WORLD,
        reduce_dtype=reduce_dtype, **options,
    )  # fmt: skip

    def window(batches: list[Tensor]) -> None:
        for batch in batches:
            model(batch).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return _Way(model, optimizer, window)


def _ddp(model: nn.Module, syncs_each: bool) -> _Way:
    ddp = DistributedDataParallel(model)
    optimizer = _adamw(ddp)

    def window(batches: list[Tensor]) -> None:
        for i, batch in enumerate(batches):
            with nullcontext() if syncs_each or i == K - 1 else ddp.no_sync():
                (ddp(batch).float().square().mean() / K).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return _Way(ddp, optimizer, window)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of the states and masters that this rank holds, without the counts of steps."""
    values = [value for held in optimizer.state.values() for name, value in held.items() if name != "step"]
    here = [value.to_local() if isinstance(value, DTensor) else value for value in values]
    return sum(value.numel() * value.element_size() for value in here)


def _wire_bytes() -> int:
    """Bytes that the loopback device has carried."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise RuntimeError("/proc/net/dev lists no device lo")


def _rank(rank: int, folder: Path, n_rounds: int, width: int, n_tokens: int) -> None:
    """One of the two processes; rank 0 leaves ``FOLDER/rows.json``."""
    # Imported after the group is there, as torch's optimizers would, it keeps the group and its threads alive at exit.
    import torch._dynamo

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), N_RANKS), rank=rank, world_size=N_RANKS)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        ways = {
            "DDP, no_sync": _ddp(_model(dtype, width), False),
            f"DDP, {K} all-reduces": _ddp(_model(dtype, width), True),
            "fusedaccum, fp32 sum": _ours(_model(dtype, width), torch.float32),
            "fusedaccum, fp32 sum, overlap": _ours(
                _model(dtype, width), torch.float32, overlap=True, bucket_bytes=4 * 2**20
            ),
            "fusedaccum, bf16 sum": _ours(_model(dtype, width), torch.bfloat16),
            "fusedaccum, fp32 sum, sharded states": _ours(_model(dtype, width), torch.float32, shard_states=True),
        }
        torch.manual_seed(1 + rank)
        batches = [torch.randn(n_tokens, width, dtype=dtype) for _ in range(K)]
        seen: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
        for turn in range(n_rounds + 2):
            for name, way in ways.items():
                dist.barrier()
                before, start = _wire_bytes(), time.perf_counter()
                way.window(batches)
                dist.barrier()
                if turn >= 2:  # DDP rebuilds its buckets in the second window
                    seen[name].append((time.perf_counter() - start, _wire_bytes() - before))
            if turn == 0:
                _check([way.model for way in ways.values()], dtype)
        n_elems = sum(param.numel() for param in ways["DDP, no_sync"].model.parameters())
        first_ms = 1e3 * np.array([s[0] for s in seen["DDP, no_sync"]])
        for name, samples in seen.items():
            times_ms, n_bytes = 1e3 * np.array([s[0] for s in samples]), np.array([s[1] for s in samples])
            p20, median, p80 = np.percentile(times_ms, [20, 50, 80])
            rows.append({
                "op": "window", "provider": name, "dtypes": str(dtype).removeprefix("torch."), "n": n_elems,
                "wire_bytes": int(np.median(n_bytes)), "median_ms": median, "p20_ms": p20, "p80_ms": p80,
                # Round by round, which the machine's own drift does not reach.
                "times_ddp_no_sync": float(np.median(times_ms / first_ms)),
                "state_bytes": _state_bytes(ways[name].optimizer), "n_ranks": N_RANKS, "k": K, "tokens": n_tokens,
            })  # fmt: skip
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _check(models: list[nn.Module], dtype: torch.dtype) -> None:
    """That all ways have made the same first step. Adam's is lr times a sign, and where a gradient is next to nothing
    the sign is anybody's, so few may differ; in bfloat16 the update is below an ulp of most parameters."""
    first = [param.detach().float() for param in models[0].parameters()]
    for model in models[1:]:
        differs = sum(
            int(((p.detach().float() - q).abs() > 1e-5 + q.abs() * 2**-7 * (dtype is not torch.float32)).sum())
            for p, q in zip(model.parameters(), first, strict=True)
        )
        if differs > 0.01 * sum(p.numel() for p in first):
            raise RuntimeError(f"the providers do not train the same model: {differs} elements differ")


def measure(n_rounds: int, width: int = WIDTH, n_tokens: int = TOKENS) -> tuple[list[dict[str, Any]], bool]:
    """Rows of both dtypes, and whether the ranks had a network of their own."""
    with tempfile.TemporaryDirectory() as name:
        command = f"{sys.executable} -m bench.wire --rounds {n_rounds} --width {width} --tokens {n_tokens}"
        command += f" --folder {name} --rank"
        ranks = f"{command} 0 & first=$!; {command} 1 & second=$!; wait $first && wait $second"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        alone = ["unshare", "--net", "sh", "-c", "ip link set lo up"]
        isolated = shutil.which("unshare") is not None and subprocess.run(alone, capture_output=True).returncode == 0
        if isolated:
            subprocess.run([*alone[:-1], f"ip link set lo up; {ranks}"], check=True, env=env, cwd=ROOT)
        else:
            subprocess.run(["sh", "-c", ranks], check=True, env=env, cwd=ROOT)
        rows: list[dict[str, Any]] = json.loads((Path(name) / "rows.json").read_text())
    return rows, isolated


def estimate_ms(n_ranks: int, n_bytes: float, gb_s: float) -> float:
    """A ring's all-reduce: every rank sends and receives 2 (N - 1) / N of the buffer."""
    return 2 * (n_ranks - 1) / n_ranks * n_bytes / (gb_s * 1e9) * 1e3


def main() -> None:
    """Measures and prints; of the sizes that are the default, writes ``bench/results/wire.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="rows of a micro-batch on each rank")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        _rank(options.rank, options.folder, options.rounds, options.width, options.tokens)
        return
    rows, isolated = measure(options.rounds, options.width, options.tokens)
    console = Console(width=120)
    n_tokens = options.tokens
    table = Table(title=f"one window, K={K} micro-batches of {n_tokens} tokens, {N_RANKS} processes on gloo")
    columns = ("parameters", "way", "MB sent", "bytes an element and rank", "states", "ms", "p20 - p80", "x no_sync")
    for column in columns:
        table.add_column(column, justify="left" if column in ("parameters", "way") else "right")
    for row in rows:
        sent, between = row["wire_bytes"], f"{row['p20_ms']:.1f} - {row['p80_ms']:.1f}"
        per_element, states = f"{sent / row['n'] / N_RANKS:.2f}", f"{row['state_bytes'] / row['n']:.2f}"
        table.add_row(
            row["dtypes"], row["provider"], f"{sent / 1e6:.2f}", per_element, states, f"{row['median_ms']:.1f}",
            between, f"{row['times_ddp_no_sync']:.2f}",
        )  # fmt: skip
    console.print(table)
    paper = Table(title=f"ESTIMATE on paper: ms of communication, K={K}, 10^9 bf16 parameters, no overlap")
    for column in ("GPUs", "carried by", "DDP, bf16, each", "DDP, bf16, no_sync", "ours, fp32", "ours, bf16"):
        paper.add_column(column, justify="left" if column == "carried by" else "right")
    for n_ranks, (what, gb_s) in GB_S.items():
        times = [estimate_ms(n_ranks, n_bytes, gb_s) for n_bytes in (2e9 * K, 2e9, 4e9, 2e9)]
        paper.add_row(str(n_ranks), f"{what}, {gb_s:.0f} GB/s", *(f"{time_ms:.0f}" for time_ms in times))
    console.print(paper)
    where = {**environment(), "network": "their own" if isolated else "shared with other programs"}
    console.print(", ".join(where.values()))
    if (options.width, options.tokens) != (WIDTH, TOKENS):
        return
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "wire.json").write_text(json.dumps({"environment": where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
