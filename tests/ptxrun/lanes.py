"""The state of one batch of blocks: every thread is a lane of numpy vectors."""

from __future__ import annotations

import numpy as np

from .memory import POISON
from .ptxtypes import PtxError
from .races import Races

SM_COUNT = 132  # of an H100; kernels only see it through %nsmid


class Lanes:
    """Identity of the lanes, registers, the memories of a block and of a thread.

    Attributes, per lane: ``lane_of`` (in its warp), ``warp_of`` and ``block_of`` (in the batch), ``warp_id``,
    ``block_id``, ``thread_id`` (in the grid), ``carry``, ``alive``. Per register: ``regs`` (a vector, or None while
    no thread has written it) and ``written`` (see definedness.py).
    """

    def __init__(self, module, kernel, options, blocks):
        self.kernel, self.mem, self.stats, self.options = kernel, module.mem, options.stats, options
        grid, block = options.grid, options.block
        n_threads, n_blocks = block[0] * block[1] * block[2], len(blocks)
        self.n_threads, self.n_blocks, self.n_lanes = n_threads, n_blocks, n_blocks * n_threads
        self.warps_per_block = (n_threads + 31) // 32

        t = np.tile(np.arange(n_threads), n_blocks)
        self.block_of = np.repeat(np.arange(n_blocks), n_threads)
        self.lane_of, self.warp_of = (t % 32).astype(np.uint32), self.block_of * self.warps_per_block + t // 32
        first = np.repeat(np.arange(n_blocks) * n_threads, self.warps_per_block)
        self.warp_start = first + np.tile(np.arange(self.warps_per_block) * 32, n_blocks)
        self.block_id = np.repeat(blocks, n_threads)
        self.thread_id = self.block_id * n_threads + t
        self.warp_id = self.block_id * self.warps_per_block + t // 32
        self._make_special_registers(t, grid, block)

        self.regs, self.written = [None] * len(kernel.regs), [None] * len(kernel.regs)
        self.partial = set()  # registers that some lane has not written
        self.carry, self.alive = np.zeros(self.n_lanes, bool), np.ones(self.n_lanes, bool)

        self.smem_size = kernel.smem + options.shared_bytes
        # Blocks' shared memories lie apart, so that a wrong offset does not reach a neighbour's.
        self.smem_stride = (self.smem_size + 31) // 16 * 16
        self.shared = np.full(n_blocks * self.smem_stride, POISON, np.uint8)
        self.shared_init = np.zeros(self.shared.size, bool)
        self.local = np.full(self.n_lanes * kernel.local, POISON, np.uint8)
        self.local_init = np.zeros(self.local.size, bool)
        self.params = np.frombuffer(options.params + bytes(-len(options.params) % 8), np.uint8)
        self.n_param_bytes = len(options.params)

        self.races = {"global": options.global_races, "shared": None}
        if options.shared_races and self.smem_size:
            self.races["shared"] = Races(self.shared.size, kernel.granule["shared"], "shared")
        self.block_epoch = np.zeros(n_blocks, np.int32)
        self.warp_epoch = np.zeros(n_blocks * self.warps_per_block, np.int32)

    def _make_special_registers(self, t, grid, block):
        b, lane, one = self.block_id, self.lane_of, np.uint32(1)
        up_to = (np.uint32(2) << lane) - one
        varying = {
            "tid.x": t % block[0],
            "tid.y": t // block[0] % block[1],
            "tid.z": t // (block[0] * block[1]),
            "ctaid.x": b % grid[0],
            "ctaid.y": b // grid[0] % grid[1],
            "ctaid.z": b // (grid[0] * grid[1]),
            "laneid": lane,
            "warpid": t // 32,
            "smid": b % SM_COUNT,
            "lanemask_eq": one << lane,
            "lanemask_lt": (one << lane) - one,
            "lanemask_le": up_to,
            "lanemask_gt": ~up_to,
            "lanemask_ge": ~((one << lane) - one),
        }
        self._varying = {name: v.astype(np.uint32) for name, v in varying.items()}
        dynamic = self.options.shared_bytes
        self._fixed = {"nwarpid": 64, "nsmid": SM_COUNT, "zero": 0, "one": 1, "dynamic_smem_size": dynamic}
        self._fixed["total_smem_size"] = self.kernel.smem + dynamic
        for i, c in enumerate("xyz"):
            self._fixed |= {f"ntid.{c}": block[i], f"nctaid.{c}": grid[i], f"zero3.{c}": 0, f"one3.{c}": 1}

    # ---- services for the instructions' closures
    def count(self, idx):
        """How many lanes ``idx`` stands for."""
        return self.n_lanes if idx is None else len(idx)

    def lane_number(self, idx, j):
        """The lane at position ``j`` of ``idx``."""
        return j if idx is None else int(idx[j])

    def special(self, key, idx, dt):
        """A special register's value as type ``dt``."""
        if key in self._fixed:
            return dt(self._fixed[key])
        if key == "clock":
            return dt(self.stats.steps & 0x7FFFFFFF)
        v = self._varying[key]
        v = v if idx is None else v[idx]
        return v.astype(dt) if np.dtype(dt).itemsize != 4 else v.view(dt)

    def ballot(self, v, idx):
        """For each lane, the mask of its warp's lanes where ``v`` holds."""
        warp, lane = (self.warp_of, self.lane_of) if idx is None else (self.warp_of[idx], self.lane_of[idx])
        m = np.zeros(self.n_blocks * self.warps_per_block, np.uint32)
        np.bitwise_or.at(m, warp, np.where(v, np.uint32(1) << lane, np.uint32(0)))
        return m[warp]

    def fail(self, ins, why, lane=None):
        """Raises PtxError with the instruction's line and the lane's block and thread."""
        at = ""
        if lane is not None:
            at = f" [block {int(self.block_id[lane])} thread {int(lane) % self.n_threads}]"
        raise PtxError(f"{self.kernel.name}: PTX line {ins.line}: {ins.text}\n    {why}{at}")
