"""What the planted faults of the CUDA and the Triton kernels share; ``cuda_faults.py`` and
``test_triton_planted_faults.py`` list them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cuda_cases import BEFORE_CHUNKS, FAR_ELEMS, Boundary, check_step, every_param

from fusedaccum.layout import CHUNK, RULE_ADAM, RULE_SGD

SLOTS = (5, 0, 3 * CHUNK + 1, 1100 * CHUNK, 7)
FAR, HUGE = {"far_elems": FAR_ELEMS}, {"before_chunks": BEFORE_CHUNKS}
UNINITIALISED = "read of uninitialised global memory|out of bounds"
DIFFERS = r"\d+ of \d+ differ"
NARROW = "fewer bytes than expected in accesses of that width"

# One kind of parameter would do for most, but all are in one launch anyhow.
adam = partial(check_step, rule=RULE_ADAM, params=every_param(RULE_ADAM, (9, 1033)))
sgd = partial(check_step, rule=RULE_SGD, params=every_param(RULE_SGD, (9, 1033)))


def boundary(inactive: bool = False, partial_: float | None = None, rule: int = RULE_ADAM) -> Boundary:
    result = Boundary(SLOTS, rule, [0, 3] if inactive else None)
    if partial_ is not None:
        result.partials[2] = partial_
    return result


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` in ``file`` wherever it stands; ``check`` has to fail with ``message``."""

    file: str
    old: str
    new: str
    check: Callable[..., object]
    message: str
    options: dict[str, int] | None = None

    def plant(self, sources: Path) -> None:
        """Puts the fault into the copy of the kernels in ``sources``."""
        text = (sources / self.file).read_text()
        assert self.old in text, "the sources have changed: plant the fault anew"
        (sources / self.file).write_text(text.replace(self.old, self.new))
