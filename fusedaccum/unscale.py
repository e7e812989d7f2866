"""Version counters for the one op of torch that writes to gradients and does not move them.

``GradScaler.unscale_`` divides ``.grad`` in place through ``_amp_foreach_non_finite_check_and_unscale_``, for which
torch (seen on 2.13) has no ADInplaceOrView kernel, the layer that counts in-place writes, on any device. The
accumulator would look as if nobody had written to it, its partials would stay those of the scaled gradients, and a clip
would be off by the scale.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_OP = "_amp_foreach_non_finite_check_and_unscale_"


def _moves_versions() -> bool:
    grad = torch.ones(1)
    before = grad._version
    torch._amp_foreach_non_finite_check_and_unscale_([grad], torch.zeros(()), torch.ones(()))
    return grad._version != before


def _counted(keyset: Any, grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    op = getattr(torch.ops.aten, _OP).default
    op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, grads, found_inf, inv_scale)
    torch.autograd.graph.increment_version([*grads, found_inf])


@cache
def count_writes() -> torch.library.Library | None:
    """Gives the op the missing layer, for the process; does nothing where torch has it.

    Returns:
        The registration, which lasts as long as it is kept.
    """
    if _moves_versions():
        return None
    library = torch.library.Library("aten", "IMPL")
    library.impl(_OP, _counted, "ADInplaceOrView", with_keyset=True)
    return library
