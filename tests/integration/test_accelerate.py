"""Accelerate's training loop, in which it decides the boundaries, around the optimizer."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers import assert_same_bits
from models import assert_unmoved, snapshot

import fusedaccum
from fusedaccum import FusedAccumOptimizer

from .helpers_lm import (
    BF16,
    EPS,
    FP32,
    Run,
    as_mixed,
    assert_as_mixed,
    assert_near_fp32,
    assert_same_run,
    language_model,
    masters,
    sequences,
)

MAX_NORM = 0.5
FP16 = torch.float16
N_BATCHES = 11  # an epoch; windows of 4, 4 and 3
WINDOWS = [False, False, False, True] * 2 + [False, False, True]


@pytest.fixture
def new_accelerator(accelerate):
    """Accelerators for windows of 4. Their state is one for the process: it is reset around the test."""

    def new(**options):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4, **options)

    yield new
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


SCALERS = [torch.amp.GradScaler, fusedaccum.GradScaler]


def with_fp16_scaler(accelerator, scaler=torch.amp.GradScaler, init_scale: float = 2.0**10):
    """Accelerate makes a scaler for GPUs only; on the CPU "fp16" leaves it out without a word. This puts it in, so that
    the same code of Accelerate's runs as on a GPU."""
    assert accelerator.mixed_precision == "fp16"
    accelerator.native_amp = True
    accelerator.scaler = scaler("cpu", init_scale=init_scale, growth_interval=1000)
    return accelerator


class Loop:
    """The loop of Accelerate's own examples, prepared.

    Args:
        clip: who clips: "accelerate", "fused" (``clip_grad_norm_`` of the optimizer), "wrapper" or None.
    """

    def __init__(self, accelerator, model, wrap: bool, clip: str | None = None, on_inner: bool = False) -> None:
        self.accelerator, self.clip = accelerator, clip
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=EPS)
        if wrap:
            optimizer = FusedAccumOptimizer(optimizer, max_grad_norm=MAX_NORM if clip == "wrapper" else None)
        scheduled = optimizer.inner if on_inner else optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(scheduled, step_size=1, gamma=0.5)
        loader = torch.utils.data.DataLoader(sequences(2 * N_BATCHES), batch_size=2)
        self.bare = optimizer
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.run = Run(start=masters(model, optimizer))
        self.synced: list[bool] = []
        self.skipped: list[bool] = []
        self.rates: list[float] = []
        self._window_loss = 0.0

    def epoch(self, spoil: tuple[int, ...] = (), skip: int = 0, stop: int = N_BATCHES) -> None:
        """One pass over the data but for the first ``skip`` micro-batches; those in ``spoil`` have an infinite loss."""
        loader = self.accelerator.skip_first_batches(self.loader, skip) if skip else self.loader
        for i, batch in enumerate(loader, start=skip):
            if i == stop:
                break
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self._window_loss += loss.item() / 4
                self.accelerator.backward(loss * float("inf") if i in spoil else loss)
                self.synced.append(self.accelerator.sync_gradients)
                if self.accelerator.sync_gradients:
                    self._clip()
                self.optimizer.step()
                if self.accelerator.sync_gradients and self.clip == "wrapper":
                    self.run.norms.append(self.bare.grad_norm.item())
                self.skipped.append(self.accelerator.optimizer_step_was_skipped)
                if self.accelerator.sync_gradients:
                    self.run.losses.append(self._window_loss)
                    self.rates.append(self.optimizer.param_groups[0]["lr"])
                    self._window_loss = 0.0
                self.scheduler.step()
                self.optimizer.zero_grad()
        self.run.weights = masters(self.accelerator.unwrap_model(self.model), self.bare)

    def _clip(self) -> None:
        if self.clip == "accelerate":
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        elif self.clip == "fused":
            self.accelerator.unscale_gradients(self.optimizer)  # nothing without a scaler
            norm = self.bare.clip_grad_norm_(MAX_NORM)
        else:
            return
        self.run.norms.append(norm.item())

    def two_epochs(self) -> Run:
        """Two passes over the data, the scheduler's warnings being errors."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.epoch()
            self.epoch()
        assert self.synced == WINDOWS * 2
        assert self.rates == [1e-4 * 0.5**step for step in range(6)]
        return self.run


@pytest.mark.parametrize("clip", ["accelerate", "fused", "wrapper"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_accumulate_and_clip(transformers, new_accelerator, extra_passes, kind, clip):
    """fp32 follows plain AdamW, bf16 AdamW on fp32 weights; Accelerate's clip costs one pass, the others none."""
    plain = Loop(new_accelerator(), language_model(transformers, kind), wrap=False, clip="accelerate").two_epochs()
    mixed = as_mixed(language_model(transformers, kind))
    mixed = Loop(new_accelerator(), mixed, wrap=False, clip="accelerate").two_epochs()
    assert min(plain.norms) > MAX_NORM
    for dtype in (FP32, BF16):
        extra_passes.clear()
        loop = Loop(new_accelerator(), language_model(transformers, kind, dtype), wrap=True, clip=clip)
        run = loop.two_epochs()
        assert len(extra_passes) == (6 if clip == "accelerate" else 0)
        if dtype is FP32:
            assert_same_run(run, plain)
        else:
            assert_as_mixed(run, mixed)
            assert_near_fp32(run, plain)


def test_clip_grad_value(transformers, new_accelerator, monkeypatch):
    """By value, which has no fused form: torch's own function, and the optimizer notices."""

    def clip(self):
        self.accelerator.clip_grad_value_(self.model.parameters(), 1e-3)

    monkeypatch.setattr(Loop, "_clip", clip)
    plain = Loop(new_accelerator(), language_model(transformers, "llama"), wrap=False).two_epochs()
    assert_same_run(Loop(new_accelerator(), language_model(transformers, "llama"), wrap=True).two_epochs(), plain)


@pytest.mark.parametrize("on_inner", [False, True])
def test_prepare_leaves_everything_as_it_is(transformers, new_accelerator, on_inner):
    """``prepare`` does ``load_state_dict(state_dict())``, before the first step and also after it."""
    accelerator = new_accelerator()
    model = language_model(transformers, "gpt2", BF16)
    loop = Loop(accelerator, model, wrap=True, on_inner=on_inner)
    assert loop.optimizer.optimizer is loop.bare
    assert loop.optimizer.param_groups is loop.bare.inner.param_groups
    assert not loop.bare.state
    loop.epoch()
    assert loop.rates == [1e-4, 5e-5, 2.5e-5]
    before = snapshot(loop.bare)
    again = new_accelerator().prepare_optimizer(loop.bare)
    assert_unmoved(before, snapshot(loop.bare))
    assert again.state is loop.bare.inner.state


# Inside an epoch without dropout: iter() of the loader draws from the random state, which load_state has just restored.
@pytest.mark.parametrize(("saved_at", "dropout"), [(8, 0.0), (N_BATCHES, 0.1)])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_load_state_resumes_with_the_same_bits(transformers, new_accelerator, tmp_path, dtype, saved_at, dropout):
    """``save_state``, ``load_state`` into new objects, ``skip_first_batches``."""

    def new_loop():
        model = language_model(transformers, "gpt2", dtype, dropout)
        return Loop(new_accelerator(), model, wrap=True, clip="accelerate")

    whole = new_loop()
    whole.epoch()
    whole.epoch()
    first = new_loop()
    first.epoch(stop=saved_at)
    first.accelerator.save_state(str(tmp_path))
    resumed = new_loop()
    with torch.no_grad():
        for param in resumed.model.parameters():
            param.fill_(0.5)
    resumed.accelerator.load_state(str(tmp_path))
    if saved_at < N_BATCHES:
        resumed.epoch(skip=saved_at)
    resumed.epoch()
    assert first.run.losses + resumed.run.losses == whole.run.losses
    assert first.run.norms + resumed.run.norms == whole.run.norms
    assert first.rates + resumed.rates == whole.rates
    for name, weight in whole.run.weights.items():
        assert_same_bits(resumed.run.weights[name], weight, name)
    for got, want in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert_same_bits(got.detach(), want.detach())
        assert ("master_param" in resumed.bare.state[got]) is (dtype is BF16)
        for name, value in whole.bare.state[want].items():
            assert value.dtype is FP32
            assert_same_bits(resumed.bare.state[got][name], value, name)


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("clip", ["accelerate", "fused", "wrapper"])
def test_fp16_with_a_scaler(transformers, new_accelerator, clip, scaler):
    """fp32 parameters below autocast, and fp16 parameters, whose gradients a plain optimizer cannot have unscaled."""

    def run(model, wrap):
        accelerator = with_fp16_scaler(new_accelerator(mixed_precision="fp16"), scaler)
        return Loop(accelerator, model, wrap, clip if wrap else "accelerate").two_epochs()

    plain = run(language_model(transformers, "llama"), wrap=False)
    assert_as_mixed(run(language_model(transformers, "llama"), wrap=True), plain)

    mixed = run(as_mixed(language_model(transformers, "llama"), FP16), wrap=False)
    assert_as_mixed(run(language_model(transformers, "llama", FP16), wrap=True), mixed)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        run(language_model(transformers, "llama", FP16), wrap=False)


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("clip", ["accelerate", "fused", "wrapper", None])
@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_an_overflow_skips_the_window(transformers, new_accelerator, dtype, clip, scaler):
    """Micro-batch 5 is infinite: the second window changes nothing, and neither scheduler nor count moves."""
    accelerator = with_fp16_scaler(new_accelerator(mixed_precision="fp16"), scaler)
    loop = Loop(accelerator, language_model(transformers, "llama", dtype), wrap=True, clip=clip)
    loop.epoch(stop=4)
    before = snapshot(loop.bare)
    loop.epoch(spoil=(5,), skip=4, stop=8)
    assert_unmoved(before, snapshot(loop.bare))
    assert loop.skipped == [False] * 7 + [True]
    assert accelerator.scaler.get_scale() == 2.0**9
    assert loop.rates == [1e-4, 5e-5]
    loop.epoch(skip=8)
    assert loop.skipped[-3:] == [True, True, False]  # of the last boundary, so true until the next one
    assert loop.rates == [1e-4, 5e-5, 5e-5]
    counts = {held["step"].item() for held in loop.bare.state.values()}
    assert counts == {2.0}
    # The window after it is that of a run which never saw the second one.
    other = with_fp16_scaler(new_accelerator(mixed_precision="fp16"), scaler)
    other = Loop(other, language_model(transformers, "llama", dtype), wrap=True, clip=clip)
    other.epoch(stop=4)
    other.accelerator.scaler.update(2.0**9)
    other.epoch(skip=8)
    for name, weight in other.run.weights.items():
        assert_same_bits(loop.run.weights[name], weight, name)
