"""``bench.wire``: what a window moves. Nothing is timed."""

from __future__ import annotations

import pytest

from bench import wire

pytestmark = pytest.mark.distributed


def test_a_window_moves_no_more_bytes_than_ddp_with_no_sync(wire_rows):
    """In the same dtype; but for the facts that the ranks exchange (16 numbers), and packets' headers."""
    sent = {(row["dtypes"], row["provider"]): row["wire_bytes"] for row in wire_rows}
    assert len(sent) == len(wire_rows) == 12
    for dtype, name, bytes_an_element in (("float32", "fp32", 4), ("bfloat16", "bf16", 2)):
        ddp, ours = sent[dtype, "DDP, no_sync"], sent[dtype, f"fusedaccum, {name} sum"]
        n = wire_rows[0]["n"]
        # Two ranks of a ring send half of the buffer twice.
        assert 2 * bytes_an_element * n <= ours <= ddp + 4096
        assert sent[dtype, f"DDP, {wire.K} all-reduces"] > (wire.K - 1) * ddp / 2


def test_sharded_states_take_half_the_memory(wire_rows):
    """Bytes an element and rank: Adam's averages, which plain torch keeps in the parameter's dtype, and the masters."""
    held = {(row["dtypes"], row["provider"]): row["state_bytes"] / row["n"] for row in wire_rows}
    for dtype, plain, whole in (("float32", 8, 8), ("bfloat16", 4, 12)):
        assert held[dtype, "DDP, no_sync"] == plain
        assert held[dtype, "fusedaccum, fp32 sum"] == whole
        assert held[dtype, "fusedaccum, fp32 sum, sharded states"] == whole / wire.N_RANKS


def test_the_estimate():
    """8 ranks send 7/8 of 8 GB twice, at 10 GB/s."""
    assert wire.estimate_ms(8, 8e9, 10.0) == pytest.approx(1400.0)
