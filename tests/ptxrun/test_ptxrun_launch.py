"""Compiling, finding and launching kernels with explicit parameter blocks (ptxrun.cuda)."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest

from . import PtxError, cuda, module
from .support import ARCHS, KERNELS

pytestmark = pytest.mark.usefixtures("nvcc")
each_arch = pytest.mark.parametrize("arch", ARCHS)
SOURCE = KERNELS / "by_value.cu"
ROW = np.dtype([("acc", "<u8"), ("grad", "<u8"), ("n_elems", "<i8"), ("scale", "<f4"), ("pad", "<i4")])
MANY = 1000


def rows_in_memory(program, sizes):
    """Regions of accumulators, the rows that point to them, and what is to come out."""
    r = np.random.default_rng(0)
    rows, accs, want = np.zeros(len(sizes), ROW), [], []
    for i, n in enumerate(sizes):
        acc, grad = r.standard_normal(n).astype(np.float32), r.standard_normal(n).astype(np.float32)
        accs.append(program.region(f"acc{i}", acc))
        rows[i] = (accs[-1].address, program.region(f"grad{i}", grad, writable=False).address, n, 0.5, 0)
        want.append(acc + grad * np.float32(0.5))
    return rows, accs, want


def table(rows, capacity):
    return struct.pack("<i4x", len(rows)) + rows.tobytes() + bytes((capacity - len(rows)) * ROW.itemsize)


class RowStruct(ctypes.Structure):
    """Row, in C's own layout."""

    _fields_ = (
        ("acc", ctypes.c_uint64),
        ("grad", ctypes.c_uint64),
        ("n_elems", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("pad", ctypes.c_int32),
    )


class Table4Struct(ctypes.Structure):
    """Table<4>, in C's own layout."""

    _fields_ = (("n_rows", ctypes.c_int32), ("rows", RowStruct * 4))


@each_arch
def test_parameter_block_as_bytes(arch):
    program = cuda.load(SOURCE, arch)
    rows, accs, want = rows_in_memory(program, [5, 0, 300])
    assert program.layout("add_rows") == ([(0, 136, "b8"), (136, 8, "u64")], 144)
    stats = program.launch("add_rows", 4, 64, table(rows, 4) + struct.pack("<q", 7), check_races="all")
    for region, expected in zip(accs, want, strict=True):
        assert np.array_equal(region.read(), expected)
    assert stats.global_read == 305 * 8
    assert stats.global_written == 305 * 4


@each_arch
def test_struct_of_32_kilobytes(arch):
    program = cuda.load(SOURCE, arch)
    rows, accs, want = rows_in_memory(program, [3] * MANY)
    assert program.layout("add_many_rows")[1] == 32_008
    program.launch("add_many_rows", MANY, 32, [table(rows, MANY)])
    for region, expected in zip(accs, want, strict=True):
        assert np.array_equal(region.read(), expected)


def test_struct_copied_to_the_stack_keeps_batches_small(monkeypatch):
    # 16384 threads with a copy of 32 KB each, and its marks, would take 1 GB.
    monkeypatch.setattr(module, "MAX_LOCAL_BYTES", 1 << 21)
    n_lanes = []

    class Recorder(module.Run):
        def go(self):
            n_lanes.append(self.n_lanes)
            super().go()

    monkeypatch.setattr(module, "Run", Recorder)
    program = cuda.load(SOURCE, 90)
    rows, accs, want = rows_in_memory(program, [3] * 4)
    program.launch("add_copied_rows", 4, 32, [table(rows, MANY), 1])
    for i in (0, 2, 3):
        assert np.array_equal(accs[i].read(), want[i])
    assert not np.array_equal(accs[1].read(), want[1])  # its scale is 2
    assert n_lanes == [64, 64]


@pytest.mark.parametrize("kind", ["bytes", "numpy record", "ctypes"])
def test_struct_arguments(kind):
    program = cuda.load(SOURCE, 90)
    rows, accs, want = rows_in_memory(program, [40])
    argument = table(rows, 4)
    if kind == "numpy record":
        dtype = np.dtype([("n_rows", "<i4"), ("pad", "<i4"), ("rows", ROW, 4)])
        argument = np.frombuffer(argument, dtype)[0]
    elif kind == "ctypes":
        argument = Table4Struct(1, (RowStruct(*rows[0].tolist()),))
    program.launch("add_rows", 1, 32, [argument, 0])
    assert np.array_equal(accs[0].read(), want[0])


def test_names():
    program = cuda.load(SOURCE, 90)
    assert "fill<float>" in program.kernels[program.find("fill<float>")]
    with pytest.raises(PtxError, match="'fill' fits 2 kernels"):
        program.find("fill")
    with pytest.raises(PtxError, match="'nothing' fits no kernel"):
        program.find("nothing")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_was_not_written_is_known(dtype):
    program = cuda.load(SOURCE, 90)
    out = program.region("out", np.zeros((10, 10), dtype), init=False)
    assert out.unwritten().size == 100
    name = "fill<float>" if dtype is np.float32 else "fill<double>"
    program.launch(name, 3, 32, [out, 96, 1.5])
    assert out.unwritten().tolist() == [96, 97, 98, 99]
    with pytest.raises(PtxError, match="'out': 4 elements were never written, the first are 96"):
        out.read()
    assert (out.read(partial=True).ravel()[:96] == 1.5).all()
    program.launch(name, 4, 32, [out, 100, 2.5])
    assert (out.read() == 2.5).all()


def test_guard_bands_and_alignment():
    program = cuda.load(SOURCE, 90)
    before = program.region("before", np.zeros(8, np.float32), guard_bytes=1 << 20)
    out = program.region("out", np.zeros(8, np.float32), misalign=4, guard_bytes=1 << 20)
    after = program.region("after", np.zeros(8, np.float32))
    assert out.address % 256 == 4
    assert out.address - before.address >= 1 << 20
    assert after.address - out.address >= 1 << 20
    assert out.address_of(3) == out.address + 12
    with pytest.raises(PtxError, match=r"store out of bounds.*'out', 32 bytes; the address is at byte 32"):
        program.launch("fill<float>", 1, 32, [out, 9, 1.0])


def test_read_only_region():
    program = cuda.load(SOURCE, 90)
    out = program.region("out", np.zeros(8, np.float32), writable=False)
    with pytest.raises(PtxError, match="store to 'out', which is read-only"):
        program.launch("fill<float>", 1, 32, [out, 8, 1.0])


def test_reset_drops_regions_and_keeps_device_variables():
    program = cuda.load(SOURCE, 90)
    for n in (1, 2):
        out = program.region("out", np.zeros(1, np.int32))
        program.launch("count_launches", 1, 1, [out])
        assert out.read() == n
        program.reset()
        with pytest.raises(PtxError, match="not inside one allocation"):
            out.read(partial=True)


def test_empty_region_and_new_contents():
    program = cuda.load(SOURCE, 90)
    empty = program.region("empty", np.zeros((0, 3), np.float32))
    program.launch("fill<float>", 1, 32, [empty, 0, 1.0])
    assert empty.read().shape == (0, 3)
    with pytest.raises(PtxError, match="out of bounds"):
        program.launch("fill<float>", 1, 32, [empty, 1, 1.0])
    out = program.region("out", np.zeros(2, np.float32), init=False)
    out.write(np.ones(2))
    assert out.read().tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"shape \(2,\), got \(3,\)"):
        out.write(np.ones(3))


class TestCache:
    """Compiled PTX is reused until the source or a header of it changes."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("FUSEDACCUM_PTX_CACHE", str(tmp_path / "cache"))
        self.cache, self.source = tmp_path / "cache", tmp_path / "a.cu"
        (tmp_path / "deep").mkdir()
        self.header = tmp_path / "deep" / "b.h"
        self.header.write_text("#define VALUE 1\n")
        (tmp_path / "c.h").write_text('#include "deep/b.h"\n')
        self.source.write_text('#include "c.h"\n__global__ void k(int* x) { *x = VALUE; }\n')

    def n_compiled(self):
        return len(list(self.cache.glob("*.ptx")))

    def test_headers_count(self):
        program = cuda.load(self.source)
        out = program.region("out", np.zeros(1, np.int32))
        program.launch("k", 1, 1, [out])
        assert out.read() == 1
        cuda.compile_ptx(self.source)
        assert self.n_compiled() == 1
        self.header.write_text("#define VALUE 2\n")
        assert "2;" in cuda.compile_ptx(self.source)
        assert self.n_compiled() == 2

    def test_arch_and_flags_count(self):
        for arguments in ({}, {"arch": 80}, {"flags": ("-DOTHER",)}):
            cuda.compile_ptx(self.source, **arguments)
        assert self.n_compiled() == 3

    def test_errors_are_nvccs(self):
        self.source.write_text("__global__ void k(int* x) { *x = undeclared; }\n")
        with pytest.raises(RuntimeError, match=r'a\.cu for sm_90: nvcc says\n(.|\n)*"undeclared" is undefined'):
            cuda.compile_ptx(self.source)
        assert self.n_compiled() == 0
