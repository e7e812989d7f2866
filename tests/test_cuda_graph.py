"""On a GPU: the wrapper against the CPU to the bit, and a whole window in one CUDA graph."""

from __future__ import annotations

import pytest
import torch

from bench import gpu_parity


def test_a_whole_window_in_a_graph(gpu: torch.device) -> None:
    # Case 33: the wrapper is made on the default stream, warmed up on a side stream, captured, and replayed with other
    # gradients. AccumulateGrad nodes remember the stream that they were made on.
    assert gpu_parity.captured_window(gpu, 100) is None


def test_nothing_of_a_window_waits_for_the_device(gpu: torch.device) -> None:
    run = gpu_parity.Training("adamw", [(33, 5), (70_000,)], torch.bfloat16, gpu)
    for seed in range(2):  # the first window makes the buffers
        run.feed(seed)
        run.window()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.window()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", [name for name in gpu_parity.CHECKS if name not in ("captured window", "GPT-2 124M")])
def test_the_same_bits_as_the_cpu(gpu: torch.device, name: str) -> None:
    assert gpu_parity.CHECKS[name](gpu, 420) is None  # more tensors than the 2,040 of one launch
