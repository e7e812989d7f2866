"""Random programs, compiled by nvcc and run by the interpreter, and by g++ for the host: the results must agree.

FUSEDACCUM_FUZZ sets how many programs.
"""

from __future__ import annotations

import ctypes
import os
import subprocess

import numpy as np
import pytest

from . import Uninit, cuda
from .fuzz_programs import program
from .support import ARCHS

N_PROGRAMS = int(os.environ.get("FUSEDACCUM_FUZZ", "30"))
RESULT = np.dtype(
    [("l", "<i8", 2), ("m", "<u8", 2), ("d", "<f8", 2), ("i", "<i4", 3), ("u", "<u4", 3), ("f", "<f4", 3)]
    + [("s", "<i4"), ("c", "<i4"), ("pad", "<i4")]
)


def run_on_host(compiler, source, folder, x, y):
    (folder / "host.cpp").write_text(source)
    library = folder / "host.so"
    flags = ["-O1", "-w", "-ffp-contract=off", "-fwrapv", "-mfma", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", library, folder / "host.cpp"], check=True)
    out = np.zeros(x.size, RESULT)
    ctypes.CDLL(str(library)).k(*(a.ctypes.data_as(ctypes.c_void_p) for a in (x, y, out)), x.size)
    return out


@pytest.mark.parametrize("seed", range(N_PROGRAMS))
def test_random_program(nvcc, host_compiler, seed, tmp_path):
    device_source, host_source = program(seed)
    r = np.random.default_rng(seed)
    n = 333
    x = r.integers(-1000, 1000, n).astype(np.int32)
    y = r.integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32)
    (tmp_path / "device.cu").write_text(device_source)
    loaded = cuda.load(tmp_path / "device.cu", ARCHS[seed % len(ARCHS)], (*cuda.FLAGS, "-w"))
    got = np.zeros(n, RESULT)
    loaded.launch("k", 3, 128, [x, y, Uninit(got.view(np.uint8)), n], check_races="all")
    want = run_on_host(host_compiler, host_source, tmp_path, x, y)
    for field in RESULT.names:
        equal = (got[field] == want[field]) | ((got[field] != got[field]) & (want[field] != want[field]))
        assert equal.all(), (field, got[field][~equal][:3], want[field][~equal][:3], np.argwhere(~equal)[:3].tolist())
