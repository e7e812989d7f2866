"""What is measured: every op in every case, and by which providers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from . import accumulate, boundary, overhead, sweep, windows
from .measure import OURS, Provider
from .providers import NAME, AbsentError, Given, Makers
from .shapes import gpt2_124m, llama_blocks, many_groups, many_small, resnet50, vit_b

GPT2, LLAMA, RESNET, VIT = "GPT-2 124M", "Llama 1.1B, 2 blocks", "ResNet-50", "ViT-B"
ONE_BLOCK = "Llama 1.1B, 1 block"
SMALL, GROUPS = "1,000 x 16", "100 groups"


@dataclass(frozen=True)
class Case:
    """Providers that take turns at one op.

    Attributes:
        quick: whether the quick run has it; seconds of budget are those of the full run.
        bytes_an_element_alive: of all providers together, to see whether there is memory.
    """

    op: str
    name: str
    given: Callable[[], Given]
    makers: Callable[[Given], Makers]
    budget_s: float
    quick: bool = False
    bytes_an_element_alive: int = 64

    @property
    def label(self) -> str:
        return f"{self.op}, {self.name}"


@dataclass(frozen=True)
class Lineup:
    """The providers that take part, ours first; ``absent``: name -> why it does not; ``wrong``: name -> what its check
    found."""

    providers: list[Provider]
    absent: dict[str, str]
    wrong: dict[str, str]


def line_up(makers: Makers) -> Lineup:
    """Builds and checks every provider.

    Raises:
        AssertionError: ours is wrong.
    """
    lineup = Lineup([], {}, {})
    for name, make in makers.items():
        try:
            lineup.providers.append(make())
        except AbsentError as error:
            lineup.absent[name] = str(error)
        except AssertionError as error:
            lineup.wrong[name] = str(error)
        except Exception as error:
            if name == NAME:
                raise
            # Somebody else's failure, a compiler's for one, is no reason to measure nothing.
            lineup.absent[name] = f"fails: {type(error).__name__}: {(str(error) or '?').splitlines()[0][:160]}"
    if not any(provider.role == OURS for provider in lineup.providers):
        raise AssertionError("; ".join([*lineup.wrong.values(), *lineup.absent.values()]))
    return lineup


def _op_name(rule: str, clips: bool) -> str:
    return f"boundary {rule}{', clip' if clips else ', no clip'}"


def all_cases(device: torch.device, quick: bool) -> list[Case]:
    """The cases of a full or of a quick run."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    found: list[Case] = []

    def given(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = bf16, **options: object) -> Callable[[], Given]:
        return partial(Given, shapes, dtype, device, **options)

    # The slow providers take part where a case is wide.
    add, begin, end = accumulate.steady, accumulate.first, boundary.providers
    wide = not quick
    found.append(Case("accumulate", f"{GPT2}, bf16", given(gpt2_124m(), wide=wide), add, 25, True, 60))
    found.append(Case("first", f"{GPT2}, bf16", given(gpt2_124m(), wide=wide), begin, 12, False, 60))
    block = given(llama_blocks(1))
    found.append(Case("first", f"{ONE_BLOCK}, bf16", block, begin, 6, True))
    for dtype, short in ((fp16, "fp16"), (fp32, "fp32")):
        found.append(Case("accumulate", f"{GPT2}, {short}", given(gpt2_124m(), dtype), add, 12))
        found.append(Case("first", f"{GPT2}, {short}", given(gpt2_124m(), dtype), begin, 8))
    models = ((LLAMA, llama_blocks(2)), (RESNET, resnet50()), (VIT, vit_b()), (GROUPS, many_groups()))
    for name, shapes in models:
        groups = len(shapes) if name == GROUPS else 1
        found.append(Case("accumulate", f"{name}, bf16", given(shapes, n_groups=groups), add, 8))
        found.append(Case("first", f"{name}, bf16", given(shapes, n_groups=groups), begin, 6))
        found.append(
            Case(
                _op_name("AdamW", True),
                f"{name}, bf16",
                given(shapes, n_groups=groups),
                end,
                8,
                name == GROUPS,
            )
        )
    large = given([(2**28,)])
    found.append(Case("accumulate", "one of 2^28, bf16", large, add, 15, bytes_an_element_alive=44))
    found.append(Case("first", "one of 2^28, bf16", large, begin, 12, bytes_an_element_alive=44))
    # 54 bytes an element of three providers: 2^28 of them would be 14 GiB.
    one = given([(2**26,)])
    found.append(Case(_op_name("AdamW", True), "one of 2^26, bf16", one, end, 12, bytes_an_element_alive=80))
    found.append(Case(_op_name("AdamW", True), f"{GPT2}, bf16", given(gpt2_124m(), wide=wide), end, 25, True, 90))
    found.append(Case(_op_name("AdamW", True), f"{GPT2}, fp32", given(gpt2_124m(), fp32), end, 10))
    found.append(Case(_op_name("AdamW", False), f"{GPT2}, bf16", given(gpt2_124m(), clips=False), end, 10))
    for clips in (True, False):
        for name, shapes in ((RESNET, resnet50()), (GPT2, gpt2_124m())):
            sgd = given(shapes, rule="SGD", clips=clips)
            found.append(Case(_op_name("SGD", clips), f"{name}, bf16", sgd, end, 8))
    sgd = given(llama_blocks(1), rule="SGD")
    found.append(Case(_op_name("SGD", True), f"{ONE_BLOCK}, bf16", sgd, end, 6, True))
    for k in (1, 4, 16):
        block = given(llama_blocks(1), micro_batches=k, wide=wide and k == 4)
        found.append(
            Case("window AdamW, clip", f"{ONE_BLOCK}, bf16, K={k}", block, windows.providers, 8 + 2 * k, k == 4, 230)
        )
    sgd = given(resnet50(), rule="SGD", micro_batches=4)
    found.append(Case("window SGD, clip", f"{RESNET}, bf16, K=4", sgd, windows.providers, 10, False, 200))
    tiny = given(many_small())
    for collects in (False, True):
        op = f"host: backward{', gc on' if collects else ''}"
        found.append(Case(op, f"{SMALL}, bf16", tiny, partial(overhead.backward, collect_garbage=collects), 5, True))
    found.append(Case("host: boundary", f"{SMALL}, bf16", tiny, overhead.step, 5, True))
    return [case for case in found if case.quick or not quick] + _sweeps(device, quick)


def _sweeps(device: torch.device, quick: bool) -> list[Case]:
    found = []
    for power in (10, 14, 18, 22, 24) if quick else range(10, 29, 2):
        given = partial(Given, [(2**power,)], torch.bfloat16, device, wide=not quick)
        later, begin = sweep.accumulate, partial(sweep.accumulate, first=True)
        found.append(Case("sweep accumulate", f"2^{power}, bf16", given, later, 3, True, 20))
        found.append(Case("sweep first", f"2^{power}, bf16", given, begin, 3, True, 20))
    # Below 2^16 a boundary is host overhead, which the cases of tiny tensors measure.
    for power in (18, 22) if quick else range(16, 27, 2):
        given = partial(Given, [(2**power,)], torch.bfloat16, device)
        found.append(Case("sweep boundary", f"2^{power}, bf16", given, sweep.step, 3, True, 80))
    return found
