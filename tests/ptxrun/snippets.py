"""Runs a few PTX instructions on rows of four random words."""

from __future__ import annotations

import numpy as np

from . import Module, Uninit

# A thread loads its row into %r2 to %r5 and stores %d9; %r1 is its number, %d1 the input's address.
_KERNEL = """.version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 p, .param .u64 q) {
 .reg .pred %p<4>; .reg .b16 %h<9>; .reg .b32 %r<20>; .reg .b64 %d<20>; .reg .f32 %f<9>;
 ld.param.u64 %d1, [p]; ld.param.u64 %d2, [q]; mov.u32 %r1, %tid.x;
 mad.wide.u32 %d3, %r1, 16, %d1; mad.wide.u32 %d4, %r1, 8, %d2;
 ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%d3];
 BODY
 st.global.u64 [%d4], %d9; ret; }"""
STORE_R6 = " cvt.u64.u32 %d9, %r6;"


def snippet_module(body):
    """The Module of a kernel ``k`` around ``body``."""
    return Module(_KERNEL.replace("BODY", body))


def run_snippet(body, rows, **options):
    """What ``body`` leaves in %d9, for each row: (n,) uint64."""
    out = np.zeros(len(rows), np.uint64)
    args = [np.ascontiguousarray(rows, np.uint32), Uninit(out)]
    snippet_module(body).launch("k", 1, len(rows), args, **options)
    return out


def words(n=512, seed=5):
    """(n, 4) random words; the last two columns of the first half are small, as shift counts are."""
    rows = np.random.default_rng(seed).integers(0, 2**32, (n, 4), dtype=np.uint64).astype(np.uint32)
    rows[: n // 2, 2:] %= 40
    return rows
