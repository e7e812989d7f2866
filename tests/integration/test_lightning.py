"""Lightning's Trainer around the optimizer: automatic and manual optimization, clipping, precisions, checkpoints."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from helpers import assert_same_bits
from models import assert_unmoved, norm_of, norm_rtol, snapshot

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
    assert_same_weights,
    batches,
    language_model,
    masters,
    sequences,
)

MAX_NORM = 0.5
N_BATCHES = 11  # an epoch; windows of 4, 4 and 3, each divided by 4: Lightning's rule


@pytest.fixture
def new_task(transformers, lightning):
    """Makes LightningModules around a language model."""

    class Task(lightning.pytorch.LightningModule):
        """
        Args:
            clip: "lightning" (its clip_gradients, automatically or by hand), "fused" (``clip_grad_norm_`` of the
                optimizer), "wrapper" (``max_grad_norm``) or None.
            spoil: batches (counted over epochs) with an infinite loss.
            options: of the wrapper.
        """

        def __init__(self, model, wrap, clip=None, manual=False, spoil=(), **options):
            super().__init__()
            self.model, self.wrap, self.clip, self.spoil, self.options = model, wrap, clip, spoil, options
            self.automatic_optimization = not manual
            self.n_seen = 0
            self.window_loss = 0.0
            self.rates = []
            self.after_steps = []  # snapshots

        def configure_optimizers(self):
            plain = torch.optim.AdamW(self.model.parameters(), lr=1e-4, eps=EPS)
            self.bare = plain
            if self.wrap:
                max_norm = MAX_NORM if self.clip == "wrapper" else None
                self.bare = FusedAccumOptimizer(plain, max_grad_norm=max_norm, **self.options)
            self.run = Run(start=masters(self.model, self.bare))
            scheduler = torch.optim.lr_scheduler.StepLR(self.bare, step_size=1, gamma=0.5)
            return {"optimizer": self.bare, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def training_step(self, batch, batch_idx):
            loss = self.model(**batch).loss
            self.window_loss += loss.item() / 4
            ends = batch_idx % 4 == 3 or batch_idx == N_BATCHES - 1
            if ends:
                self.run.losses.append(self.window_loss)
                self.window_loss = 0.0
            if self.n_seen in self.spoil:
                loss = loss * float("inf")
            self.n_seen += 1
            if not self.automatic_optimization:
                self.by_hand(loss / 4, ends)
            return loss

        def by_hand(self, loss, ends):
            optimizer = self.optimizers()
            self.manual_backward(loss)
            if ends:
                if self.clip == "lightning":
                    self.note_norm()
                    self.clip_gradients(optimizer, MAX_NORM, "norm")
                elif self.clip == "fused":
                    self.run.norms.append(optimizer.clip_grad_norm_(MAX_NORM).item())
                optimizer.step()
                if self.clip == "wrapper":
                    self.run.norms.append(optimizer.grad_norm.item())
                self.rates.append(optimizer.param_groups[0]["lr"])
                self.lr_schedulers().step()
                optimizer.zero_grad()

        def note_norm(self):
            self.run.norms.append(norm_of(param.grad for param in self.model.parameters()))

        def on_before_optimizer_step(self, optimizer):
            if self.automatic_optimization:
                self.note_norm()
                self.rates.append(optimizer.param_groups[0]["lr"])

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            if self.clip == "fused":
                norm = optimizer.clip_grad_norm_(MAX_NORM).item()
                want = self.run.norms[-1]
                assert (
                    norm == pytest.approx(want, rel=norm_rtol(32)) if math.isfinite(want) else not math.isfinite(norm)
                )
            elif self.clip == "lightning":
                self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.after_steps.append(snapshot(self.bare))

        def on_train_end(self):
            self.run.weights = masters(self.model, self.bare)

    return Task


@pytest.fixture
def fit(lightning, tmp_path):
    """Trains a task and returns what came of it."""

    def fitted(task, checkpoint=None, **options):
        automatic = task.automatic_optimization
        defaults = {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 2,
            "accumulate_grad_batches": 4 if automatic else 1,
            "gradient_clip_val": MAX_NORM if automatic and task.clip == "lightning" else None,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": tmp_path,
        }
        with warnings.catch_warnings():
            # A scheduler that seems to run before the optimizer; a window that is lost.
            warnings.filterwarnings("error", message=".*(lr_scheduler|fusedaccum)")
            trainer = lightning.pytorch.Trainer(**{**defaults, **options})
            loader = torch.utils.data.DataLoader(sequences(2 * N_BATCHES), batch_size=2)
            trainer.fit(task, loader, ckpt_path=checkpoint, weights_only=True)
        assert trainer.global_step == 6 or task.options
        return task.run

    return fitted


def with_fp16_scaler(lightning):
    """Lightning turns "16-mixed" into "bf16-mixed" on a CPU; this is the plugin that it takes on a GPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    return [lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)]


@pytest.mark.parametrize("clip", ["lightning", "fused", "wrapper"])
@pytest.mark.parametrize("manual", [False, True])
def test_fp32_follows_plain_adamw(transformers, new_task, fit, extra_passes, manual, clip):
    """accumulate_grad_batches or a loop by hand; Lightning's clip costs one pass, the others none."""
    plain = fit(new_task(language_model(transformers, "llama"), wrap=False, clip="lightning"))
    assert min(plain.norms) > MAX_NORM
    task = new_task(language_model(transformers, "llama"), wrap=True, clip=clip, manual=manual)
    assert_same_run(fit(task), plain)
    assert task.rates == [1e-4 * 0.5**step for step in range(6)]
    assert len(extra_passes) == (6 if clip == "lightning" else 0)


@pytest.mark.parametrize("clip", ["lightning", "fused", "wrapper"])
@pytest.mark.parametrize("manual", [False, True])
def test_bf16_true_follows_adamw_on_fp32_weights(transformers, new_task, fit, manual, clip):
    """In manual optimization the optimizer runs inside ``training_step``, where Lightning has made bfloat16 torch's
    default dtype."""
    plain = fit(new_task(language_model(transformers, "gpt2"), wrap=False, clip="lightning"))
    mixed = fit(new_task(as_mixed(language_model(transformers, "gpt2")), wrap=False, clip="lightning"))
    for backend in ("native", "reference"):
        task = new_task(language_model(transformers, "gpt2"), True, clip, manual, backend=backend)
        low = fit(task, precision="bf16-true")
        assert {param.dtype for param in task.model.parameters()} == {BF16}
        assert_as_mixed(low, mixed)
        assert_near_fp32(low, plain)
        assert all(value.dtype is FP32 for held in task.bare.state.values() for value in held.values())
    naive = fit(new_task(language_model(transformers, "gpt2"), wrap=False, clip="lightning"), precision="bf16-true")
    with pytest.raises(AssertionError):
        assert_near_fp32(naive, plain)


def test_every_batch_a_window(transformers, new_task, fit):
    """accumulate_grad_batches=1, in which Lightning passes the forward and backward to ``step`` as a closure."""
    runs = []
    for wrap in (False, True):
        task = new_task(language_model(transformers, "llama"), wrap, clip="lightning")
        runs.append(fit(task, accumulate_grad_batches=1, max_steps=6))
        assert task.rates == [1e-4 * 0.5**step for step in range(6)]
        # The losses above are those of windows of 4.
        runs[-1].losses = runs[-1].losses[:1] * 6
    assert_same_run(runs[1], runs[0])


# In manual optimization Lightning unscales in optimizer.step(), after a clip by hand, whatever the optimizer. The
# wrapper's own clip is of unscaled gradients there too.
@pytest.mark.parametrize(
    ("manual", "clip"), [(False, "lightning"), (False, "fused"), (False, "wrapper"), (True, "wrapper")]
)
def test_fp16_mixed_with_its_scaler(transformers, lightning, new_task, fit, manual, clip):
    """Unscaled once, clipped after that, in the arithmetic of plain AdamW below the same autocast and scaler."""
    plain = new_task(language_model(transformers, "llama"), wrap=False, clip="lightning")
    plain = fit(plain, plugins=with_fp16_scaler(lightning))
    task = new_task(language_model(transformers, "llama"), True, clip, manual)
    assert_as_mixed(fit(task, plugins=with_fp16_scaler(lightning)), plain)


def test_bf16_mixed(transformers, new_task, fit):
    """fp32 parameters below autocast."""
    plain = fit(new_task(language_model(transformers, "llama"), False, "lightning"), precision="bf16-mixed")
    task = new_task(language_model(transformers, "llama"), True, "lightning")
    assert_as_mixed(fit(task, precision="bf16-mixed"), plain)


@pytest.mark.parametrize("clip", ["lightning", "fused", "wrapper", None])
@pytest.mark.parametrize("scaled", [True, False])
def test_an_overflow_skips_the_window(transformers, lightning, new_task, fit, clip, scaled):
    """Batch 5 is infinite: the second window changes nothing, with a scaler and without one."""
    task = new_task(language_model(transformers, "llama"), wrap=True, clip=clip, spoil=(5,))
    options = {"plugins": with_fp16_scaler(lightning)} if scaled else {"precision": "bf16-true"}
    run = fit(task, **options)
    assert_unmoved(task.after_steps[3], task.after_steps[7])
    assert not torch.equal(task.after_steps[7][0][0], task.after_steps[10][0][0])
    assert {held["step"].item() for held in task.bare.state.values()} == {5.0}
    assert all(bool(weight.isfinite().all()) for weight in run.weights.values())


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("manual", [False, True])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    transformers, lightning, new_task, fit, tmp_path, manual, precision
):
    """``ModelCheckpoint`` after the first epoch, ``ckpt_path`` into new objects, loaded with weights_only=True."""

    def new():
        return new_task(language_model(transformers, "gpt2"), True, "lightning", manual)

    saver = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    whole = new()
    want = fit(whole, enable_checkpointing=True, callbacks=[saver], precision=precision)
    resumed = new()
    with torch.no_grad():
        for param in resumed.model.parameters():
            param.fill_(0.5)
    got = fit(resumed, checkpoint=str(tmp_path / "epoch=0.ckpt"), precision=precision)
    assert got.losses == want.losses[3:]
    assert got.norms == want.norms[3:]
    assert resumed.rates == whole.rates[3:]
    for name, weight in want.weights.items():
        assert_same_bits(got.weights[name], weight, name)
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert_same_bits(ours.detach(), theirs.detach())
        held = resumed.bare.state[ours]
        assert ("master_param" in held) is (precision == "bf16-true")
        for name, value in whole.bare.state[theirs].items():
            assert_same_bits(held[name], value, name)


def test_what_the_module_is_given_behaves_as_the_optimizer(transformers, new_task, fit):
    """``self.optimizers()``: Lightning makes a subclass of ours that has none of its state, only its methods."""
    seen = []

    def by_hand(loss, ends):
        optimizer = task.optimizers()
        task.manual_backward(loss)
        optimizer.step()
        assert isinstance(optimizer, FusedAccumOptimizer)
        assert optimizer.param_groups is task.bare.param_groups
        assert optimizer.state is task.bare.state
        seen.append(optimizer.stepped)
        assert optimizer.found_inf.item() == 0
        optimizer.zero_grad()
        if task.n_seen == N_BATCHES:
            assert optimizer.flush()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()

    task = new_task(language_model(transformers, "llama"), True, manual=True, accumulation_steps=4)
    task.by_hand = by_hand
    fit(task, max_epochs=1)
    assert seen == [False, False, False, True] * 2 + [False] * 3
    assert {held["step"].item() for held in task.bare.state.values()} == {3.0}


def test_the_wrappers_own_window_divides_a_short_one_by_its_count(transformers, new_task, fit):
    """Lightning's accumulate_grad_batches divides the window of 3 by 4 (Lightning 19987). With accumulation_steps=4
    here and none there, and ``flush`` at the end of the epoch, it is divided by 3."""
    task = new_task(language_model(transformers, "llama"), True, accumulation_steps=4)
    task.on_train_epoch_end = lambda: task.bare.flush()
    task.lr_scheduler_step = lambda *args: None
    fit(task, max_epochs=2, accumulate_grad_batches=1)

    model = language_model(transformers, "llama")
    plain = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=EPS)
    want = Run(start=masters(model, plain))
    for _ in range(2):
        for window in (batches(N_BATCHES)[:4], batches(N_BATCHES)[4:8], batches(N_BATCHES)[8:]):
            for batch in window:
                (model(**batch).loss / len(window)).backward()
            plain.step()
            plain.zero_grad()
    want.weights = masters(model, plain)
    assert {held["step"].item() for held in task.bare.state.values()} == {6.0}
    assert_same_weights(task.run, want, n_steps=6)
