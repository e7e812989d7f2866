"""A loaded PTX module: what its kernels are, and launching them."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np

from .linker import Linker
from .memory import Memory, Uninit
from .parser import parse_imm, parse_module
from .ptxtypes import DTYPE, FLOATS, PACKED_FLOATS, ROUNDINGS, UINT, PtxError
from .races import Races
from .scheduler import Run
from .stats import Stats

MAX_THREADS = 1024
MAX_LOCAL_BYTES = 1 << 26
"""Of a batch: a kernel that copies a 32 KB parameter to its stack takes 0.5 GB for 16384 threads otherwise."""


@dataclass
class LaunchOptions:
    """What a Run needs to know of its launch."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    params: bytes
    stats: Stats
    shared_bytes: int
    shared_races: bool
    global_races: Races | None
    count_sectors: bool
    check_uninit: bool
    allow_exited_at_barrier: bool
    max_steps: int


class Module:
    """PTX text, parsed, with its variables in memory.

    Attributes: ``kernels`` ({name: Kernel}), ``info`` (PTX version and target), ``mem`` (Memory).
    """

    def __init__(self, ptx, mem=None):
        self.info, self.kernels, self.vars = parse_module(ptx)
        self.mem = mem or Memory()
        for v in self.vars.values():
            if v.space in ("global", "const"):
                v.addr = self.mem.alloc(_initial_bytes(v), v.name, writable=v.space == "global")
        self._linked = set()

    def kernel(self, name):
        """The linked Kernel ``name``."""
        if name not in self.kernels:
            raise PtxError(f"no kernel {name!r}; the module has {sorted(self.kernels)}")
        k = self.kernels[name]
        if name not in self._linked:
            Linker(self.vars, k)
            self._linked.add(name)
        return k

    def unsupported(self, name):
        """[(line, text, why)] of the instructions that would raise if they were reached."""
        code = self.kernel(name).code
        return [(i.line, i.text, i.why) for i in code if i.ctl == "bad" and i.op not in ("trap", "brkpt")]

    def contractible(self, name):
        """[(mul's line, add's line)]: mul and add/sub without a rounding modifier, which ptxas may fuse into an fma.

        The interpreter rounds twice there, so the result need not agree to the last bit with a GPU's.
        """
        muls, out = {}, []
        for ins in self.kernels[name].code:
            if not set(ins.mods) & {*FLOATS, *PACKED_FLOATS} or set(ins.mods) & set(ROUNDINGS):
                continue
            if ins.op == "mul":
                muls[ins.args[0]] = ins.line
            elif ins.op in ("add", "sub"):
                out += [(muls[a], ins.line) for a in ins.args[1:] if a in muls]
        return out

    def launch(
        self,
        name,
        grid,
        block,
        args,
        *,
        shared_bytes=0,
        check_races="shared",
        count_sectors=False,
        uninit="error",
        allow_exited_at_barrier=False,
        batch_lanes=16384,
        block_order=None,
        max_steps=20_000_000,
    ):
        """Runs a kernel and returns its Stats.

        Args:
            grid, block: numbers of blocks and threads, an int or up to three.
            args: the parameter block as bytes; or a list with one item a parameter: a numpy array (copied in, copied
                back after the launch; one that is not writeable is copied in only, and a store to it is an error),
                Uninit(array), a scalar, an address from ``mem.alloc``, or bytes for a struct passed by value.
            shared_bytes: of dynamic shared memory.
            check_races: None, "shared" or "all" (global memory too, at half the speed).
            count_sectors: count 32-byte sectors in Stats.per_line.
            uninit: "error" or "ignore".
            allow_exited_at_barrier: threads that have exited count as arrived, as they do on a GPU.
            batch_lanes: how many threads run at once; whole blocks.
            block_order: a permutation of the block numbers, to show that the result does not depend on their order.
            max_steps: instructions after which the launch counts as endless.

        Raises:
            PtxError: anything wrong, with the PTX line and, where one is to blame, the block and thread.
        """
        if check_races not in (None, "shared", "all") or uninit not in ("error", "ignore"):
            raise ValueError(f"launch: check_races {check_races!r} or uninit {uninit!r} is none of the choices")
        k = self.kernel(name)
        grid, block = _three(grid), _three(block)
        n_threads, n_blocks = math.prod(block), math.prod(grid)
        if not 0 < n_threads <= MAX_THREADS:
            raise PtxError(f"{n_threads} threads a block")
        if (k.maxntid and n_threads > k.maxntid) or (k.reqntid and n_threads != k.reqntid):
            limits = f".maxntid {k.maxntid} / .reqntid {k.reqntid}"
            raise PtxError(f"{name}: {n_threads} threads a block against {limits}")
        mark, back = self.mem.mark(), []
        try:
            params = self._pack_all(k, args, back)
            options = LaunchOptions(
                grid=grid,
                block=block,
                params=params,
                stats=Stats(),
                shared_bytes=shared_bytes,
                shared_races=check_races is not None,
                global_races=Races(self.mem.data.size, k.granule["global"], "global") if check_races == "all" else None,
                count_sectors=count_sectors,
                check_uninit=uninit == "error",
                allow_exited_at_barrier=allow_exited_at_barrier,
                max_steps=max_steps,
            )
            order = list(range(n_blocks)) if block_order is None else list(block_order)
            if k.local:
                batch_lanes = min(batch_lanes, MAX_LOCAL_BYTES // k.local)
            step = max(1, batch_lanes // n_threads)
            with np.errstate(all="ignore"):
                for i in range(0, len(order), step):
                    Run(self, k, options, np.array(order[i : i + step], np.int64)).go()
        finally:  # after an error too: what the arrays hold then helps to find it
            for array, addr in back:
                if array.flags.writeable:
                    array[...] = self.mem.read(addr, array.dtype, array.size).reshape(array.shape)
            self.mem.release(mark)
        return options.stats

    def _pack_all(self, k, args, back):
        if isinstance(args, (bytes, bytearray)):
            if len(args) != k.param_size:
                raise PtxError(f"{k.name}: its parameters are {k.param_size} bytes, got a block of {len(args)}")
            return bytes(args)
        if len(args) != len(k.params):
            takes = [f"{p.name}:{p.ty}" for p in k.params]
            raise PtxError(f"{k.name} takes {len(takes)} parameters ({takes}), got {len(args)}")
        params = bytearray(k.param_size)
        for i, (p, a) in enumerate(zip(k.params, args, strict=True)):
            params[p.addr : p.addr + p.size] = self._pack(k.name, i, p, a, back)
        return bytes(params)

    def _pack(self, name, i, p, a, back):
        """The bytes of argument ``a`` for parameter ``p``; notes arrays to be copied back."""
        a, init = (a.array, False) if isinstance(a, Uninit) else (a, True)
        if isinstance(a, np.ndarray) and a.ndim and p.size == 8:
            addr = self.mem.alloc(a, f"arg{i}", writable=a.flags.writeable, init=init)
            back.append((a, addr))
            return struct.pack("<Q", addr)
        if isinstance(a, (bytes, bytearray)) and len(a) == p.size:
            return bytes(a)
        if isinstance(a, (float, np.floating)) and p.ty in {4: ("f32", "b32"), 8: ("f64", "b64")}.get(p.size, ()):
            return struct.pack("<f" if p.size == 4 else "<d", a)
        if isinstance(a, (int, np.integer, np.bool_)) and p.size in UINT:
            if p.ty in ("f32", "f64"):
                return struct.pack("<f" if p.size == 4 else "<d", a)
            return (int(a) & ((1 << 8 * p.size) - 1)).to_bytes(p.size, "little")
        kind = type(a).__name__
        raise PtxError(f"{name}: argument {i} ({kind}) does not fit parameter {p.name} (.{p.ty}, {p.size} bytes)")


def _three(shape):
    given = tuple(int(v) for v in (shape if isinstance(shape, (tuple, list)) else (shape,)))
    return (*given, 1, 1)[:3]


def _initial_bytes(v):
    raw = np.zeros(max(v.size, 1), np.uint8)
    if v.init:
        words = [x.strip() for x in v.init.strip().strip("{}").split(",")]
        try:
            values = np.array([parse_imm(x, v.ty) for x in words if x], DTYPE[v.ty]).view(np.uint8)
        except ValueError:
            raise PtxError(f"initialiser of {v.name} is not supported: {v.init[:60]}") from None
        raw[: values.size] = values
    return raw
