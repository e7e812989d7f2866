"""The checks of ``test_torch_optim_db.py``: in the manner of torch's own optimizer tests, as runs to compare.

Each check takes an ``OptimizerInfo`` and returns runs. A run takes a backend's name, or None for the plain optimizer,
and returns tensors and states.
"""

from __future__ import annotations

import copy
import io
import warnings

import torch
from torch import nn
from torch.testing._internal.common_optimizers import OptimizerErrorEnum

from fusedaccum import FusedAccumOptimizer

N_STEPS = 5


class NothingToRunError(Exception):
    """torch's tests have no such case for this optimizer."""


# One run: build, train, return parameters and state ------------------------------------------------------------------


def _params(info, shapes=((10, 5), (10, 1), (1, 6), (3, 3))):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def _wrap(optimizer, backend):
    """The plain optimizer where ``backend`` is None."""
    return optimizer if backend is None else FusedAccumOptimizer(optimizer, backend=backend)


def _train(params, optimizer, n_steps=N_STEPS, seed=1, sparse=False, after=lambda loss: None):
    """Gradients that do not depend on the parameters: an error is not fed back."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n_steps):
        grads = [torch.randn(param.shape, generator=generator) for param in params]
        if sparse:  # assigned, as torch's tests do
            for param, grad in zip(params, grads, strict=True):
                rows = grad[:2].to_sparse(1)
                param.grad = torch.sparse_coo_tensor(rows.indices(), rows.values(), param.shape, check_invariants=True)
        else:
            sum((param * grad).sum() for param, grad in zip(params, grads, strict=True)).backward()
        optimizer.step()
        after(1.0)
        optimizer.zero_grad()


def _result(params, optimizer):
    held = optimizer.state_dict()["state"]
    return [param.detach().clone() for param in params], copy.deepcopy(held)


def _base(info):
    """torch compares with the loop over single tensors."""
    return {"foreach": False} if "foreach" in info.supported_impls else {}


def _configurations(info):
    return [each.kwargs for each in info.optim_inputs_func(device="cpu")]


def _over_configurations(info, flags, kwargs_of=lambda kwargs: kwargs):
    def run(kwargs, backend):
        params = _params(info)
        optimizer = _wrap(info.optim_cls(params, **{**copy.deepcopy(kwargs), **flags}), backend)
        _train(params, optimizer)
        return _result(params, optimizer)

    return [(lambda backend, kwargs=kwargs: run(kwargs_of(kwargs), backend)) for kwargs in _configurations(info)]


# The checks: for each, the runs to compare ---------------------------------------------------------------------------


def configurations(info):
    """Every configuration that torch tests."""
    return _over_configurations(info, _base(info))


def flag(name):
    """Every configuration with the flag set."""

    def check(info):
        available = info.has_capturable_arg if name == "capturable" else name in info.supported_impls
        if not available:
            raise NothingToRunError
        others = dict.fromkeys(set(info.supported_impls) - {name}, False)
        return _over_configurations(info, {**others, name: True})

    return check


def tensor_lr(info):
    """``lr`` as a 0-dim tensor."""
    return _over_configurations(info, _base(info), lambda kwargs: {**kwargs, "lr": torch.tensor(0.01)})


def param_groups(info):
    """Two groups with settings of their own."""
    if not info.supports_param_groups:
        raise NothingToRunError

    def run(backend):
        params = _params(info)
        first = {"params": params[:2], "lr": 0.02}
        if "weight_decay" in info.optim_cls(_params(info)).defaults:
            first["weight_decay"] = 0.1
        optimizer = _wrap(info.optim_cls([first, {"params": params[2:]}], **_base(info)), backend)
        _train(params, optimizer)
        return _result(params, optimizer)

    return [run]


def closure(info):
    """``step(closure)`` runs it with grad enabled, and returns its loss."""

    def run(backend):
        params = _params(info)
        optimizer = _wrap(info.optim_cls(params, **_base(info)), backend)
        losses = []

        def evaluate():
            optimizer.zero_grad()
            loss = sum((param * 3).sum() for param in params)
            loss.backward()
            return loss

        for _ in range(N_STEPS):
            losses.append(optimizer.step(evaluate).detach())
        state = _result(params, optimizer)[1]
        return [*losses[:1], *(param.detach() for param in params)], state

    return [run]


def schedulers(info):
    """torch's lists of schedulers that step together."""
    runs = []
    for constructors in info.scheduler_inputs:

        def run(backend, constructors=constructors):
            params = _params(info)
            optimizer = _wrap(info.optim_cls(params, lr=0.01, **_base(info)), backend)
            chosen = [each(optimizer) for each in constructors]
            rates = []

            def advance(loss):
                for each in chosen:
                    plateau = isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau)
                    each.step(loss) if plateau else each.step()
                rates.append(torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64))

            _train(params, optimizer, n_steps=12, after=advance)
            moved, state = _result(params, optimizer)
            return [*rates, *moved], state

        runs.append(run)
    return runs


def sparse_gradients(info):
    """Some rows of each gradient, as a sparse tensor; ours adds them up densely."""
    if not (info.supports_sparse or info.only_supports_sparse_grads):
        raise NothingToRunError

    def run(backend):
        params = _params(info)
        kwargs = info.metadata_for_sparse[0]
        optimizer = _wrap(info.optim_cls(params, **kwargs), backend)
        _train(params, optimizer, sparse=True)
        return _result(params, optimizer)

    return [run]


def complex_parameters(info):
    if not info.supports_complex:
        raise NothingToRunError

    def run(backend):
        params = [nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))]
        return _wrap(info.optim_cls(params, **_base(info)), backend)

    return [run]


def strided_parameters(info):
    """A parameter that is every second column of a larger tensor."""

    def run(backend):
        params = [nn.Parameter(torch.arange(24.0).view(4, 6)[:, ::2])]
        optimizer = _wrap(info.optim_cls(params, **_base(info)), backend)
        _train(params, optimizer)
        return _result(params, optimizer)

    return [run]


def without_gradients(info):
    """No parameter has one: nothing moves, no state appears."""

    def run(backend):
        params = _params(info)
        optimizer = _wrap(info.optim_cls(params, **_base(info)), backend)
        optimizer.step(*([lambda: torch.ones(())] if info.step_requires_closure else []))
        moved, state = _result(params, optimizer)
        assert all(torch.equal(param, start) for param, start in zip(moved, _params(info), strict=True))
        return moved, state

    return [run]


def zero_gradients(info):
    """After a first update, gradients of zero."""

    def run(backend):
        params = _params(info)
        optimizer = _wrap(info.optim_cls(params, **_base(info)), backend)
        _train(params, optimizer, n_steps=1)
        for _ in range(3):
            sum((param * 0).sum() for param in params).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return _result(params, optimizer)

    return [run]


def empty_parameter(info):
    """A parameter without elements beside others."""

    def run(backend):
        params = _params(info, ((0, 5), (3, 2)))
        optimizer = _wrap(info.optim_cls(params, **_base(info)), backend)
        _train(params, optimizer)
        return _result(params, optimizer)

    return [run]


def _resumed(info, edit, through_file=False):
    """For every configuration: train, save, ``edit`` what was saved, load into a new optimizer, train on."""

    def run(kwargs, backend):
        params = _params(info)
        make = lambda: info.optim_cls(params, **{**copy.deepcopy(kwargs), **_base(info)})  # noqa: E731
        first = _wrap(make(), backend)
        _train(params, first, seed=1)
        saved = copy.deepcopy(first.state_dict())
        if through_file:
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
        edit(saved)
        if backend is not None:
            first.remove()
        second = _wrap(make(), backend)
        second.load_state_dict(saved)
        _train(params, second, seed=2)
        return _result(params, second)

    return [(lambda backend, kwargs=kwargs: run(kwargs, backend)) for kwargs in _configurations(info)]


def saved_and_loaded(info):
    """Through a file, with ``weights_only=True``."""
    return _resumed(info, lambda saved: None, through_file=True)


def older_state_dict(info):
    """One from before the flags that the optimizer did not have at first."""

    def edit(saved):
        for group in saved["param_groups"]:
            for name in info.not_og_supported_flags:
                group.pop(name, None)

    return _resumed(info, edit)


def number_as_step(info):
    """One from when ``step`` was a number."""

    def edit(saved):
        for held in saved["state"].values():
            if isinstance(held.get("step"), torch.Tensor):
                held["step"] = held["step"].item()

    return _resumed(info, edit)


def deep_copy(info):
    """A copy of the optimizer trains its own parameters, as the original would."""

    def run(backend):
        params = _params(info)
        optimizer = _wrap(info.optim_cls(params, **_base(info)), backend)
        _train(params, optimizer, seed=1)
        params, optimizer = copy.deepcopy((params, optimizer))
        _train(params, optimizer, seed=2)
        return _result(params, optimizer)

    return [run]


def tried(run, backend):
    """(result, None) or (None, error)."""
    try:
        return run(backend), None
    except Exception as error:
        return None, error


def errors(info):
    """torch's bad input: at construction, at the step, and, where torch minds it, through ``add_param_group``."""
    runs = []
    for each in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        bad, at_step = each.optimizer_error_input, each.error_on is OptimizerErrorEnum.STEP_ERROR

        def build(backend, bad=bad, at_step=at_step):
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)  # torch's word for duplicates
                params = _params(info) if bad.params is None else copy.deepcopy(bad.params)
                optimizer = _wrap(info.optim_cls(params, **bad.kwargs), backend)
                assert at_step
                optimizer.step()

        runs.append(build)
        if isinstance(bad.params, list) and info.supports_param_groups and not at_step:
            groups = bad.params if isinstance(bad.params[0], dict) else [{"params": bad.params}]
            is_named = isinstance(groups[0]["params"], list) and isinstance(groups[0]["params"][0], tuple)

            def add(backend, groups=groups, is_named=is_named):
                param = nn.Parameter(torch.randn(2, 2))
                optimizer = _wrap(info.optim_cls([("own", param) if is_named else param]), backend)
                with warnings.catch_warnings():
                    warnings.simplefilter("error", UserWarning)
                    try:
                        for group in copy.deepcopy(groups):  # torch uses its sample parameters many times
                            optimizer.add_param_group(group)
                    finally:
                        if backend is not None:  # the refusal leaves an optimizer that works
                            _train([param], optimizer, n_steps=1)

            if isinstance(tried(add, None)[1], Exception):
                runs.append(add)
    return runs


CHECKS = {
    "every configuration": configurations,
    "foreach=True": flag("foreach"),
    "fused=True": flag("fused"),
    "capturable=True": flag("capturable"),
    "differentiable=True": flag("differentiable"),
    "lr as a tensor": tensor_lr,
    "parameter groups": param_groups,
    "closure": closure,
    "its schedulers": schedulers,
    "no gradients": without_gradients,
    "zero gradients": zero_gradients,
    "sparse gradients": sparse_gradients,
    "complex parameters": complex_parameters,
    "strided parameters": strided_parameters,
    "empty parameter": empty_parameter,
    "save and load": saved_and_loaded,
    "older state_dict": older_state_dict,
    "step as a number": number_as_step,
    "deepcopy": deep_copy,
    "bad input": errors,
}
