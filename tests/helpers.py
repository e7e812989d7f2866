"""Flat buffers for op tests, comparison by bits, and arithmetic that carries its own error bound."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fusedaccum import layout
from fusedaccum.backends import Backend
from fusedaccum.layout import CHUNK
from fusedaccum.scaling import LossScale
from fusedaccum.stats import new_window

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Either side of the widest vector (16 lanes of fp32), of a round of lanes, and of a chunk; and several chunks.
SIZES = (0, 1, 15, 16, 17, 1023, 1024, 1025, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77)
U32 = 2.0**-24  # half an ulp of fp32, relative

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MARGIN = 64


def bits(tensor: Tensor) -> Tensor:
    """The elements' bits, in memory order."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(_BITS[tensor.element_size()])


def guarded(n_elems: int, dtype: torch.dtype, shift: int = 0) -> tuple[Tensor, Tensor]:
    """(whole, inner): ``inner`` is ``n_elems`` elements in the middle of ``whole``.

    ``whole`` is 0xff bytes, a NaN in every floating dtype: what reads a margin gets NaN, what writes one is seen.
    ``shift`` moves ``inner`` off its 16-byte alignment.
    """
    n_whole = n_elems + 2 * _MARGIN + shift
    whole = torch.full((n_whole * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)
    return whole, whole[_MARGIN + shift : _MARGIN + shift + n_elems]


def placed(values: Tensor, dtype: torch.dtype, shift: int = 0) -> Tensor:
    """A copy of ``values`` in their memory order, in ``dtype``, between margins."""
    _, inner = guarded(values.numel(), dtype, shift)
    inner.copy_(values.as_strided((values.numel(),), (1,)))
    return inner.as_strided(values.shape, values.stride())


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Equal bits, but for the payload and sign of NaNs: IEEE leaves open which operand's NaN is kept."""
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, expected {expected.shape}"
    differs = bits(actual) != bits(expected)
    if actual.is_floating_point():
        flat_actual, flat_expected = (t.detach().as_strided((t.numel(),), (1,)) for t in (actual, expected))
        differs &= ~(flat_actual.isnan() & flat_expected.isnan())
    where = differs.nonzero().flatten()
    if where.numel():
        at = int(where[0])
        got, want = (t.as_strided((t.numel(),), (1,))[at].item() for t in (actual, expected))
        raise AssertionError(f"{what}: {where.numel()} of {actual.numel()} differ, [{at}] is {got!r}, not {want!r}")


def fresh_window(loss_scale: float = 1.0, growth: float = 1.0, backoff: float = 1.0, interval: int = 2000) -> Tensor:
    """A ``window`` before the first boundary; as it stands, without loss scaling."""
    return new_window(LossScale(loss_scale, growth, backoff, interval))


@dataclass
class Buffers:
    """Every argument of every op for slots of ``sizes``, each between margins, filled with NaN.

    Args:
        sizes: elements of each slot.
        groups: the param_group of each; all 0 by default.
        masters, extras: which slots have a master, or the state that only some have.
        shift: elements by which the float buffers are off their 16-byte alignment.
    """

    sizes: Sequence[int]
    groups: Sequence[int] | None = None
    masters: Iterable[int] = ()
    extras: Iterable[int] = ()
    shift: int = 0
    whole: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = layout.Layout()
        places = [self.layout.add(n) for n in self.sizes]
        for s in self.masters:
            self.layout.add_master(places[s])
        for s in self.extras:
            self.layout.add_extra(places[s])
        self.places = places
        groups = self.groups or [0] * len(places)
        rows = [place.row(group) for place, group in zip(places, groups, strict=True)]
        self.table = torch.tensor(rows, dtype=torch.int64).view(-1, len(layout.SLOT_COLUMNS))
        n_slots, n = len(places), self.layout.n_elems
        self.acc = self._new("acc", n)
        self.exp_avg = self._new("exp_avg", n)
        self.exp_avg_sq = self._new("exp_avg_sq", n)
        self.master = self._new("master", self.layout.n_master_elems) if self.layout.n_master_elems else None
        self.extra = self._new("extra", self.layout.n_extra_elems) if self.layout.n_extra_elems else None
        self.partials = self._new("partials", self.layout.n_chunks, torch.float64)
        self.micro_partials = self._new("micro_partials", self.layout.n_chunks, torch.float64)
        self.control = self._new("control", layout.CONTROL_SIZE, torch.float64)
        self.window = self._new("window", layout.WINDOW_SIZE, torch.float64)
        self.window.copy_(fresh_window())
        self.scalars = self._new("scalars", n_slots * layout.SCALAR_COLUMNS).view(-1, layout.SCALAR_COLUMNS)
        self.steps = self._new("steps", n_slots)
        self.params: list[Tensor] = []

    def _new(self, name: str, n_elems: int, dtype: torch.dtype = torch.float32) -> Tensor:
        self.whole[name], inner = guarded(n_elems, dtype, self.shift)
        return inner

    def add_param(self, values: Tensor, dtype: torch.dtype, shift: int = 0) -> Tensor:
        """The next parameter of ``params``: ``values`` in their memory order, between margins."""
        param = placed(values, dtype, shift)
        n_whole = param.untyped_storage().nbytes() // param.element_size()
        self.whole[f"params[{len(self.params)}]"] = param.as_strided((n_whole,), (1,), 0)
        self.params.append(param)
        return param

    def of(self, name: str, slot: int) -> Tensor:
        """A slot's part of the buffer ``name``, flat; all of ``control`` and ``window``, which belong to none."""
        if name in ("control", "window"):
            return getattr(self, name)
        place = self.places[slot]
        if name in ("partials", "micro_partials"):
            return getattr(self, name)[place.first_chunk : place.first_chunk + layout.n_chunks(place.n_elems)]
        if name in ("scalars", "steps"):
            return getattr(self, name)[slot : slot + 1].view(-1)
        start = {"master": place.master_offset_elems, "extra": place.extra_offset_elems}.get(name, place.offset_elems)
        return getattr(self, name)[start : start + place.n_elems]

    def fill(self, name: str, slot: int, values: Tensor) -> Tensor:
        """Writes a slot's part of the buffer ``name``, and returns it."""
        part = self.of(name, slot)
        part.copy_(values.reshape(-1))
        return part

    def snapshot(self) -> dict[str, Tensor]:
        """Every bit of every buffer, margins and gaps between slots included."""
        return {name: bits(whole).clone() for name, whole in self.whole.items()}

    def assert_only_changed(self, before: Mapping[str, Tensor], allowed: Mapping[str, Sequence[int]]) -> None:
        """That no bit differs from ``before`` but within ``allowed``: buffer -> slots (any for control, params)."""
        for name, whole in self.whole.items():
            changed = bits(whole) != before[name]
            # What lies inside an allowed part is taken out; anything left was not to be written.
            for slot in allowed.get(name, ()):
                inner = self.params[slot] if name.startswith("params") else self.of(name, slot)
                start = inner.storage_offset()
                changed[start : start + inner.numel()] = False
            where = changed.nonzero().flatten().tolist()
            assert not where, f"{name} was written outside of {allowed.get(name, 'nothing')}: elements {where[:5]}"


def assert_same_buffers(actual: Buffers, expected: Buffers) -> None:
    """That two sets of buffers agree in every bit, margins included."""
    for name in expected.whole:
        assert_same_bits(actual.whole[name], expected.whole[name], name)


def fp64(tensor: Tensor) -> np.ndarray:
    """The elements as fp64, in memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).double().numpy()


def any_bits(n: int, dtype: torch.dtype) -> Tensor:
    """Values over the whole range of ``dtype``: any bits, so subnormals, infinities and NaNs too."""
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    info = torch.iinfo(integer)
    return torch.randint(info.min, info.max + 1, (n,), dtype=torch.int64).to(integer).view(dtype)


def assert_sums_of_squares(partials: Tensor, values: Tensor, old: Tensor | None = None) -> None:
    """That ``partials`` are the chunks' sums of squares of ``values``, on top of ``old``.

    In fp32, a square is rounded once and then passes less than CHUNK / LANES sums of positive terms. One unit more
    covers the products of these errors and the fp64 tree; the sum with ``old`` is an fp64 one.
    """
    wide = fp64(values)
    exact = np.array([np.sum(wide[at : at + CHUNK] ** 2) for at in range(0, wide.size, CHUNK)])
    bound = exact * (CHUNK / layout.LANES + 1) * U32
    if old is not None:
        exact = exact + old.numpy()
        bound += exact * 2.0**-52
    assert partials.numel() == exact.size
    assert (np.abs(partials.numpy() - exact) <= bound).all(), (partials, exact)


class Rounded:
    """An exact value with a bound on how far an fp32 computation of it may be off: running error analysis.

    (Higham, Accuracy and Stability of Numerical Algorithms, 3.3.) Every operator adds what the operands' errors amount
    to and the rounding of its own result, half an ulp: at most U32 times the computed magnitude, or half the smallest
    subnormal. The fp64 arithmetic of the bound itself is 2^-29 of that, which `slack` covers.
    """

    slack = 1.0 + 2.0**-20

    def __init__(self, value: object, error: object = 0.0) -> None:
        self.value = np.asarray(value, dtype=np.float64)
        self.error = np.asarray(error, dtype=np.float64)

    @classmethod
    def of_fp64(cls, value: object) -> Rounded:
        """A value that the computation rounded to fp32 once."""
        return cls(value)._result(np.asarray(value, dtype=np.float64), 0.0)

    def _result(self, value: np.ndarray, carried: object) -> Rounded:
        rounding = U32 * (np.abs(value) + carried) + 2.0**-150
        return Rounded(value, (carried + rounding) * self.slack)

    def __add__(self, other: Rounded) -> Rounded:
        return self._result(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Rounded) -> Rounded:
        return self._result(self.value - other.value, self.error + other.error)

    def __mul__(self, other: Rounded) -> Rounded:
        carried = np.abs(self.value) * other.error + np.abs(other.value) * self.error + self.error * other.error
        return self._result(self.value * other.value, carried)

    def __truediv__(self, other: Rounded) -> Rounded:
        value = self.value / other.value
        lowest = np.abs(other.value) - other.error
        # A divisor that may be zero says nothing of the quotient.
        with np.errstate(divide="ignore", invalid="ignore"):
            carried = np.where(lowest > 0, (self.error + np.abs(value) * other.error) / lowest, np.inf)
        return self._result(value, carried)

    def sqrt(self) -> Rounded:
        root = np.sqrt(self.value)
        lowest = np.sqrt(np.maximum(self.value - self.error, 0.0))
        with np.errstate(invalid="ignore", divide="ignore"):
            carried = np.where(self.error > 0, self.error / (root + lowest), 0.0)
        return self._result(root, carried)

    def maximum(self, other: Rounded) -> Rounded:
        return Rounded(np.maximum(self.value, other.value), np.maximum(self.error, other.error))

    def assert_holds(self, actual: object, what: str = "") -> None:
        """That ``actual`` is within the bound."""
        off = np.abs(np.asarray(actual, dtype=np.float64) - self.value)
        bad = np.flatnonzero(~(off <= self.error))
        if bad.size:
            at = bad[0]
            error, value = (np.broadcast_to(x, off.shape).flat[at] for x in (self.error, self.value))
            raise AssertionError(f"{what}[{at}] is off by {off.flat[at]:.3g} from {value:.9g}; bound {error:.3g}")


def adam_hyper(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    maximize: bool = False,
    amsgrad: bool = False,
) -> list[float]:
    """A row of ``hyper`` for Adam."""
    return [lr, *betas, eps, weight_decay, float(decoupled), -1.0 if maximize else 1.0, float(amsgrad)]


def sgd_hyper(
    lr: float = 1e-2,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> list[float]:
    """A row of ``hyper`` for SGD."""
    return [lr, momentum, dampening, float(nesterov), weight_decay, 0.0, -1.0 if maximize else 1.0, 0.0]


def accumulate(
    backend: Backend,
    buffers: Buffers,
    grads: Sequence[Tensor],
    first: Sequence[int],
    slots: Sequence[int] | None = None,
    *,
    scale: float = 1.0,
    factor: float | None = None,
    micro: bool = False,
) -> None:
    """``accumulate_`` on ``buffers``. ``slots``: all by default. ``micro``: with ``micro_partials``."""
    backend.accumulate_(
        buffers.acc,
        buffers.partials,
        buffers.micro_partials if micro else None,
        buffers.table,
        list(grads),
        list(range(len(grads)) if slots is None else slots),
        list(first),
        scale,
        None if factor is None else torch.tensor([factor], dtype=torch.float64),
    )


def finalize(
    backend: Backend,
    buffers: Buffers,
    hyper: Sequence[Sequence[float]],
    rule: int,
    *,
    active: Sequence[int] | None = None,
    numerator: float = 1.0,
    weight: float = 1.0,
    weight_sq: float = 1.0,
    max_norm: float = math.inf,
    extra: Tensor | None = None,
    advance: bool = True,
    micro: bool = False,
) -> None:
    """``finalize_`` on ``buffers``. ``active``: slot indices, all by default. ``micro``: with ``micro_partials``."""
    mask = torch.zeros(len(buffers.sizes), dtype=torch.uint8)
    mask[list(range(len(buffers.sizes))) if active is None else list(active)] = 1
    backend.finalize_(
        buffers.control,
        buffers.scalars,
        buffers.steps,
        buffers.window,
        buffers.partials,
        buffers.micro_partials if micro else None,
        buffers.table,
        torch.tensor(hyper, dtype=torch.float64).view(-1, layout.HYPER_COLUMNS),
        mask,
        rule,
        numerator,
        weight,
        weight_sq,
        max_norm,
        extra,
        advance,
    )
