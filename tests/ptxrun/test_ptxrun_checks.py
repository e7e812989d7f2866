"""Broken kernels and wrong launches, which the interpreter has to catch."""

from __future__ import annotations

import re

import numpy as np
import pytest

from . import PtxError, Uninit
from .support import ARCHS, acc_and_grads, module, multi_tensor_meta

pytestmark = pytest.mark.usefixtures("nvcc")
each_arch = pytest.mark.parametrize("arch", ARCHS)


def floats(n):
    return np.zeros(n, np.float32)


@each_arch
@pytest.mark.parametrize(
    ("name", "grid", "block", "sizes", "message"),
    [
        ("bad_oob", 2, 64, [100], "out of bounds.*'arg0', 400 bytes; the address is at byte 400"),
        ("bad_misaligned", 1, 4, [64, 64], "misaligned global access: 16 bytes"),
        ("bad_uninit", 1, 64, [64, 64], "uninitialised shared memory.*thread 32"),
        ("bad_barrier", 1, 64, [128], "barrier divergence"),
        ("bad_race", 1, 128, [128], "shared memory race"),
        ("bad_shfl", 1, 32, [128], "member mask 0xffffffff, but only lanes 0x000000ff"),
    ],
)
def test_broken_kernels(arch, name, grid, block, sizes, message):
    args = [floats(n) for n in sizes] + [100] * (name == "bad_oob")
    with pytest.raises(PtxError) as e:
        module("multi_tensor", arch).launch(name, grid, block, args)
    assert re.search(message, str(e.value), re.DOTALL)
    assert "PTX line" in str(e.value)


def test_store_to_read_only_memory():
    x = floats(64)
    x.flags.writeable = False
    with pytest.raises(PtxError, match="read-only"):
        module("multi_tensor", 90).launch("bad_oob", 1, 32, [x, 20])


def test_read_of_uninitialised_memory():
    with pytest.raises(PtxError, match="uninitialised global"):
        module("multi_tensor", 90).launch("bad_oob", 1, 32, [Uninit(floats(64)), 20])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([floats(4)], "takes 2"),
        ([floats(4), 1.5], "does not fit"),
        ([3.0, 4], "does not fit"),
        ([b"abc", 4], "does not fit"),
        (bytes(11), "12 bytes, got a block of 11"),
    ],
)
def test_arguments_that_do_not_fit(args, message):
    mod = module("multi_tensor", 90)
    before = mod.mem.mark()
    with pytest.raises(PtxError, match=message):
        mod.launch("bad_oob", 1, 32, args)
    assert mod.mem.mark() == before


def test_launches_that_do_not_fit():
    mod = module("multi_tensor", 90)
    with pytest.raises(PtxError, match="maxntid"):
        mod.launch("adamw", 1, 512, [0] * 9)
    with pytest.raises(PtxError, match="1025 threads"):
        mod.launch("bad_oob", 1, 1025, [0, 0])
    with pytest.raises(PtxError, match="no kernel 'nothing'"):
        mod.launch("nothing", 1, 32, [])
    with pytest.raises(ValueError, match="check_races 'some'"):
        mod.launch("bad_oob", 1, 32, [floats(4), 4], check_races="some")


def test_chunks_that_overlap_are_a_race():
    mod = module("multi_tensor", 90)
    meta, _, _ = multi_tensor_meta(mod, acc_and_grads("f32", [100]), 100)
    with pytest.raises(PtxError, match="global memory race"):  # the second block has row 0 too
        mod.launch("acc_f32", 2, 64, [meta, 100, 1.0], check_races="all")
