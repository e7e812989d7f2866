"""transformers' Trainer with ``optimizers=(FusedAccumOptimizer(...), scheduler)``: what it trains and what it logs."""

from __future__ import annotations

import itertools
import warnings
from functools import cache, partial

import pytest
import torch
from helpers import assert_same_bits
from models import fp32_sums, norm_of, norm_rtol

from fusedaccum import FusedAccumOptimizer

from .helpers_lm import (
    BF16,
    FP32,
    LOW_RTOL,
    NORM_RTOL,
    Run,
    as_mixed,
    assert_as_mixed,
    assert_near_fp32,
    assert_same_run,
    distance,
    language_model,
    masters,
)
from .helpers_trainer import adamw, logged, new_trainer, train, wrapped

KINDS = ("gpt2", "llama")
MAX_NORM = 0.5  # the norms here are from 1.2 to 4.5: every step is clipped

# Two epochs each; 22 micro-batches in windows of 4 leave one of 2.
SCHEDULES = {
    "1": {"gradient_accumulation_steps": 1, "n_sequences": 12},
    "4": {"gradient_accumulation_steps": 4, "n_sequences": 32},
    "4, then 2": {"gradient_accumulation_steps": 4, "n_sequences": 44},
}
N_STEPS = {"1": 12, "4": 8, "4, then 2": 12}

# Who clips: Trainer's max_grad_norm and the wrapper's.
CLIPS = {"trainer": (MAX_NORM, None), "wrapper": (0.0, MAX_NORM)}


@pytest.fixture
def run(transformers, tmp_path):
    """``train``, with the library and the folder filled in."""
    return partial(train, transformers, tmp_path)


@pytest.fixture(scope="module")
def reference(transformers, tmp_path_factory):
    """Plain AdamW in fp32 (or on fp32 weights below a bf16 forward), clipped by Trainer; each trained once."""

    @cache
    def trained(kind: str, schedule: str, mixed: bool = False) -> Run:
        model = language_model(transformers, kind)
        folder = tmp_path_factory.mktemp("reference")
        options = {"max_grad_norm": MAX_NORM, **SCHEDULES[schedule]}
        return train(transformers, folder, as_mixed(model) if mixed else model, adamw, **options)

    return trained


def fused_clip(base: type) -> type:
    """The Trainer that clips without a pass of its own: three lines of a user's."""

    class FusedClip(base):
        def _clip_grad_norm(self, model):
            return self.optimizer.optimizer.clip_grad_norm_(self.args.max_grad_norm)

    return FusedClip


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_fp32_model_follows_plain_adamw(transformers, run, reference, kind, schedule, clip):
    in_trainer, in_wrapper = CLIPS[clip]
    new = partial(wrapped, max_grad_norm=in_wrapper)
    ours = run(language_model(transformers, kind), new, max_grad_norm=in_trainer, **SCHEDULES[schedule])
    assert ours.n_steps == N_STEPS[schedule]
    assert_same_run(ours, reference(kind, schedule))


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_bf16_model_follows_adamw_on_fp32_weights(transformers, run, reference, kind, schedule, clip):
    in_trainer, in_wrapper = CLIPS[clip]
    new = partial(wrapped, max_grad_norm=in_wrapper)
    ours = run(language_model(transformers, kind, BF16), new, max_grad_norm=in_trainer, **SCHEDULES[schedule])
    assert_as_mixed(ours, reference(kind, schedule, mixed=True))
    assert_near_fp32(ours, reference(kind, schedule))


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_comparison_is_worth(transformers, run, reference, kind):
    """The same bf16 model without the wrapper fails it: its weights do not move by less than their own rounding."""
    naive = run(language_model(transformers, kind, BF16), adamw, max_grad_norm=MAX_NORM)
    plain, mixed = reference(kind, "4, then 2"), reference(kind, "4, then 2", mixed=True)
    assert distance(naive, plain) > 2 * LOW_RTOL
    for check, want in ((assert_same_run, plain), (assert_as_mixed, mixed), (assert_near_fp32, plain)):
        with pytest.raises(AssertionError):
            check(naive, want)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_grad_is_the_exact_sum_and_the_logged_norm_its_norm(transformers, tmp_path, kind, dtype):
    """At every boundary ``.grad`` has the bits of the fp32 sum of the window's gradients, each taken by itself."""
    windows, norms = [], []

    class Recording(transformers.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            params = list(model.parameters())
            loss = self.compute_loss(model, self._prepare_inputs(dict(inputs)), num_items_in_batch=num_items_in_batch)
            window.append(torch.autograd.grad(loss, params))
            return super().training_step(model, inputs, num_items_in_batch)

    class AtBoundary(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            sums = fp32_sums(window)
            for param, want in zip(model.parameters(), sums, strict=True):
                assert_same_bits(param.grad, want)
            windows.append(len(window))
            norms.append(norm_of(sums))
            window.clear()

        def on_optimizer_step(self, args, state, control, **kwargs):
            assert optimizer.grad_norm.item() == pytest.approx(norms[-1], rel=norm_rtol(32))

    window = []
    model = language_model(transformers, kind, dtype)
    optimizer = wrapped(model)
    trainer = new_trainer(
        transformers, tmp_path, model, optimizer, base=Recording, callbacks=[AtBoundary()], max_grad_norm=0.0
    )
    trainer.train()
    assert windows == [4, 4, 4, 4, 4, 2] * 2
    assert logged(trainer, "grad_norm") == pytest.approx(norms, rel=NORM_RTOL)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_logged_norm_that_is_clipped_is_the_norm_before(transformers, run, dtype):
    """All ways to clip report the same norm; plain bf16 training reports one rounded to 8 bits."""
    ways = [(MAX_NORM, None, None), (0.0, MAX_NORM, None), (MAX_NORM, None, fused_clip(transformers.Trainer))]
    norms = [
        run(
            language_model(transformers, "llama", dtype),
            partial(wrapped, max_grad_norm=in_wrapper),
            max_grad_norm=in_trainer,
            base=base,
            max_steps=1,
        ).norms
        for in_trainer, in_wrapper, base in ways
    ]
    assert norms[0][0] > MAX_NORM
    assert norms[1] == pytest.approx(norms[0], rel=NORM_RTOL)
    assert norms[2] == pytest.approx(norms[0], rel=NORM_RTOL)
    if dtype is BF16:
        plain = run(language_model(transformers, "llama", dtype), adamw, max_grad_norm=MAX_NORM, max_steps=1).norms
        assert plain != pytest.approx(norms[0], rel=NORM_RTOL)


@pytest.mark.parametrize(
    ("in_trainer", "in_wrapper", "fused", "n_passes"),
    [(MAX_NORM, None, False, 1), (0.0, MAX_NORM, False, 1), (MAX_NORM, None, True, 0)],
)
def test_what_a_clip_costs(transformers, run, reference, extra_passes, in_trainer, in_wrapper, fused, n_passes):
    """Trainer takes the norm itself to log it, and writes to every gradient even if it is not to clip (a product with
    1.0 where max_grad_norm is 0): one more pass at each boundary. None where its ``_clip_grad_norm`` asks the
    optimizer. The run is the same."""
    base = fused_clip(transformers.Trainer) if fused else None
    new = partial(wrapped, max_grad_norm=in_wrapper)
    ours = run(language_model(transformers, "gpt2"), new, max_grad_norm=in_trainer, base=base)
    assert_same_run(ours, reference("gpt2", "4, then 2"))
    assert len(extra_passes) == n_passes * ours.n_steps


def test_uneven_micro_batches_weigh_by_their_tokens(transformers, run):
    """``num_items_in_batch``: four micro-batches with uneven numbers of tokens are one batch of all their tokens."""
    large = run(
        language_model(transformers, "llama"),
        adamw,
        gradient_accumulation_steps=1,
        per_device_train_batch_size=8,
        n_sequences=32,
    )
    ours = run(language_model(transformers, "llama"), wrapped, n_sequences=32)
    assert_same_run(ours, large)
    low = run(language_model(transformers, "llama", BF16), wrapped, n_sequences=32)
    assert_near_fp32(low, large)

    class MeanOfMeans(transformers.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False

    unweighted = run(language_model(transformers, "llama"), wrapped, n_sequences=32, base=MeanOfMeans)
    with pytest.raises(AssertionError):
        assert_same_run(unweighted, large)


def test_autocast_with_fp32_parameters(transformers, run):
    """``bf16=True``: parameters and gradients are fp32, and the forward rounds the weights, as ``as_mixed`` does."""
    plain = run(language_model(transformers, "gpt2"), adamw, bf16=True)
    assert_as_mixed(run(language_model(transformers, "gpt2"), wrapped, bf16=True), plain)


def test_checkpointing_and_evaluation_change_no_bit(transformers, run, tmp_path):
    """Recomputed activations, and evaluations between the steps."""
    want = run(language_model(transformers, "gpt2", BF16), wrapped)
    got = run(language_model(transformers, "gpt2", BF16), wrapped, activation_checkpointing=True)
    model = language_model(transformers, "gpt2", BF16)
    trainer = new_trainer(transformers, tmp_path, model, wrapped(model), eval_strategy="epoch", n_eval_sequences=4)
    trainer.train()
    assert len(logged(trainer, "eval_loss")) == 2
    evaluated = masters(model, trainer.optimizer)
    for name, weight in want.weights.items():
        assert_same_bits(got.weights[name], weight, name)
        assert_same_bits(evaluated[name], weight, name)


@pytest.mark.parametrize("scheduler", ["inner", "outer", "trainer's own"])
def test_learning_rates(transformers, tmp_path, scheduler):
    """A scheduler on the wrapped or the wrapping optimizer, or one that Trainer makes, moves once a window."""
    model = language_model(transformers, "gpt2")
    optimizer = wrapped(model)
    trainer = new_trainer(transformers, tmp_path, model, optimizer, lr_scheduler_type="linear")
    if scheduler == "trainer's own":
        trainer.lr_scheduler = None
        want = [1e-4 * (12 - step) / 12 for step in range(12)]
    else:
        on = optimizer.inner if scheduler == "inner" else optimizer
        trainer.lr_scheduler = torch.optim.lr_scheduler.StepLR(on, step_size=1, gamma=0.5)
        want = [1e-4 * 0.5**step for step in range(12)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler that seems to run before the optimizer
        trainer.train()
    assert logged(trainer, "learning_rate") == pytest.approx(want, rel=1e-12)


def test_trainers_own_optimizer_wrapped(transformers, tmp_path):
    """What ``create_optimizer`` makes, groups with and without decay, wrapped in an override."""

    def finished(wrap):
        class Wrapping(transformers.Trainer):
            def create_optimizer(self, model=None):
                if self.optimizer is None:
                    plain = super().create_optimizer(model)
                    self.optimizer = FusedAccumOptimizer(plain) if wrap else plain
                return self.optimizer

        model = language_model(transformers, "gpt2")
        start = {name: param.detach().clone() for name, param in model.named_parameters()}
        options = {"weight_decay": 0.1, "learning_rate": 1e-4, "adam_epsilon": 1e-6}
        trainer = new_trainer(transformers, tmp_path, model, None, base=Wrapping, **options)
        trainer.train()
        assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0.0]
        assert isinstance(trainer.optimizer.optimizer, FusedAccumOptimizer) is wrap
        return Run(start, masters(model, trainer.optimizer), logged(trainer, "loss"), logged(trainer, "grad_norm"))

    assert_same_run(finished(True), finished(False))


@pytest.mark.parametrize("clip", CLIPS)
def test_a_window_with_an_inf_is_skipped(transformers, tmp_path, clip):
    """Plain AdamW turns every weight it touches to NaN; here the window changes nothing and the run goes on."""
    in_trainer, in_wrapper = CLIPS[clip]
    bits = []

    class Overflowing(transformers.Trainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            # The second micro-batch of the third window.
            bad = self.model.training and self.state.global_step == 2 and len(self.seen) == 9
            self.seen.append(loss)
            return loss * float("inf") if bad else loss

    class AtStep(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            bits.append(masters(model, optimizer))

    model = language_model(transformers, "llama", BF16)
    optimizer = wrapped(model, max_grad_norm=in_wrapper)
    trainer = new_trainer(
        transformers, tmp_path, model, optimizer, base=Overflowing, callbacks=[AtStep()], max_grad_norm=in_trainer
    )
    trainer.seen = []
    trainer.train()
    finite = torch.tensor(logged(trainer, "grad_norm")).isfinite().tolist()
    assert finite == [i != 2 for i in range(12)]
    moved = [
        any(not torch.equal(before[name], after[name]) for name in before) for before, after in itertools.pairwise(bits)
    ]
    assert moved == [i != 1 for i in range(11)]
    assert {optimizer.state[param]["step"].item() for param in model.parameters()} == {11.0}
    assert all(bool(weight.isfinite().all()) for weight in bits[-1].values())
