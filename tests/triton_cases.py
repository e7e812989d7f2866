"""What the Triton kernels are checked with beyond the cases of the CUDA kernels (``cuda_cases.py``)."""

from __future__ import annotations

import torch
from helpers import Buffers, assert_same_bits
from torch import Tensor

from fusedaccum.backends import Backend

SIXTEEN_BITS = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
HALF_DTYPES = (torch.bfloat16, torch.float16)


def check_widenings(native: Backend, other: Backend) -> None:
    """Every value of 16 bits: a first add with a scale of one stores it in fp32."""
    results = []
    for backend in (native, other):
        buffers = Buffers([2**16] * 2)
        grads = [SIXTEEN_BITS.view(dtype) for dtype in HALF_DTYPES]
        backend.accumulate_(buffers.acc, buffers.partials, None, buffers.table, grads, [0, 1], [1, 1], 1.0, None)
        results.append(buffers)
    for slot, dtype in enumerate(HALF_DTYPES):
        assert_same_bits(results[1].of("acc", slot), results[0].of("acc", slot), str(dtype))
        wanted = SIXTEEN_BITS.view(dtype).float()
        assert_same_bits(results[1].of("acc", slot), wanted, str(dtype))


def _neighbourhoods(dtype: torch.dtype) -> Tensor:
    """Around every value of ``dtype``: itself, half way to the next one, and one ulp of fp32 to either side of both."""
    values = SIXTEEN_BITS.view(dtype).float()
    half_an_ulp = 2**15 if dtype == torch.bfloat16 else 2**12
    offsets = torch.tensor([-1, 0, 1, half_an_ulp - 1, half_an_ulp, half_an_ulp + 1], dtype=torch.int64)
    around = values.view(torch.int32).to(torch.int64)[:, None] + offsets
    # binary16 has more subnormals' neighbours than that, all over the fp32 values below its smallest normal.
    small = torch.arange(0, 0x38800000, 4099, dtype=torch.int64)
    patterns = torch.cat([around.reshape(-1), small, small + 2**31])
    return (patterns & 0xFFFFFFFF).to(torch.uint32).view(torch.float32)


def check_roundings(native: Backend, other: Backend) -> None:
    """A step with a learning rate of zero stores the master in 16 bits."""
    masters = [_neighbourhoods(dtype) for dtype in HALF_DTYPES]
    results = []
    for backend in (native, other):
        buffers = Buffers([master.numel() for master in masters], masters=[0, 1])
        for slot, master in enumerate(masters):
            buffers.add_param(torch.zeros(master.numel()), HALF_DTYPES[slot])
            buffers.of("master", slot).view(torch.int32).copy_(master.view(torch.int32))
            buffers.of("acc", slot).zero_()
        buffers.scalars.zero_()
        buffers.control.zero_()
        arguments = (buffers.params, None, buffers.master, buffers.acc, buffers.table, buffers.scalars)
        backend.sgd_step_(*arguments, buffers.control, [0, 1])
        results.append(buffers)
    for slot, dtype in enumerate(HALF_DTYPES):
        assert_same_bits(results[1].params[slot], results[0].params[slot], str(dtype))
        # A rate of zero times an infinite parameter's decay is NaN.
        wanted = torch.where(masters[slot].isinf(), torch.nan, masters[slot]).to(dtype)
        assert_same_bits(results[1].params[slot], wanted, str(dtype))
