"""One rank: ``python worker.py MODULE,... N_RANKS RANK FOLDER`` runs the modules' checks for that many ranks, in order.

A check is a function ``check_*(ranks)``. After each the ranks compare notes through a store; once one has failed, all
stop, since what the others are doing at that moment is anybody's guess.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

TIMEOUT = timedelta(seconds=20)


def main(modules: str, n_ranks: int, rank: int, folder: Path) -> None:
    """Leaves in ``FOLDER/<rank>.json`` the text of each check's error, "" for none."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), n_ranks)
    store.set_timeout(2 * TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n_ranks, timeout=TIMEOUT)
    notes = dist.PrefixStore("notes", store)
    errors: dict[str, str] = {}
    for name, check in checks_for(modules, n_ranks).items():
        torch.manual_seed(0)
        errors[name] = ""
        try:
            check(n_ranks)
        except BaseException:
            errors[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(errors))
        notes.set(f"{name}/{rank}", "failed" if errors[name] else "passed")
        if any(notes.get(f"{name}/{other}") != b"passed" for other in range(n_ranks)):
            return
    dist.destroy_process_group()


def checks_for(modules: str, n_ranks: int) -> dict[str, Callable[[int], None]]:
    """The modules' checks that run on so many ranks, by name."""
    return {
        name: check
        for module in modules.split(",")
        for name, check in vars(importlib.import_module(module)).items()
        if name.startswith("check_") and n_ranks in getattr(check, "sizes", (2,))
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
