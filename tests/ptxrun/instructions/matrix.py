"""ldmatrix, which Triton also takes to spread values over a warp in another way; no product of matrices."""

from __future__ import annotations

import numpy as np

from ..ptxtypes import PtxError
from .base import instruction, only
from .memory import elements

_ROW_BYTES = 16
_FULL_WARP = "0xffffffff"


@instruction("ldmatrix")
def _ldmatrix(link, ins):
    """Of 8 by 8 values of 16 bits: lane 8m + r has the address of row r of matrix m, and lane t gets of each matrix the
    pair t % 4 of row t / 4."""
    only(ins.mods, "sync", "aligned", "m8n8", "x1", "x2", "x4", "shared", "shared::cta")
    if ins.types != ["b16"] or not {"sync", "m8n8"} <= set(ins.mods):
        raise PtxError("not supported")
    n = int(next((m[1] for m in ins.mods if m in ("x1", "x2", "x4")), 1))
    puts = [link.dst(x) for x in elements(ins.args[0])]
    addr, _ = link.addr(ins.args[1])
    if len(puts) != n:
        raise PtxError("not supported: number of matrices")

    def run(rt, idx, lanes):
        if lanes.size % 32:
            rt.fail(ins, "ldmatrix without all lanes of a warp", int(lanes[0]))
        rows = np.zeros(rt.n_lanes, np.int64)
        rows[lanes] = np.broadcast_to(np.asarray(addr(rt, idx)), lanes.shape)
        bad = lanes[(rows[lanes] % _ROW_BYTES != 0) & (rt.lane_of[lanes] < 8 * n)]
        if bad.size:
            rt.fail(ins, f"misaligned shared access: a row of {_ROW_BYTES} bytes", int(bad[0]))
        lane = rt.lane_of[lanes].astype(np.int64)
        for matrix, put in enumerate(puts):
            row = rows[rt.warp_start[rt.warp_of[lanes]] + 8 * matrix + lane // 4]
            put(rt, idx, rt.load(ins, "shared", row + lane % 4 * 4, 4, 1, lanes)[0])

    ins.mask, ins.ctl, ins.run = link.src(_FULL_WARP, "u32"), "warp", run
