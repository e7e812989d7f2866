"""``from_deepspeed_config``: what it reads, what it makes of it, and what it refuses by name."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
from helpers import assert_same_bits
from models import assert_unmoved, fp32_sums, inputs, loss_of, micro_grads, mlp, run_window, snapshot
from torch import nn

from fusedaccum import FusedAccumOptimizer, LossScale, from_deepspeed_config
from fusedaccum.deepspeed import loss_scale_of

BATCH, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def _adamw(dtype=torch.float32):
    return torch.optim.AdamW(mlp(dtype).named_parameters(), lr=1e-2)


@pytest.mark.parametrize("through", ["dict", "path", "str"])
def test_it_trains_as_the_wrapper_written_by_hand(backend_name, tmp_path, through):
    """The same bits, over windows of 4 and a clip that acts."""
    config = {
        BATCH: 20,
        MICRO: 5,
        "gradient_clipping": 0.05,
        "bf16": {"enabled": True, "check_grad_overflow": False, "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 0, "allgather_bucket_size": 5e8},
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
    }
    given = copy.deepcopy(config)
    if through != "dict":
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps(config))
        given = path if through == "path" else str(path)
    model = mlp(torch.bfloat16)
    twin = copy.deepcopy(model)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = from_deepspeed_config(given, inner, backend=backend_name)
    assert type(optimizer) is FusedAccumOptimizer
    assert optimizer.inner is inner
    by_hand = FusedAccumOptimizer(
        torch.optim.AdamW(twin.parameters(), lr=1e-2), accumulation_steps=4, max_grad_norm=0.05, backend=backend_name
    )
    for _ in range(3):
        batches = inputs(4, torch.bfloat16)
        for each, opt in ((model, optimizer), (twin, by_hand)):
            run_window(each, opt, batches)
            assert opt.stepped
            opt.zero_grad()
        assert optimizer.grad_norm.item() > 0.05
    assert_unmoved(snapshot(by_hand), snapshot(optimizer))
    if through == "dict":
        assert given == config  # read, not edited


def test_the_gradient_is_the_windows_mean(backend_name):
    """A DeepSpeed engine divides the loss by the steps itself; so does the wrapper, and the loop must not."""
    model = mlp()
    optimizer = from_deepspeed_config({STEPS: 4}, torch.optim.SGD(model.parameters(), lr=0.0), backend=backend_name)
    batches = inputs(4)
    sums = fp32_sums(micro_grads(model, batches), 0.25)
    run_window(model, optimizer, batches)
    for param, want in zip(model.parameters(), sums, strict=True):
        assert_same_bits(param.grad, want)


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({STEPS: 3}, 3),
        ({BATCH: 12}, 1),
        ({MICRO: 12}, 1),
        ({BATCH: 12, MICRO: 4}, 3),
        ({BATCH: 12, STEPS: 6}, 6),
        ({MICRO: 2, STEPS: 5}, 5),
        ({BATCH: 10, MICRO: 2, STEPS: 5}, 5),
        ({STEPS: 2, "managed_gradient_accumulation": True}, 2),
        ({STEPS: 2, BATCH: None}, 2),
    ],
)
def test_two_batch_sizes_give_the_third(config, steps):
    optimizer = from_deepspeed_config(config, _adamw())
    assert optimizer.accumulation_steps == steps
    assert optimizer.max_grad_norm is None


@pytest.mark.parametrize(
    ("clipping", "max_norm"), [({}, None), ({"gradient_clipping": 0}, None), ({"gradient_clipping": 2.5}, 2.5)]
)
def test_clipping(clipping, max_norm):
    """0 is DeepSpeed's word for no clipping; as ``max_grad_norm`` it would stop the training."""
    assert from_deepspeed_config({STEPS: 1, **clipping}, _adamw()).max_grad_norm == max_norm


def test_overrides_answer_for_what_the_config_leaves_open(backend_name):
    config = {STEPS: "auto", BATCH: "auto", MICRO: "auto", "gradient_clipping": "auto"}
    optimizer = from_deepspeed_config(
        config,
        _adamw(torch.bfloat16),
        accumulation_steps=None,
        max_grad_norm=3.0,
        backend=backend_name,
        bucket_bytes=77,
    )
    assert optimizer.accumulation_steps is None
    assert optimizer.max_grad_norm == 3.0
    assert optimizer._options["backend"] == backend_name
    assert optimizer._options["bucket_bytes"] == 77
    assert from_deepspeed_config({STEPS: 2}, _adamw(), max_grad_norm=None).max_grad_norm is None
    with pytest.raises(TypeError, match="unexpected keyword argument 'clip'"):
        from_deepspeed_config({STEPS: 2}, _adamw(), clip=1)


OFF = [
    {"fp16": {"enabled": False, "loss_scale": 7, "hysteresis": 3}},
    {"fp16": {}, "bf16": {}},
    {"bfloat16": {"enabled": False}},
    {"zero_optimization": False},
    {"zero_optimization": {}},
    {"amp": {"enabled": False, "opt_level": "O1"}, "torch_autocast": {"enabled": False}},
    {"tensor_parallel": {"autotp_size": 0}, "compile": {"deepcompile": False}, "elasticity": {"enabled": False}},
    {"dataloader_drop_last": False, "sparse_attention": None, "pipeline": {}, "data_types": {"param_dtype": None}},
    {"curriculum_learning": {"enabled": False}, "flops_profiler": {"enabled": True}, "tensorboard": {"enabled": True}},
    {"prescale_gradients": True, "gradient_predivide_factor": 2.0, "communication_data_type": "fp16"},
]


@pytest.mark.parametrize("block", OFF, ids=str)
def test_what_is_off_or_changes_no_result_is_accepted(block):
    assert from_deepspeed_config({STEPS: 2, **block}, _adamw()).accumulation_steps == 2


REFUSED = [
    ({}, "config has none of train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps"),
    ({STEPS: 0}, "gradient_accumulation_steps is 0; accepted: an integer of at least 1"),
    ({STEPS: 2.0}, "gradient_accumulation_steps is 2.0; accepted"),
    ({BATCH: True}, "train_batch_size is True; accepted"),
    ({STEPS: "auto"}, 'gradient_accumulation_steps is "auto", which only an integration that fills it in'),
    ({STEPS: 4, MICRO: "auto"}, 'train_micro_batch_size_per_gpu is "auto"'),
    ({BATCH: 32, MICRO: 4, STEPS: 4}, "train_batch_size is 32, and does not fit train_micro_batch_size_per_gpu 4 and"),
    (
        {BATCH: 10, MICRO: 4},
        "train_batch_size is 10, and does not fit train_micro_batch_size_per_gpu 4; accepted: micro",
    ),
    ({BATCH: 4, MICRO: 8}, "train_batch_size is 4, and does not fit"),
    ({BATCH: 10, STEPS: 4}, "train_batch_size is 10, and does not fit gradient_accumulation_steps 4;"),
    ({STEPS: 4, "managed_gradient_accumulation": False}, "managed_gradient_accumulation is false; accepted: true"),
    ({STEPS: 1, "gradient_clipping": -1.0}, "gradient_clipping is -1.0; accepted: a finite number of at least 0"),
    ({STEPS: 1, "gradient_clipping": "auto"}, 'gradient_clipping is "auto"'),
    ({STEPS: 1, "gradient_clipping": float("nan")}, "gradient_clipping is nan"),
    ({STEPS: 1, "zero_optimization": {"stage": 2}}, "zero_optimization.stage is 2; accepted: 0"),
    ({STEPS: 1, "zero_optimization": {"stage": "auto"}}, "zero_optimization.stage is 'auto'"),
    ({STEPS: 1, "zero_optimization": True}, "zero_optimization.stage is 1; accepted: 0"),
    ({STEPS: 1, "zero_optimization": 3}, "zero_optimization is 3; accepted: an object"),
    ({STEPS: 1, "optimizer": {"type": "AdamW"}}, "optimizer cannot be honoured, its value is {'type': 'AdamW'}"),
    ({STEPS: 1, "scheduler": {"type": "WarmupLR"}}, "scheduler cannot be honoured"),
    ({STEPS: 1, "amp": {"enabled": True}}, "amp cannot be honoured"),
    ({STEPS: 1, "amp": {"enabled": "auto"}}, "amp cannot be honoured"),
    ({STEPS: 1, "torch_autocast": {"enabled": True}}, "torch_autocast cannot be honoured"),
    ({STEPS: 1, "progressive_layer_drop": {"enabled": True}}, "progressive_layer_drop cannot be honoured"),
    ({STEPS: 1, "tensor_parallel": {"autotp_size": 2}}, "tensor_parallel cannot be honoured"),
    ({STEPS: 1, "sparse_attention": {"mode": "fixed"}}, "sparse_attention cannot be honoured"),
    ({STEPS: 1, "dataloader_drop_last": True}, "Pass drop_last=True to your DataLoader"),
    ({STEPS: 1, "gradient_acumulation_steps": 4}, "'gradient_acumulation_steps' is not known, and might change"),
    ({STEPS: 1, "data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype is 'bf16'; accepted: 'fp32'"),
    ({STEPS: 1, "data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype is 'bf16'"),
    ({STEPS: 1, "bf16": True}, "bf16 is True; accepted: an object"),
    ({STEPS: 1, "bf16": {"enabled": "auto"}}, 'bf16.enabled is "auto"'),
    ({STEPS: 1, "bf16": {"enabled": 1}}, "bf16.enabled is 1; accepted: true, false"),
    (
        {STEPS: 1, "bf16": {"enabled": True}},
        "bf16.enabled is true, but param_groups[0]['params'][0] (0.weight) has dtype",
    ),
    ({STEPS: 1, "bfloat16": {"enabled": True}}, "bfloat16.enabled is true, but"),
    ({STEPS: 1, "bf16": {"master": True}}, "bf16.master is not known; accepted: bf16_master_weights_and_grads"),
    ({STEPS: 1, "bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states is true"),
    (
        {STEPS: 1, "fp16": {"enabled": True}},
        "fp16.enabled is true, but param_groups[0]['params'][0] (0.weight) has dtype",
    ),
    (
        {STEPS: 1, "fp16": {"enabled": True, "auto_cast": True}},
        "fp16.auto_cast is true; accepted: false, cast the inputs",
    ),
    ({STEPS: 1, "fp16": {"enabled": False, "scale": 1}}, "fp16.scale is not known; accepted: auto_cast"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_honoured_is_refused_by_name(config, message):
    """And the parameters stay plain torch's."""
    model = mlp()
    inner = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    with pytest.raises(ValueError, match=re.escape(message)):
        from_deepspeed_config(config, inner)
    loss_of(model, inputs(1)[0]).backward()
    assert model[0].weight.grad_dtype is torch.float32
    FusedAccumOptimizer(inner)


def test_16_bit_blocks_want_parameters_of_their_dtype():
    """One that differs is named; a frozen integer tensor does not matter."""
    model = mlp(torch.bfloat16)
    model[2].float()
    inner = torch.optim.SGD(model.named_parameters(), lr=1.0)
    with pytest.raises(
        ValueError, match=re.escape("param_groups[0]['params'][2] (2.weight) has dtype float32; accepted")
    ):
        from_deepspeed_config({STEPS: 1, "bf16": {"enabled": True}}, inner)
    model[2].bfloat16()
    inner.add_param_group({"params": [("ids", nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False))]})
    assert from_deepspeed_config({STEPS: 1, "bf16": {"enabled": True}}, inner).accumulation_steps == 1


def test_both_precisions_are_refused():
    for key in ("bf16", "bfloat16"):
        with pytest.raises(ValueError, match=rf"fp16\.enabled and {key}\.enabled are both true"):
            from_deepspeed_config({STEPS: 1, key: {"enabled": True}, "fp16": {"enabled": True}}, _adamw())


def test_files(tmp_path):
    path = tmp_path / "ds.json"
    with pytest.raises(FileNotFoundError):
        from_deepspeed_config(path, _adamw())
    for text, error, message in (
        ('{"train_batch_size": 4,}', ValueError, "is not JSON: "),
        ("[1]", TypeError, "holds a list; accepted: an object"),
        ('{"fp16": {"enabled": false, "enabled": true}}', ValueError, "config has the key 'enabled' twice"),
    ):
        path.write_text(text)
        with pytest.raises(error, match=message):
            from_deepspeed_config(path, _adamw())
    with pytest.raises(TypeError, match="config is a int; accepted: a dict, or the path of a JSON file"):
        from_deepspeed_config(3, _adamw())
    with pytest.raises(TypeError, match="optimizer is a Sequential"):
        from_deepspeed_config({STEPS: 1, "bf16": {"enabled": True}}, mlp(torch.bfloat16))


# Loss scale ------------------------------------------------------------------------------------------------------


def _dynamic(init_scale, growth_interval):
    return LossScale(init_scale, 2.0, 0.5, growth_interval)


@pytest.mark.parametrize(
    ("fp16", "want"),
    [
        ({"loss_scale": 128}, 128),
        ({"loss_scale": 0.5, "hysteresis": 4}, 0.5),  # a fixed scale has no hysteresis
        ({"hysteresis": 1}, _dynamic(65536.0, 1000)),
        ({"loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 50, "hysteresis": 1}, _dynamic(256.0, 50)),
        ({"hysteresis": 1, "consecutive_hysteresis": True, "min_loss_scale": 0}, _dynamic(65536.0, 1000)),
        ({"hysteresis": 1, "initial_scale_power": 0, "min_loss_scale": 0.25}, _dynamic(1.0, 1000)),
    ],
)
def test_loss_scale(fp16, want):
    assert loss_scale_of({"enabled": True, **fp16}) == want
    scale = want.init_scale if isinstance(want, LossScale) else want
    optimizer = from_deepspeed_config({STEPS: 1, "fp16": {"enabled": True, **fp16}}, _adamw(torch.float16))
    assert optimizer.loss_scale.item() == scale


@pytest.mark.parametrize(
    ("fp16", "message"),
    [
        ({}, "fp16.hysteresis is 2 (DeepSpeed's default); accepted: 1"),
        ({"hysteresis": 3}, "fp16.hysteresis is 3; accepted: 1"),
        ({"hysteresis": 0}, "fp16.hysteresis is 0; accepted: an integer of at least 1"),
        ({"hysteresis": 1, "min_loss_scale": 1024}, "fp16.min_loss_scale is 1024; accepted: at most 1"),
        ({"hysteresis": 1, "loss_scale_window": 0}, "fp16.loss_scale_window is 0"),
        ({"hysteresis": 1, "initial_scale_power": 200}, "fp16.initial_scale_power is 200; accepted: 0 to 127"),
        ({"loss_scale": -1}, "fp16.loss_scale is -1; accepted: a finite number of at least 0"),
        ({"loss_scale": float("inf")}, "fp16.loss_scale is inf"),
        ({"loss_scale": True}, "fp16.loss_scale is True"),
        ({"loss_scale": "auto"}, 'fp16.loss_scale is "auto"'),
    ],
)
def test_loss_scales_that_are_refused(fp16, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        loss_scale_of({"enabled": True, **fp16})


def test_an_fp16_block_scales_as_the_wrapper_written_by_hand(backend_name):
    """Dynamic, with an overflow in the second window: the scale backs off and the window is skipped."""
    config = {STEPS: 2, "fp16": {"enabled": True, "initial_scale_power": 10, "hysteresis": 1}}
    by_config, by_hand = mlp(torch.float16), None
    by_hand = copy.deepcopy(by_config)
    one = from_deepspeed_config(config, torch.optim.AdamW(by_config.parameters()), backend=backend_name)
    scale = LossScale(2.0**10, growth_interval=1000)
    other = FusedAccumOptimizer(
        torch.optim.AdamW(by_hand.parameters()), accumulation_steps=2, loss_scale=scale, backend=backend_name
    )
    for i, batch in enumerate(inputs(6, torch.float16)):
        for model, optimizer in ((by_config, one), (by_hand, other)):
            optimizer.backward(loss_of(model, batch) * (float("inf") if i == 3 else 1.0))
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(by_config.parameters(), by_hand.parameters(), strict=True):
        assert_same_bits(p, q)
    assert one.loss_scale.item() == other.loss_scale.item() == 2.0**9
