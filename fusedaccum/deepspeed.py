"""A DeepSpeed configuration's accumulation, clipping and precision settings, for a wrapped torch optimizer.

Only what decides a result on one process is read. What cannot be honoured is refused by its name, what cannot change a
result (logging, files, communication between ranks) is accepted. DeepSpeed itself is not needed.

Meanings are those of https://www.deepspeed.ai/docs/config-json and of ``deepspeed.runtime`` (looked at on 2026-12-01).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from .optimizer import FusedAccumOptimizer
from .scaling import LossScale
from .validate import dtype_name, param_name

Config = Mapping[str, Any]

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_READ = {*_BATCH, "managed_gradient_accumulation", "gradient_clipping", "zero_optimization", "data_types"}
_READ |= {"bf16", "bfloat16", "fp16"}
_LOGGING_AND_FILES = {
    "activation_checkpointing",
    "aio",
    "checkpoint",
    "comet",
    "comms_logger",
    "csv_monitor",
    "dump_state",
    "flops_profiler",
    "log_level",
    "memory_breakdown",
    "nebula",
    "steps_per_print",
    "tensorboard",
    "timers",
    "vocabulary_size",
    "wall_clock_breakdown",
    "wandb",
}
# Between ranks, of which there is one, or of ZeRO, which is off.
_COMMUNICATION = {
    "communication_data_type",
    "disable_allgather",
    "gradient_allreduce_op",
    "gradient_predivide_factor",
    "prescale_gradients",
    "seq_parallel_comm_data_type",
    "sparse_gradients",
    "use_data_before_expert_parallelism",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
}
_WITHOUT_EFFECT = _LOGGING_AND_FILES | _COMMUNICATION
# Accepted where they are off, with what to do instead.
_REFUSED = {
    "optimizer": "build the torch.optim optimizer yourself and pass it",
    "scheduler": "build a torch.optim.lr_scheduler on the optimizer that this returns",
    "amp": "use bf16 parameters, or torch.amp.autocast in your loop",
    "torch_autocast": "use torch.amp.autocast in your loop",
    "compression_training": "use DeepSpeed",
    "quantize_training": "use DeepSpeed",
    "weight_quantization": "use DeepSpeed",
    "eigenvalue": "use DeepSpeed",
    "progressive_layer_drop": "use DeepSpeed",
    "curriculum_learning": "choose the batches in your loop",
    "data_efficiency": "choose the batches in your loop",
    "dataloader_drop_last": "pass drop_last=True to your DataLoader",
    "sparse_attention": "use DeepSpeed",
    "elasticity": "write the batch sizes",
    "autotuning": "write the batch sizes",
    "hybrid_engine": "use DeepSpeed",
    "pipeline": "use DeepSpeed",
    "tensor_parallel": "use DeepSpeed",
    "expert_parallel": "use DeepSpeed",
    "compile": "call torch.compile on the model",
    "graph_harvesting": "use DeepSpeed",
}
# fused_mode and immediate_grad_update are ways of computing the same; overflow is always checked here.
_FP16_KEYS = {"enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"}
_FP16_KEYS |= {"consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads", "fused_mode"}
_BF16_KEYS = {"enabled", "immediate_grad_update", "check_grad_overflow"}
_BF16_KEYS |= {"bf16_master_weights_and_grads", "bf16_optimizer_states"}


def from_deepspeed_config(
    config: Config | str | os.PathLike[str], optimizer: torch.optim.Optimizer, **overrides: Any
) -> FusedAccumOptimizer:
    """Wraps ``optimizer`` with what a DeepSpeed configuration says of accumulation, clipping and precision.

    - ``gradient_accumulation_steps`` and the batch sizes give ``accumulation_steps``. Of batch = micro-batch x steps x
      1 process any two give the third; one batch size alone means 1 step.
    - ``gradient_clipping`` gives ``max_grad_norm``; 0 is no clipping.
    - ``bf16.enabled`` or ``fp16.enabled``: the parameters must be of that dtype already. The latter's settings give
      ``loss_scale``: train with ``optimizer.backward(loss)``, as with a DeepSpeed engine.

    Call ``step()`` after every micro-batch and leave the loss undivided, as with a DeepSpeed engine. Two things are as
    they always are here: a window with a non-finite gradient is skipped (whatever ``bf16.check_grad_overflow`` says),
    and gradients add up in fp32.

    Args:
        config: the dict, or the path of its JSON file.
        optimizer: the torch optimizer to wrap.
        overrides: arguments of ``FusedAccumOptimizer``. What they say is not looked up in ``config``, so that they also
            answer for values that ``config`` leaves open ("auto") or that cannot be honoured.

    Raises:
        TypeError, ValueError: a key that cannot be honoured, is not known or contradicts another, by name; and whatever
            ``FusedAccumOptimizer`` refuses. Nothing has been changed then.
        OSError: the file cannot be read.
    """
    settings = _load(config)
    _check_keys(settings)
    options = dict(overrides)
    if "accumulation_steps" not in options:
        options["accumulation_steps"] = _accumulation_steps(settings)
    if "max_grad_norm" not in options:
        options["max_grad_norm"] = _max_grad_norm(settings)
    _check_zero(settings)
    _check_data_types(settings)
    bf16_key = "bfloat16" if "bf16" not in settings and "bfloat16" in settings else "bf16"  # the former is its old name
    fp16 = _precision_block(settings, "fp16", _FP16_KEYS)
    bf16 = _precision_block(settings, bf16_key, _BF16_KEYS)
    if fp16 is not None and bf16 is not None:
        raise ValueError(f"fp16.enabled and {bf16_key}.enabled are both true; accepted: one of them")
    if fp16 is not None:
        _check_params(optimizer, torch.float16, "fp16")
    if bf16 is not None:
        _check_params(optimizer, torch.bfloat16, bf16_key)
    if fp16 is not None and "loss_scale" not in options:
        options["loss_scale"] = loss_scale_of(fp16)
    return FusedAccumOptimizer(optimizer, **options)


def loss_scale_of(fp16: Config) -> float | LossScale:
    """What an enabled ``fp16`` block says of the loss scale.

    DeepSpeed's ``min_loss_scale`` is where it gives a run up. There is no such end here, but any run that it completes
    is the same, as long as the scale may come down to 1; the scale grows one step earlier than DeepSpeed's.

    Returns:
        A fixed scale, or for ``loss_scale: 0`` the dynamic one.

    Raises:
        ValueError: a setting that is not a number of its kind, or that those arguments cannot express.
    """
    scale = _number(fp16, "loss_scale", 0.0, "fp16.")
    if scale != 0:
        return scale
    power = _number(fp16, "initial_scale_power", 16, "fp16.")
    if power > 127:
        raise ValueError(f"fp16.initial_scale_power is {power!r}; accepted: 0 to 127, the scale is fp32")
    window = _integer(fp16, "loss_scale_window", 1000, "fp16.")
    hysteresis = _integer(fp16, "hysteresis", 2, "fp16.")
    if hysteresis != 1:  # consecutive_hysteresis then has no meaning
        said = "" if "hysteresis" in fp16 else " (DeepSpeed's default)"
        raise ValueError(
            f"fp16.hysteresis is {hysteresis}{said}; accepted: 1, every overflow lowers the scale. Write 1, or pass "
            "loss_scale=... to say what to use instead"
        )
    lowest = _number(fp16, "min_loss_scale", 1, "fp16.")
    if lowest > 1:
        raise ValueError(
            f"fp16.min_loss_scale is {lowest!r}; accepted: at most 1, the scale has no lower bound. Leave it out, or "
            "pass loss_scale=... to say what to use instead"
        )
    return LossScale(init_scale=2.0**power, growth_interval=window)


# Reading ---------------------------------------------------------------------------------------------------------


def _load(config: Config | str | os.PathLike[str]) -> Config:
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise TypeError(f"config is a {type(config).__name__}; accepted: a dict, or the path of a JSON file")
    with open(config, encoding="utf-8") as file:
        try:
            loaded = json.load(file, object_pairs_hook=_without_duplicates)
        except json.JSONDecodeError as error:
            raise ValueError(f"config {os.fspath(config)!r} is not JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise TypeError(f"config {os.fspath(config)!r} holds a {type(loaded).__name__}; accepted: an object")
    return loaded


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"config has the key {twice!r} twice; accepted: once")
    return result


def _check_keys(settings: Config) -> None:
    for key, value in settings.items():
        if key in _REFUSED:
            if not _is_off(value):
                raise ValueError(f"{key} cannot be honoured, its value is {value!r}; accepted: off. {_remedy(key)}")
        elif key not in _READ and key not in _WITHOUT_EFFECT:
            raise ValueError(
                f"{key!r} is not known, and might change the result; accepted: {', '.join(sorted(_READ))}, and what "
                "concerns logging, files and communication only"
            )


def _remedy(key: str) -> str:
    remedy = _REFUSED[key]
    return f"{remedy[0].upper()}{remedy[1:]}, and leave the key out"


def _is_off(value: Any) -> bool:
    """Whether a block is absent, empty or switched off."""
    if not isinstance(value, Mapping):
        return value is None or value is False
    switches = [value[name] for name in ("enabled", "autotp_size", "deepcompile") if name in value]
    return not value or (bool(switches) and not any(switches))


def _auto(where: str) -> str:
    return f'{where} is "auto", which only an integration that fills it in understands; accepted: a value'


def _number(block: Config, key: str, default: float, prefix: str = "") -> float:
    """A finite number of at least 0."""
    value = block.get(key, default)
    if value == "auto":
        raise ValueError(_auto(prefix + key))
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{prefix}{key} is {value!r}; accepted: a finite number of at least 0")
    return value


def _integer(block: Config, key: str, default: int | None, prefix: str = "") -> Any:
    """An integer of at least 1; ``default`` where there is none."""
    value = block.get(key, default)
    if value == "auto":
        raise ValueError(_auto(prefix + key))
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{prefix}{key} is {value!r}; accepted: an integer of at least 1")
    return value


def _flag(block: Config, key: str, prefix: str = "", default: bool = False) -> bool:
    value = block.get(key, default)
    if value == "auto":
        raise ValueError(_auto(prefix + key))
    if not isinstance(value, bool):
        raise ValueError(f"{prefix}{key} is {value!r}; accepted: true, false")
    return value


def _block(settings: Config, key: str) -> Config:
    value = settings.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} is {value!r}; accepted: an object")
    return value


# Batches and clipping --------------------------------------------------------------------------------------------


def _accumulation_steps(settings: Config) -> int:
    if not _flag(settings, "managed_gradient_accumulation", default=True):
        raise ValueError(
            "managed_gradient_accumulation is false; accepted: true. Where your loop decides when to step, pass "
            "accumulation_steps=None"
        )
    batch, micro, steps = (_integer(settings, key, None) for key in _BATCH)
    if batch is None and micro is None and steps is None:
        raise ValueError(
            f"config has none of {', '.join(_BATCH)}; accepted: two of them, or gradient_accumulation_steps alone"
        )
    factor = (micro or 1) * (steps or 1)
    if batch is not None and (batch % factor or (micro is not None and steps is not None and batch != factor)):
        given = [f"{key} {value}" for key, value in zip(_BATCH[1:], (micro, steps), strict=True) if value is not None]
        raise ValueError(
            f"train_batch_size is {batch}, and does not fit {' and '.join(given)}; accepted: micro-batch size * steps "
            "* 1 process"
        )
    if steps is None:
        steps = 1 if batch is None or micro is None else batch // micro
    result: int = steps
    return result


def _max_grad_norm(settings: Config) -> float | None:
    # DeepSpeed's own code has 0 for a config that does not say, though its table says 1.0.
    return _number(settings, "gradient_clipping", 0.0) or None


# Precision -------------------------------------------------------------------------------------------------------


def _precision_block(settings: Config, key: str, known: set[str]) -> Config | None:
    """The block where it is enabled, else None."""
    block = _block(settings, key)
    unknown = sorted(set(block) - known)
    if unknown:
        raise ValueError(f"{key}.{unknown[0]} is not known; accepted: {', '.join(sorted(known))}")
    if not _flag(block, "enabled", f"{key}."):
        return None
    for name in (
        "auto_cast",
        "fp16_master_weights_and_grads",
        "bf16_master_weights_and_grads",
        "bf16_optimizer_states",
    ):
        if _flag(block, name, f"{key}."):
            remedy = "cast the inputs in your loop" if name == "auto_cast" else "masters, gradients and states are fp32"
            raise ValueError(f"{key}.{name} is true; accepted: false, {remedy}")
    return block


def _check_params(optimizer: torch.optim.Optimizer, dtype: torch.dtype, key: str) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        return  # the constructor says so
    for g, group in enumerate(optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            if param.is_floating_point() and param.dtype is not dtype:
                raise ValueError(
                    f"{key}.enabled is true, but {param_name(g, group, i)} has dtype {dtype_name(param.dtype)}; "
                    f"accepted: {dtype_name(dtype)}. Convert the model before you build the optimizer; DeepSpeed would "
                    "have converted it itself"
                )


def _check_zero(settings: Config) -> None:
    zero = settings.get("zero_optimization")
    if isinstance(zero, bool):  # the old way of asking for stage 1
        zero = {"stage": int(zero)}
    stage = _block({"zero_optimization": zero}, "zero_optimization").get("stage", 0)
    if stage != 0 or isinstance(stage, bool):
        raise ValueError(
            f"zero_optimization.stage is {stage!r}; accepted: 0. Nothing is sharded here: parameters, gradients and "
            "states lie on one process"
        )


def _check_data_types(settings: Config) -> None:
    block = _block(settings, "data_types")
    for key, value in block.items():
        if value is None:
            continue
        if key != "grad_accum_dtype":
            raise ValueError(f"data_types.{key} is {value!r}; accepted: grad_accum_dtype only")
        if value != "fp32":
            raise ValueError(f"data_types.grad_accum_dtype is {value!r}; accepted: 'fp32', in which gradients add up")
