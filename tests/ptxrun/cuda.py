"""Compiles .cu files to PTX with nvcc, and launches their kernels in the interpreter.

    program = cuda.load("csrc/cuda/accumulate.cu", arch=90)
    acc = program.region("acc", numpy_array)
    out = program.region("out", np.zeros(8, np.float32), init=False)  # must be written before it is read
    stats = program.launch("accumulate", grid=4, block=128, args=[acc, out, 1000])
    acc.read(), out.read()

A name is the entry's, or any part of its demangled signature that fits one kernel only.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from .memory import Memory
from .module import Module
from .ptxtypes import PtxError

# As the extension is built: without contraction the same inputs give the same bits as on the CPU.
FLAGS = ("-std=c++17", "--fmad=false")
GUARD_BYTES = 4096


def nvcc_path():
    """The compiler, or None: PATH first, then CUDA_HOME."""
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(os.environ.get("CUDA_HOME", ""), "bin"))


def cache_dir():
    """Where compiled PTX is kept: FUSEDACCUM_PTX_CACHE, or a folder of this user's among the temporary files."""
    default = os.path.join(tempfile.gettempdir(), f"fusedaccum-ptx-{getattr(os, 'getuid', int)()}")
    path = Path(os.environ.get("FUSEDACCUM_PTX_CACHE", default))
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


@functools.cache
def _nvcc_version(nvcc):
    return subprocess.run([nvcc, "--version"], check=True, capture_output=True).stdout


def _files(source, include_dirs, seen):
    """``source`` and every header that it includes, as far as they lie beside their includer or in include_dirs."""
    if source in seen:
        return seen
    seen[source] = text = source.read_bytes()
    for quote, name in re.findall(rb'^\s*#\s*include\s*(["<])([^">]+)[">]', text, re.MULTILINE):
        for folder in (source.parent, *include_dirs) if quote == b'"' else include_dirs:
            header = folder / name.decode()
            if header.is_file():
                _files(header.resolve(), include_dirs, seen)
                break
    return seen


def compile_ptx(source, arch=90, flags=FLAGS, include_dirs=()):
    """The PTX of a .cu file for sm_<arch>, from the cache if neither it nor its headers changed.

    csrc is no include_dir by default, and should not be one: <math.h> would mean csrc/math.h. Headers are found by
    their path from the file that includes them.

    Raises:
        RuntimeError: nvcc's messages.
    """
    nvcc = nvcc_path()
    if nvcc is None:
        raise RuntimeError("compile_ptx: nvcc is neither on PATH nor in CUDA_HOME/bin")
    source, include_dirs = Path(source).resolve(), [Path(d).resolve() for d in include_dirs]
    key = hashlib.sha256(_nvcc_version(nvcc) + repr((arch, tuple(flags))).encode())
    for text in _files(source, include_dirs, {}).values():  # in order of inclusion
        key.update(hashlib.sha256(text).digest())
    out = cache_dir() / f"{source.stem}-sm_{arch}-{key.hexdigest()[:24]}.ptx"
    if not out.exists():
        with tempfile.TemporaryDirectory(dir=out.parent) as folder:
            fresh = Path(folder) / "out.ptx"
            includes = [f"-I{d}" for d in include_dirs]
            command = [nvcc, "-ptx", f"-arch=sm_{arch}", *flags, *includes, "-o", str(fresh), str(source)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"compile_ptx: {source.name} for sm_{arch}: nvcc says\n{done.stderr}{done.stdout}")
            os.replace(fresh, out)  # atomic: another process may be compiling the same
    return out.read_text()


@functools.cache
def _demangle(names):
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if tool is None or not names:
        return dict(zip(names, names, strict=True))
    done = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.splitlines(), strict=True))


class Region:
    """A piece of global memory made from an array; accesses outside any region are errors.

    Attributes: ``name``, ``address``, ``dtype``, ``shape``, ``n_bytes``.
    """

    def __init__(self, memory, name, array, misalign, writable, init, guard_bytes):
        self._memory, self.name, self.dtype, self.shape = memory, name, array.dtype, array.shape
        self.n_bytes = array.nbytes
        self.address = memory.alloc(array, name, misalign, writable, init, guard_bytes)

    def __int__(self):
        return self.address

    def address_of(self, index):
        """The address of an element, counted in the flat array."""
        return self.address + int(index) * self.dtype.itemsize

    def unwritten(self):
        """Flat indices of the elements of which some byte has never been written."""
        if not self.n_bytes:
            return np.zeros(0, np.int64)
        written = self._memory.written(self.address, self.n_bytes).reshape(-1, self.dtype.itemsize)
        return np.flatnonzero(~written.all(axis=1))

    def read(self, partial=False):
        """A copy of the contents.

        Raises:
            PtxError: an element has never been written, unless ``partial`` allows that.
        """
        missing = self.unwritten()
        if missing.size and not partial:
            some = ", ".join(map(str, missing[:4].tolist()))
            raise PtxError(f"region '{self.name}': {missing.size} elements were never written, the first are {some}")
        if not self.n_bytes:
            return np.empty(self.shape, self.dtype)
        return self._memory.read(self.address, self.dtype, self.n_bytes // self.dtype.itemsize).reshape(self.shape)

    def write(self, array):
        """New contents."""
        array = np.asarray(array, self.dtype)
        if array.shape != self.shape:
            raise ValueError(f"region '{self.name}' has shape {self.shape}, got {array.shape}")
        if self.n_bytes:
            self._memory.write(self.address, array)


class Program:
    """A compiled file and a memory of its own.

    Attributes: ``ptx``, ``module``, ``memory``, ``kernels`` ({entry name: demangled signature}).
    """

    def __init__(self, ptx):
        self.ptx, self.memory = ptx, Memory()
        self.module = Module(ptx, self.memory)
        self.kernels = _demangle(tuple(self.module.kernels))
        self._fresh = self.memory.mark()

    def find(self, name):
        """The entry that ``name`` means."""
        if name in self.kernels:
            return name
        found = [entry for entry, signature in self.kernels.items() if name in signature]
        if len(found) != 1:
            fits = f"fits {len(found)} kernels" if found else "fits no kernel"
            raise PtxError(f"{name!r} {fits}; there are {sorted(self.kernels.values())}")
        return found[0]

    def layout(self, name):
        """[(offset, bytes, type)] of a kernel's parameters, and the bytes in all."""
        k = self.module.kernels[self.find(name)]
        return [(p.addr, p.size, p.ty) for p in k.params], k.param_size

    def region(self, name, array, *, misalign=0, writable=True, init=True, guard_bytes=GUARD_BYTES):
        """Copies an array into global memory.

        Args:
            misalign: bytes past a multiple of 256.
            writable: False makes a store to it an error.
            init: False leaves it uninitialised: poison, and an error to read before it is written.
            guard_bytes: at least so many bytes on each side belong to no region.
        """
        return Region(self.memory, name, np.asarray(array), misalign, writable, init, guard_bytes)

    def reset(self):
        """Drops all regions; the file's own device variables keep their values."""
        self.memory.release(self._fresh)

    def launch(self, name, grid, block, args, **options):
        """Runs a kernel and returns its Stats; options as for Module.launch.

        Args:
            args: the whole parameter block as bytes (see ``layout``), or a list with one item a parameter: a Region,
                a number, a struct by value as bytes, ctypes.Structure or numpy record, or an array as Module.launch.
        """
        if not isinstance(args, (bytes, bytearray)):
            args = [_argument(a) for a in args]
        return self.module.launch(self.find(name), grid, block, args, **options)


def _argument(a):
    if isinstance(a, Region):
        return a.address
    if isinstance(a, ctypes.Structure):
        return bytes(a)
    if isinstance(a, np.void):
        return a.tobytes()
    return a


def load(source, arch=90, flags=FLAGS, include_dirs=()):
    """Compiles (or takes from the cache) and loads a .cu file."""
    return Program(compile_ptx(source, arch, flags, include_dirs))
