"""csrc/cuda/plan.h as a pure function: lists of tensors in; grids, and the bytes that launches carry, out."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from types import ModuleType

import pytest
from cuda_harness import DTYPE_CODES

from fusedaccum.layout import CHUNK, n_chunks

MAX_BLOCKS = 2**31 - 1  # of a grid's first dimension
MAX_PARAMETER_BYTES = 32764  # CUDA 12.1 and later, on sm_70 and newer
OLD_MAX_PARAMETER_BYTES = 4096
ENTRY_BYTES = 16
# The kernels' arguments before the entries: AccumulateArgs, StepArgs.
ACCUMULATE_BYTES, STEP_BYTES = 5 * 8 + 8 + 8, 8 * 8 + 8

Tensor = tuple[int, int, int, int, bool]  # address, elements, slot, dtype, first


def tensor(n_elems: int, slot: int = 0, address: int = 0x7F00_0000_0000, dtype: int = 0, first: bool = False) -> Tensor:
    return address, n_elems, slot, dtype, first


@dataclass(frozen=True)
class Entry:
    """One entry of a parameter block, taken apart as the kernel does."""

    data: int
    end: int
    slot: int
    dtype: int
    first: int
    spare: int


def entries_of(block: bytes, args_bytes: int) -> list[Entry]:
    """All entries that the block has room for."""
    result = []
    for data, end, bits in struct.iter_unpack("<QII", block[args_bytes:]):
        result.append(Entry(data, end, bits & (2**28 - 1), bits >> 28 & 3, bits >> 30 & 1, bits >> 31))
    return result


def accumulate(plan: ModuleType, tensors: list[Tensor]) -> list[tuple[int, int, bytes]]:
    return plan.accumulate(0x1000, 0x2000, 0x3000, 0x4000, 0x5000, 0.3, tensors)


def step(plan: ModuleType, tensors: list[Tensor]) -> list[tuple[int, int, bytes]]:
    return plan.step(1, 2, 3, 4, 5, 6, 7, 8, tensors)


def walk(plan: ModuleType, tensors: list[Tensor], capacity: int) -> list[tuple[int, list[tuple]]]:
    """``entries`` with what holds for any list: order, cumulative ends, capacity, and that nothing is lost."""
    launches = plan.entries(tensors, capacity)
    left = [t for t in tensors if t[1] > 0]
    for n_blocks, entries in launches:
        assert 0 < len(entries) <= capacity
        assert 0 < n_blocks <= MAX_BLOCKS
        end = 0
        for entry in entries:
            address, n_elems, slot, dtype, first = left.pop(0)
            end += -(-n_elems // CHUNK)
            assert entry == (address, end, slot, dtype, first)
        assert end == n_blocks
    assert left == []
    return launches


def test_no_tensors_no_launch(plan_module: ModuleType) -> None:
    assert plan_module.entries([], plan_module.LARGE) == []
    assert accumulate(plan_module, [tensor(0), tensor(0, slot=1)]) == []


def test_empty_tensors_are_left_out_and_the_order_is_kept(plan_module: ModuleType) -> None:
    sizes = (0, 1, 0, 0, CHUNK, CHUNK + 1, 0, 7)
    tensors = [tensor(n, slot=50 - i, address=4096 * (i + 1), dtype=i % 3, first=i % 2) for i, n in enumerate(sizes)]
    ((n_blocks, entries),) = walk(plan_module, tensors, plan_module.LARGE)
    assert n_blocks == 5
    assert [end for _, end, *_ in entries] == [1, 2, 4, 5]
    assert [slot for _, _, slot, *_ in entries] == [49, 46, 45, 43]


@pytest.mark.parametrize("n_elems", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2**31 - 1, 2**31, 2**31 + 1, 2**40 + 5])
def test_one_block_for_each_chunk(plan_module: ModuleType, n_elems: int) -> None:
    ((n_blocks, _),) = walk(plan_module, [tensor(n_elems)], plan_module.LARGE)
    assert n_blocks == n_chunks(n_elems)


def test_more_than_2_to_the_31_elements_in_all(plan_module: ModuleType) -> None:
    tensors = [tensor(2**30 + 1, slot=i) for i in range(9)]
    ((n_blocks, _),) = walk(plan_module, tensors, plan_module.LARGE)
    assert n_blocks == 9 * (2**15 + 1)


class TestWhereALaunchEnds:
    @pytest.mark.parametrize("capacity", [1, 2, 120, 240, 2040])
    @pytest.mark.parametrize("beyond", [-1, 0, 1])
    @pytest.mark.parametrize("times", [1, 2])
    def test_at_its_capacity(self, plan_module: ModuleType, capacity: int, beyond: int, times: int) -> None:
        n = capacity * times + beyond
        # Empty ones take no room.
        tensors = [tensor(size, slot=i) for i in range(n) for size in (3, 0)]
        launches = walk(plan_module, tensors, capacity)
        assert len(launches) == -(-n // capacity)
        assert all(len(entries) == capacity for _, entries in launches[:-1])

    def test_at_the_largest_grid(self, plan_module: ModuleType) -> None:
        half = 2**30 * CHUNK
        ((n_blocks, _),) = walk(plan_module, [tensor(half), tensor(half - CHUNK)], plan_module.LARGE)
        assert n_blocks == MAX_BLOCKS
        launches = walk(plan_module, [tensor(half), tensor(half - CHUNK + 1), tensor(5)], plan_module.LARGE)
        assert [n_blocks for n_blocks, _ in launches] == [2**30, 2**30 + 1]
        launches = walk(plan_module, [tensor(MAX_BLOCKS * CHUNK)] * 3, plan_module.LARGE)
        assert [n_blocks for n_blocks, _ in launches] == [MAX_BLOCKS] * 3

    def test_a_tensor_beyond_the_largest_grid_is_refused(self, plan_module: ModuleType) -> None:
        with pytest.raises(RuntimeError, match=r"a tensor of more than 2\^46 elements"):
            plan_module.entries([tensor(1), tensor(MAX_BLOCKS * CHUNK + 1)], plan_module.LARGE)


class TestBlock:
    def test_limits(self, plan_module: ModuleType) -> None:
        assert (plan_module.SMALL, plan_module.LARGE) == (120, 2040)
        assert STEP_BYTES + plan_module.LARGE * ENTRY_BYTES <= MAX_PARAMETER_BYTES
        assert STEP_BYTES + plan_module.SMALL * ENTRY_BYTES <= OLD_MAX_PARAMETER_BYTES

    @pytest.mark.parametrize(("make", "args_bytes"), [(accumulate, ACCUMULATE_BYTES), (step, STEP_BYTES)])
    @pytest.mark.parametrize(
        ("n", "capacities"),
        [
            (1, [120]),
            (119, [120]),
            (120, [120]),
            (121, [2040]),
            (2040, [2040]),
            (2041, [2040, 120]),
            (4081, [2040] * 3),
        ],
    )
    def test_few_tensors_travel_in_a_small_one(
        self, plan_module: ModuleType, make: object, args_bytes: int, n: int, capacities: list[int]
    ) -> None:
        launches = make(plan_module, [tensor(5, slot=i) for i in range(n)])
        found = [capacity for _, capacity, _ in launches]
        assert found == capacities[:-1] + [120 if n - 2040 * (len(found) - 1) <= 120 else 2040]
        for _, capacity, block in launches:
            assert len(block) == args_bytes + capacity * ENTRY_BYTES <= MAX_PARAMETER_BYTES

    @pytest.mark.parametrize(("make", "args_bytes"), [(accumulate, ACCUMULATE_BYTES), (step, STEP_BYTES)])
    def test_bits_of_an_entry(self, plan_module: ModuleType, make: object, args_bytes: int) -> None:
        tensors = [
            tensor(1, slot=0, address=2**64 - 2, dtype=0, first=False),
            tensor(CHUNK + 1, slot=2**28 - 1, address=2, dtype=3, first=True),
            tensor(9, slot=0x5555555, address=0x123456789ABCDEF0, dtype=1, first=False),
            tensor(9, slot=0xAAAAAAA, address=0, dtype=2, first=True),
        ]
        ((n_blocks, _, block),) = make(plan_module, tensors)
        entries = entries_of(block, args_bytes)
        ends = [1, 3, 4, 5]
        assert n_blocks == 5
        assert entries[:4] == [
            Entry(address, end, slot, dtype, int(first), 0)
            for (address, _, slot, dtype, first), end in zip(tensors, ends, strict=True)
        ]
        assert entries[4:] == [Entry(0, 0, 0, 0, 0, 0)] * (plan_module.SMALL - 4)

    @pytest.mark.parametrize("n", [1, 120, 121, 2039, 2040])
    def test_unused_entries_are_zero(self, plan_module: ModuleType, n: int) -> None:
        # Not what the stack or an earlier launch left: the bytes go to the device, and a run can be repeated exactly.
        ((_, _, block),) = accumulate(plan_module, [tensor(1, slot=i, dtype=2, first=True) for i in range(n)])
        assert not any(block[ACCUMULATE_BYTES + n * ENTRY_BYTES :])

    def test_arguments(self, plan_module: ModuleType) -> None:
        tensors = [tensor(1)] * 7 + [tensor(0)]
        ((_, _, block),) = accumulate(plan_module, tensors)
        assert struct.unpack_from("<5QdQ", block) == (0x1000, 0x2000, 0x3000, 0x4000, 0x5000, 0.3, 7)
        ((_, _, block),) = step(plan_module, tensors)
        assert struct.unpack_from("<9Q", block) == (1, 2, 3, 4, 5, 6, 7, 8, 7)

    def test_every_launch_counts_its_own_entries(self, plan_module: ModuleType) -> None:
        first, second = accumulate(plan_module, [tensor(CHUNK + 1, slot=i) for i in range(2043)])
        assert (first[0], second[0]) == (2 * 2040, 2 * 3)
        assert [struct.unpack_from("<Q", block, 48)[0] for _, _, block in (first, second)] == [2040, 3]
        assert entries_of(second[2], ACCUMULATE_BYTES)[0] == Entry(tensor(1)[0], 2, 2040, 0, 0, 0)

    def test_dtypes_fit_their_bits(self, plan_module: ModuleType) -> None:
        assert sorted(DTYPE_CODES.values()) == [0, 1, 2]
        assert plan_module.NO_GRAD == 3


def test_a_slot_that_does_not_fit_its_bits_is_refused(plan_module: ModuleType) -> None:
    assert walk(plan_module, [tensor(1, slot=2**28 - 1)], 1)
    with pytest.raises(RuntimeError, match=r"more than 2\^28 slots"):
        plan_module.entries([tensor(1, slot=2**28)], 1)
