"""Warp operations, barriers, divergence, races and deadlock, run from PTX."""

from __future__ import annotations

import numpy as np
import pytest

from . import PtxError
from .snippets import STORE_R6, run_snippet, words

M32 = 2**32 - 1


def test_redux():
    rows = words(96)
    got = run_snippet("redux.sync.add.s32 %r6, %r4, 0xffffffff;" + STORE_R6, rows)
    sums = rows[:, 2].reshape(3, 32).astype(object).sum(1)
    assert got.tolist() == [int(sums[i // 32]) & M32 for i in range(96)]


def test_ballot_and_activemask():
    rows = words(96)
    body = "setp.lt.u32 %p1, %r2, 0x80000000; vote.sync.ballot.b32 %r6, %p1, -1; activemask.b32 %r7; "
    got = run_snippet(body + "mov.b64 %d9, {%r6, %r7};", rows)
    ballots = np.packbits((rows[:, 0] < 2**31).reshape(3, 32), axis=1, bitorder="little").view(np.uint32).ravel()
    assert got.tolist() == [int(ballots[i // 32]) | M32 << 32 for i in range(96)]


def test_shfl_up_and_its_predicate():
    rows = words(96)
    body = "shfl.sync.up.b32 %r6|%p1, %r2, 3, 0, -1; selp.u32 %r7, 1, 0, %p1; mov.b64 %d9, {%r6, %r7};"
    inside = [i % 32 >= 3 for i in range(96)]
    want = [int(rows[i - 3 * ok, 0]) | ok << 32 for i, ok in enumerate(inside)]
    assert run_snippet(body, rows).tolist() == want


def test_shfl_idx_in_segments_of_8():
    rows = words(96)
    got = run_snippet("shfl.sync.idx.b32 %r6|%p1, %r2, 9, 0x181f, -1;" + STORE_R6, rows)
    assert got.tolist() == [int(rows[i // 8 * 8 + 1, 0]) for i in range(96)]


def test_match_any():
    rows = words(96)
    got = run_snippet("match.any.sync.b32 %r6, %r4, -1;" + STORE_R6, rows)
    column = rows[:, 2].reshape(3, 32)
    want = [sum(1 << j for j in range(32) if column[i // 32, j] == rows[i, 2]) for i in range(96)]
    assert got.tolist() == want


def test_elect_takes_the_lowest_member():
    body = "setp.ge.u32 %p1, %r1, 5; mov.u32 %r6, 99; @%p1 elect.sync %r6|%p2, 0xffffffe0; "
    got = run_snippet(body + STORE_R6, words(32))
    assert got.tolist() == [99] * 5 + [5] * 27


def test_out_of_line_block_is_not_divergence():
    # The else side lies after the barrier in the text and jumps back.
    body = """setp.lt.u32 %p1, %r2, 0x80000000; mov.u32 %r6, 1; @%p1 bra OUT;
 BACK: bar.sync 0; shfl.sync.idx.b32 %r7, %r6, 0, 31, -1; cvt.u64.u32 %d9, %r6; bra FIN;
 OUT: mov.u32 %r6, 2; bra BACK;
 FIN:"""
    rows = words(64)
    assert run_snippet(body, rows).tolist() == [2 if v < 2**31 else 1 for v in rows[:, 0]]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("wgmma.fence.sync.aligned; mov.u64 %d9, 0;", "not supported"),
        ("add.u32 %r6, %r2, %r19; cvt.u64.u32 %d9, %r6;", "not written|no thread has written"),
        ("@%p1 mov.u64 %d9, 0;", "no thread|not written"),
        ("ld.global.u32 %r6, [0]; mov.u64 %d9, 0;", "out of bounds"),
        ("ld.param.u64 %d9, [p+4];", "misaligned param access: 8 bytes at offset 0x4"),
        ("ld.param.u64 %d9, [q+8];", "parameter load out of bounds at 16 of 16"),
        ("L: bra L;", "endless"),
        ("trap;", "trap"),
        ("div.u32 %r6, %r2, 0; mov.u64 %d9, 0;", "division by zero"),
        (
            "setp.lt.u32 %p1, %r2, 0x80000000; @%p1 bar.sync 0; @!%p1 bar.sync 0; mov.u64 %d9, 0;",
            "different barriers",
        ),
        ("setp.lt.u32 %p1, %r2, 0x80000000; @%p1 mov.u64 %d9, 0;", "has not written"),
        ("cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f1; mov.u64 %d9, 0;", "not supported"),
    ],
)
def test_errors_name_the_line(body, message):
    with pytest.raises(PtxError, match=message) as e:
        run_snippet(body, words(64), max_steps=5000)
    assert "PTX line" in str(e.value)


# Warp 0 produces (arrive), warp 1 consumes (sync), on barrier 1 with 64 threads.
PRODUCER = """.shared .align 4 .b8 buf[128]; and.b32 %r7, %r1, 31; shl.b32 %r8, %r7, 2; mov.u32 %r9, buf;
 add.u32 %r9, %r9, %r8; setp.lt.u32 %p1, %r1, 32; mov.u32 %r6, 7;
 @!%p1 bra CONS; st.shared.u32 [%r9], %r2; bar.arrive 1, 64; bra FIN;
 CONS: SYNC ld.shared.u32 %r6, [%r9];
 FIN: cvt.u64.u32 %d9, %r6;"""


def test_named_barrier():
    rows = words(64)
    got = run_snippet(PRODUCER.replace("SYNC", "bar.sync 1, 64;"), rows)
    assert got.tolist() == [7] * 32 + rows[:32, 0].tolist()


@pytest.mark.parametrize(("sync", "message"), [("", "memory race"), ("bar.sync 2, 64;", "barrier divergence")])
def test_missing_and_wrong_barrier(sync, message):
    with pytest.raises(PtxError, match=message):
        run_snippet(PRODUCER.replace("SYNC", sync), words(64))


def test_deadlock():
    apart = "setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 2, 64; bra B;\n A: bar.sync 1, 64;\n B: mov.u64 %d9, 0;"
    with pytest.raises(PtxError, match="deadlock: 32 threads wait at barrier 1"):
        run_snippet(apart, words(64))
    # No thread has exited here: the option must not open the barrier.
    with pytest.raises(PtxError, match="deadlock: 64 threads wait at barrier 2"):
        run_snippet("bar.sync 2, 96; mov.u64 %d9, 0;", words(64), allow_exited_at_barrier=True)


def test_member_masks():
    with pytest.raises(PtxError, match="own member mask"):
        run_snippet("bar.warp.sync 0xff; mov.u64 %d9, 0;", words(64))
    body = "setp.lt.u32 %p1, %r1, 16; mov.u32 %r6, 0; @%p1 shfl.sync.idx.b32 %r6, %r2, 20, 31, 0xffff;"
    with pytest.raises(PtxError, match="does not take part"):
        run_snippet(body + STORE_R6, words(32))


def test_bar_red_with_late_warps():
    body = """setp.lt.u32 %p1, %r1, 32; @%p1 bra L; add.u32 %r2, %r2, 0; bra M;
 M: setp.gt.u32 %p2, %r2, 0xF0000000; bar.red.popc.u32 %r6, 0, %p2; cvt.u64.u32 %d9, %r6; bra FIN;
 L: bra M;
 FIN:"""
    rows = words(96)
    assert (run_snippet(body, rows) == (rows[:, 0] > 0xF0000000).sum()).all()


# Every thread writes its word, then reads that of thread number ^ OTHER.
EXCHANGE = """.shared .align 4 .b8 buf[256]; shl.b32 %r8, %r1, 2; mov.u32 %r9, buf; add.u32 %r9, %r9, %r8;
 st.shared.u32 [%r9], %r2; SYNC
 xor.b32 %r8, %r8, OTHER; mov.u32 %r9, buf; add.u32 %r9, %r9, %r8; ld.shared.u32 %r6, [%r9]; MORE
 st.shared.u32 [%r9], 5; cvt.u64.u32 %d9, %r6;"""


def exchange(rows, sync, other, more=""):
    body = EXCHANGE.replace("SYNC", sync).replace("OTHER", str(4 * other)).replace("MORE", more)
    return run_snippet(body, rows)


def test_a_warp_barrier_orders_a_warp_alone():
    rows = words(64)
    assert np.array_equal(exchange(rows, "bar.warp.sync -1;", 1), rows[np.arange(64) ^ 1, 0])
    assert np.array_equal(exchange(rows, "bar.sync 0;", 32), rows[np.arange(64) ^ 32, 0])
    with pytest.raises(PtxError, match=r"shared memory race .write/read"):
        exchange(rows, "", 1)
    with pytest.raises(PtxError, match="shared memory race"):
        exchange(rows, "bar.warp.sync -1;", 32)


def test_overwriting_what_another_thread_read_is_a_race():
    more = "xor.b32 %r8, %r8, 4; mov.u32 %r9, buf; add.u32 %r9, %r9, %r8;"
    with pytest.raises(PtxError, match=r"race .read/write"):
        exchange(words(64), "bar.warp.sync -1;", 1, more)


# Each thread puts its row's four words at 16 times its number: a row of a matrix of 16-bit values.
_ROWS = (
    ".shared .align 16 .b8 sm[1024]; mov.u32 %r9, sm; shl.b32 %r10, %r1, 4; add.u32 %r11, %r9, %r10; "
    "st.shared.v4.b32 [%r11], {%r2, %r3, %r4, %r5}; bar.sync 0; "
)


@pytest.mark.parametrize("matrix", range(4))
def test_ldmatrix(matrix):
    """Lane t gets, of each matrix, the pair t % 4 of row t / 4; here the rows of the four are in reverse order."""
    rows = words(64)
    body = _ROWS + "and.b32 %r12, %r1, 31; sub.u32 %r12, 31, %r12; and.b32 %r13, %r1, 32; add.u32 %r12, %r12, %r13; "
    body += "shl.b32 %r12, %r12, 4; add.u32 %r12, %r12, %r9; "
    body += "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r14, %r15, %r16, %r17}, [%r12]; "
    got = run_snippet(body + f"mov.u32 %r6, %r{14 + matrix};" + STORE_R6, rows)
    want = [int(rows[t // 32 * 32 + 31 - (8 * matrix + t % 32 // 4), t % 4]) for t in range(64)]
    assert got.tolist() == want


def test_ldmatrix_of_a_misaligned_row_is_found():
    body = _ROWS + "add.u32 %r12, %r9, 4; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r6}, [%r12];" + STORE_R6
    with pytest.raises(PtxError, match="misaligned shared access: a row of 16 bytes"):
        run_snippet(body, words(32))


def test_ldmatrix_with_half_a_warp_is_found():
    body = _ROWS + "setp.lt.u32 %p1, %r1, 16; @%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r6}, [%r9];" + STORE_R6
    with pytest.raises(PtxError):
        run_snippet(body, words(32))
