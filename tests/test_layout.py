"""Where slots lie: pure arithmetic, and the constants shared with csrc/layout.h."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from fusedaccum import layout
from fusedaccum.layout import ALIGNMENT, CHUNK, Layout, dense_strides

HEADER = (ROOT / "csrc" / "layout.h").read_text()


def struct_fields(name: str) -> list[str]:
    """The fields of a struct of csrc/layout.h, arrays spelled out."""
    body = re.search(rf"struct {name} \{{(.*?)\}};", HEADER, re.DOTALL).group(1)
    declarations = re.sub(r"//.*", "", body).replace("\n", " ").split(";")
    names = [n.strip() for d in declarations if d.strip() for n in re.sub(r"^\s*\w+\s", "", d).split(",")]
    result: list[str] = []
    for n in names:
        array = re.fullmatch(r"(\w+)\[(\d+)\]", n)
        result += [f"{array[1]}{i}" for i in range(int(array[2]))] if array else [n]
    return result


def enum_names(name: str) -> dict[str, int]:
    """The values of an enum of csrc/layout.h, by Python's names for them: kSumSq is SUM_SQ."""
    body = re.search(rf"enum {name} : int64_t \{{(.*?)\}}", HEADER, re.DOTALL).group(1)
    values: dict[str, int] = {}
    for entry in re.sub(r"//.*", "", body).replace("\n", " ").split(","):
        key, _, value = (part.strip() for part in entry.partition("="))
        if key:
            values[re.sub(r"\B([A-Z])", r"_\1", key.removeprefix("k")).upper()] = int(value) if value else len(values)
    return values


class TestHeader:
    @pytest.mark.parametrize(
        ("constant", "value"),
        [
            ("kChunk", layout.CHUNK),
            ("kLanes", layout.LANES),
            ("kSlotColumns", len(layout.SLOT_COLUMNS)),
            ("kHyperColumns", layout.HYPER_COLUMNS),
            ("kScalarColumns", layout.SCALAR_COLUMNS),
        ],
    )
    def test_constant(self, constant: str, value: int) -> None:
        assert int(re.search(rf"constexpr int64_t {constant} = (\d+);", HEADER).group(1)) == value

    def test_slot_is_a_row_of_table(self) -> None:
        assert tuple(struct_fields("Slot")) == layout.SLOT_COLUMNS

    @pytest.mark.parametrize("rule", ["Adam", "Sgd"])
    def test_rows_have_as_many_columns_as_their_structs(self, rule: str) -> None:
        assert len(struct_fields(f"{rule}Hyper")) == layout.HYPER_COLUMNS
        assert len(struct_fields(f"{rule}Scalars")) == layout.SCALAR_COLUMNS

    @pytest.mark.parametrize(
        ("name", "first", "size"),
        [("Control", "NORM", layout.CONTROL_SIZE), ("Window", "WEIGHT", layout.WINDOW_SIZE)],
    )
    def test_entries(self, name: str, first: str, size: int) -> None:
        entries = enum_names(name)
        assert entries.pop(name.upper()) == size
        assert (entries[first], len(entries)) == (0, size)
        assert {entry: getattr(layout, entry) for entry in entries} == entries

    def test_rules(self) -> None:
        assert enum_names("Rule") == {
            "ADAM": layout.RULE_ADAM,
            "SGD": layout.RULE_SGD,
            "NO_RULE": layout.RULE_NONE,
        }

    def test_a_chunk_is_whole_rounds_of_lanes(self) -> None:
        # The tree over lanes halves, and a chunk's second round must begin at lane 0.
        assert layout.LANES & (layout.LANES - 1) == 0
        assert CHUNK % layout.LANES == 0
        assert CHUNK % ALIGNMENT == 0


SIZES = st.lists(st.one_of(st.integers(0, 200), st.integers(0, 5 * CHUNK), st.integers(0, 2**40)), max_size=12)


class TestLayout:
    @given(SIZES)
    def test_slots_are_aligned_in_order_and_apart(self, sizes: list[int]) -> None:
        place = Layout()
        placements = [place.add(n) for n in sizes]
        assert place.placements == placements
        end = chunk = 0
        for placement, n in zip(placements, sizes, strict=True):
            assert placement.n_elems == n
            assert placement.offset_elems % ALIGNMENT == 0
            assert end <= placement.offset_elems < end + ALIGNMENT
            assert placement.first_chunk == chunk
            end, chunk = placement.offset_elems + n, chunk + math.ceil(n / CHUNK)
        assert end <= place.n_elems < end + ALIGNMENT
        assert place.n_chunks == chunk

    @given(st.lists(st.tuples(st.integers(0, 3 * CHUNK), st.booleans(), st.booleans()), max_size=12))
    def test_masters_and_extras_are_aligned_and_apart(self, slots: list[tuple[int, bool, bool]]) -> None:
        place = Layout()
        for n, with_master, with_extra in slots:
            placement = place.add(n)
            if with_master:
                place.add_master(placement)
            if with_extra:
                place.add_extra(placement)
        for field, total, column in (
            ("master_offset_elems", place.n_master_elems, 1),
            ("extra_offset_elems", place.n_extra_elems, 2),
        ):
            end = 0
            for placement, slot in zip(place.placements, slots, strict=True):
                offset = getattr(placement, field)
                if not slot[column]:
                    assert offset == -1
                    continue
                assert offset % ALIGNMENT == 0
                assert offset >= end
                end = offset + placement.n_elems
            assert end <= total

    def test_a_second_master_or_extra_keeps_the_first(self) -> None:
        place = Layout()
        one, other = place.add(10), place.add(10)
        for _ in range(2):
            for placement in (one, other):
                place.add_master(placement)
                place.add_extra(placement)
        assert (one.master_offset_elems, other.master_offset_elems) == (0, ALIGNMENT)
        assert (one.extra_offset_elems, other.extra_offset_elems) == (0, ALIGNMENT)
        assert place.n_master_elems == place.n_extra_elems == 2 * ALIGNMENT

    def test_places_never_move(self) -> None:
        place = Layout()
        first = place.add(CHUNK + 1)
        row = first.row(0)
        for n in (0, 1, 10 * CHUNK):
            place.add(n)
        assert first.row(0) == row

    def test_a_row_has_the_columns_of_table(self) -> None:
        place = Layout()
        place.add(7)
        placement = place.add(100)
        place.add_extra(placement)
        row = dict(zip(layout.SLOT_COLUMNS, placement.row(3), strict=True))
        assert row == {
            "offset_elems": ALIGNMENT,
            "n_elems": 100,
            "first_chunk": 1,
            "group": 3,
            "master_offset_elems": -1,
            "extra_offset_elems": 0,
        }

    def test_more_elements_than_32_bits_hold(self) -> None:
        # Case 28: a model whose flat buffer is beyond 2^31 elements; offsets must not wrap in table or arithmetic.
        place = Layout()
        sizes = [2**31 - 1, 2**31 + 5, 2**32 + 1, 3]
        placements = [place.add(n) for n in sizes]
        for placement in placements:
            place.add_master(placement)
            place.add_extra(placement)
        assert [p.offset_elems for p in placements] == [0, 2**31, 2**32 + ALIGNMENT, 2**33 + 2 * ALIGNMENT]
        assert [p.first_chunk for p in placements] == [0, 2**16, 2**17 + 1, 2**18 + 2]
        assert place.n_elems == 2**33 + 3 * ALIGNMENT
        assert place.n_chunks == 2**18 + 3
        assert placements[3].master_offset_elems == placements[3].extra_offset_elems == placements[3].offset_elems
        table = torch.tensor([p.row(0) for p in placements], dtype=torch.int64)
        assert table[:, 0].tolist() == [p.offset_elems for p in placements]

    @pytest.mark.parametrize(
        ("n", "chunks"), [(0, 0), (1, 1), (CHUNK - 1, 1), (CHUNK, 1), (CHUNK + 1, 2), (2**40, 2**25)]
    )
    def test_n_chunks(self, n: int, chunks: int) -> None:
        assert layout.n_chunks(n) == chunks


SHAPES = st.lists(st.integers(0, 4), max_size=4)


def addresses(sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Where each element lies."""
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*map(range, sizes))]


class TestDenseStrides:
    @given(SHAPES, st.randoms(use_true_random=False))
    def test_any_order_of_a_dense_tensor_is_kept(self, shape: list[int], random: object) -> None:
        order = list(range(len(shape)))
        random.shuffle(order)
        tensor = torch.empty(shape).permute(order)
        strides = dense_strides(tensor.shape, tensor.stride())
        if tensor.numel():
            assert strides == tensor.stride()
        # Whatever it answers covers the slot's elements, each once.
        assert sorted(addresses(tuple(tensor.shape), strides)) == list(range(tensor.numel()))

    @given(SHAPES.filter(len), st.data())
    def test_any_view_gets_strides_that_fill_a_slot(self, shape: list[int], data: st.DataObject) -> None:
        tensor = torch.empty(shape)
        for dim in range(tensor.dim()):
            step = data.draw(st.integers(1, 3))
            tensor = tensor[(slice(None),) * dim + (slice(data.draw(st.integers(0, 1)), None, step),)]
            if tensor.shape[dim] == 1 and data.draw(st.booleans()):
                tensor = tensor.expand(*tensor.shape[:dim], 3, *tensor.shape[dim + 1 :])
        strides = dense_strides(tensor.shape, tensor.stride())
        assert sorted(addresses(tuple(tensor.shape), strides)) == list(range(tensor.numel()))

    @pytest.mark.parametrize(
        ("tensor", "strides"),
        [
            (torch.empty(2, 3, 4), (12, 4, 1)),
            (torch.empty(()), ()),
            (torch.empty(3, 4).t(), (1, 4)),
            (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
            # Gaps and overlaps: contiguous strides instead.
            (torch.empty(3, 8)[:, ::2], (4, 1)),
            (torch.empty(1, 4).expand(3, 4), (4, 1)),
            (torch.empty(()).expand(5), (1,)),
            (torch.empty(0, 3), (3, 1)),
            (torch.empty(3, 0).t(), (3, 1)),
        ],
        ids=[
            "contiguous",
            "0-dim",
            "transposed",
            "channels-last",
            "gaps",
            "expanded",
            "expanded 0-dim",
            "empty",
            "empty2",
        ],
    )
    def test_known(self, tensor: torch.Tensor, strides: tuple[int, ...]) -> None:
        assert dense_strides(tensor.shape, tensor.stride()) == strides

    @pytest.mark.parametrize("odd", [0, 1, 7, 1000])
    def test_the_stride_of_a_size_1_dimension_does_not_matter(self, odd: int) -> None:
        # torch leaves any stride there (a[:, :1], as_strided); the tensor is still dense.
        strides = dense_strides((4, 1, 3), (3, odd, 1))
        assert (strides[0], strides[2]) == (3, 1)

    @given(SHAPES, st.randoms(use_true_random=False))
    def test_is_contiguous_agrees_with_torch(self, shape: list[int], random: object) -> None:
        order = list(range(len(shape)))
        random.shuffle(order)
        tensor = torch.empty(shape).permute(order)
        assert layout.is_contiguous(tensor.shape, tensor.stride()) == tensor.is_contiguous()
        assert layout.contiguous_strides(shape) == torch.empty(shape).stride()
