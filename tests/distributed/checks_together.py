"""Checks that run on every rank of a group: what the ranks decide together, and what is refused on all of them."""

from __future__ import annotations

import copy
import io
import warnings

import torch
import torch.distributed as dist
from checks_window import assert_same_on_all_ranks, mine, raised, step_windows, wrap
from launch import sizes
from models import OPTIMIZERS, Oracle, Usage, inputs, loss_of, mlp, slot_of
from models import wrap as wrap_alone
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import fusedaccum
from fusedaccum import FusedAccumOptimizer

# What is refused at construction ------------------------------------------------------------------------------------


@sizes(2, 4)
def check_another_model_is_refused(n_ranks: int) -> None:
    """Everywhere, saying what differs; the parameters are free afterwards."""
    last = dist.get_rank() == n_ranks - 1
    torch.manual_seed(3)
    start = mlp()
    wider = nn.Sequential(nn.Linear(7, 14), nn.Tanh(), nn.Linear(14, 3))
    other_values = copy.deepcopy(start)
    nn.init.zeros_(other_values[2].weight)
    frozen = copy.deepcopy(start)
    frozen[0].weight.requires_grad_(False)
    for model, message in (
        (wider, "params'][0] is (13, 7) float32, trainable on rank 0 and (14, 7) float32, trainable on rank"),
        (copy.deepcopy(start).bfloat16(), "params'][0] is (13, 7) float32, trainable on rank 0 and (13, 7) bfloat16"),
        (frozen, "params'][0] is (13, 7) float32, trainable on rank 0 and (13, 7) float32, frozen on rank"),
        (other_values, "param_groups[0]['params'][2], by the checksum of its values, is "),
        (nn.Sequential(*start[:2]), "params'][2] is (3, 13) float32, trainable on rank 0 and missing on rank"),
    ):
        error = raised(wrap, model if last else start)
        assert isinstance(error, ValueError)
        assert message in str(error), error
        assert f"rank {n_ranks - 1}; accepted: the same on all ranks" in str(error)
    assert wrap(start) is not None


def check_other_settings_are_refused(n_ranks: int) -> None:
    """Options of the optimizer and of the wrapper."""
    last = dist.get_rank() == n_ranks - 1
    params = list(mlp().parameters())
    for optimizer, options, message in (
        (torch.optim.SGD(params, lr=0.1), {}, "the optimizer is AdamW on rank 0 and SGD on rank 1"),
        (torch.optim.AdamW(params, lr=0.1), {}, "param_groups[0]['lr'] is 0.01 on rank 0 and 0.1 on rank 1"),
        (OPTIMIZERS["adamw"](params[:2]), {}, "params'][2] is (3, 13) float32, trainable on rank 0 and missing"),
        (OPTIMIZERS["adamw"](params), {"accumulation_steps": 3}, "accumulation_steps is None on rank 0 and 3 on"),
        (OPTIMIZERS["adamw"](params), {"max_grad_norm": 1.0}, "max_grad_norm is None on rank 0 and 1.0 on rank 1"),
        (OPTIMIZERS["adamw"](params), {"loss_scale": 2.0}, "loss_scale is None on rank 0 and LossScale"),
        (OPTIMIZERS["adamw"](params), {"overlap": True}, "overlap is False on rank 0 and True on rank 1"),
    ):
        group = dist.group.WORLD
        mine_ = (optimizer, options) if last else (OPTIMIZERS["adamw"](params), {})
        error = raised(FusedAccumOptimizer, mine_[0], process_group=group, **mine_[1])
        assert isinstance(error, ValueError)
        assert message in str(error), error
    error = raised(wrap, mlp(), accumulation_steps=0 if last else 4)
    assert type(error) is (ValueError if last else RuntimeError)
    assert last or "rank 1 refused its FusedAccumOptimizer: ValueError: accumulation_steps is 0" in str(error)


def check_arguments(n_ranks: int) -> None:
    """Of this rank alone: nobody is asked."""
    for options, message in (
        ({"reduce_dtype": torch.float16}, "reduce_dtype is torch.float16; accepted: torch.float32, torch.bfloat16"),
        ({"process_group": 3}, "process_group is a int; accepted: None, or a torch.distributed.ProcessGroup"),
        ({"process_group": dist.group.WORLD, "overlap": 1}, "overlap is 1; accepted: True, False"),
        ({"process_group": dist.group.WORLD, "overlap": True, "nonfinite": "raise"}, "what has gone out"),
        ({}, "the default process group has 2 ranks; accepted: 1, or"),
    ):
        error = raised(wrap_alone, mlp(), **options)
        assert message.lower() in str(error).lower(), error
    assert "process_group=torch.distributed.group.WORLD" in str(raised(wrap_alone, mlp()))
    assert "has a process_group; accepted: copies" in str(raised(copy.deepcopy, wrap(mlp())))


# What changes on the way --------------------------------------------------------------------------------------------


def check_settings_that_part_are_noticed(n_ranks: int) -> None:
    """A learning rate that only one rank's scheduler has moved would train two models from there on."""
    model = mlp()
    optimizer = wrap(model, accumulation_steps=1)
    step_windows(model, optimizer, inputs(1))
    before = [param.detach().clone() for param in model.parameters()]
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["lr"] = 0.5
    loss_of(model, inputs(1)[0]).backward()
    error = raised(optimizer.step)
    assert "param_groups[0]['lr'] is 0.01 on rank 0 and 0.5 on rank 1; accepted: the same on all ranks" in str(error)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.max_grad_norm = float(1 + dist.get_rank())
    assert "max_norm is [1.0, 2.0] on the ranks" in str(raised(optimizer.step))
    optimizer.max_grad_norm = None
    optimizer.step()
    assert_same_on_all_ranks(model, optimizer)
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, inputs(1)[0]), weight=2)
    optimizer.step()


def check_groups_added_on_one_rank_are_noticed(n_ranks: int) -> None:
    """Sums of buffers that are laid out differently would be sums of anything."""
    model = mlp()
    optimizer = wrap(model)
    if dist.get_rank() == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    loss_of(model, inputs(1)[0]).backward()
    error = raised(optimizer.step)
    assert "the number of parameters of param_groups[1] is missing on rank 0 and 1 on rank 1" in str(error)


def check_weights_on_some_ranks_are_refused(n_ranks: int) -> None:
    """In a window of the loop's own, a loss that is divided by K and one that has a weight do not add up."""
    model = mlp()
    optimizer = wrap(model)
    optimizer.backward(loss_of(model, inputs(1)[0]), weight=2 if dist.get_rank() else None)
    error = raised(optimizer.step)
    assert "the micro-batches of rank 0 have no weights, those of others do" in str(error)


# inf and NaN --------------------------------------------------------------------------------------------------------


@sizes(2, 4)
def check_a_rank_with_a_nan(n_ranks: int) -> None:
    """All ranks skip the window, and the loss scale backs off on all; the next window is taken by all."""
    for overlap in (False, True):
        model = mlp(torch.bfloat16)
        optimizer = wrap(model, accumulation_steps=2, loss_scale="dynamic", overlap=overlap)
        batches = inputs(6, torch.bfloat16)
        if dist.get_rank() == n_ranks - 1:
            batches[2] = batches[2] * torch.nan
        step_windows(model, optimizer, batches[:2])
        before = [param.detach().clone() for param in model.parameters()]
        step_windows(model, optimizer, batches[2:4])
        assert optimizer.found_inf.item() == 1
        assert optimizer.skipped.item() == 1
        assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
        assert optimizer.loss_scale.item() == 2.0**15
        step_windows(model, optimizer, batches[4:])
        assert optimizer.skipped.item() == 0
        assert not any(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
        assert_same_on_all_ranks(model, optimizer)


def check_a_micro_batch_with_a_nan(n_ranks: int) -> None:
    """Only that micro-batch is left out, and its weight leaves everybody's denominator."""
    for overlap in (False, True):
        model = mlp()
        optimizer = wrap(model, "sgd", accumulation_steps=2, nonfinite="skip_micro_batch", overlap=overlap)
        oracle = Oracle(model, "sgd")
        batches = inputs(2)
        if dist.get_rank() == 1:
            batches[1] = batches[1] * torch.nan
        for batch in batches:
            loss_of(model, batch).backward()
            optimizer.step()
        assert optimizer.skipped.item() == 0
        oracle.step([param.grad.clone() for param in model.parameters()], divisor=3 / 2)
        oracle.assert_matches(optimizer)
        assert_same_on_all_ranks(model, optimizer)


def check_a_nan_is_raised_everywhere(n_ranks: int) -> None:
    """nonfinite="raise": the rank that has it names the parameters, the other the rank; both windows stay."""
    model = mlp()
    optimizer = wrap(model, accumulation_steps=2, nonfinite="raise")
    batches = inputs(2)
    loss_of(model, batches[0]).backward()
    optimizer.step()
    loss_of(model, batches[1] * (torch.nan if dist.get_rank() else 1.0)).backward()
    grads = [param.grad.clone() for param in model.parameters()]
    error = raised(optimizer.step)
    assert isinstance(error, FloatingPointError)
    assert "on rank 1 holds an inf or NaN" in str(error)
    assert ("param_groups[0]" in str(error)) == (dist.get_rank() == 1)
    for param, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(param.grad.nan_to_num(7.0), grad.nan_to_num(7.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the window is dropped
        optimizer.reset()
    step_windows(model, optimizer, batches)
    assert optimizer.skipped.item() == 0
    assert_same_on_all_ranks(model, optimizer)


def check_an_inf_that_one_rank_was_told_of(n_ranks: int) -> None:
    """optimizer.found_inf, set on one rank, skips on all."""
    model = mlp()
    optimizer = wrap(model)
    loss_of(model, inputs(1)[0]).backward()
    if dist.get_rank() == 1:
        optimizer.found_inf = torch.ones(())
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.step()
    assert optimizer.found_inf.item() == 1
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    assert_same_on_all_ranks(model, optimizer)


def check_grad_scaler(n_ranks: int) -> None:
    """fusedaccum.GradScaler sees everybody's infs, before anybody decides; torch's sees one rank's and is refused."""
    for steps, overlap in ((None, False), (2, True)):
        model = mlp(torch.bfloat16)
        optimizer = wrap(model, accumulation_steps=steps, overlap=overlap)
        scaler = fusedaccum.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
        before = [param.detach().clone() for param in model.parameters()]
        for i, batch in enumerate(inputs(4, torch.bfloat16)):
            if i == 1 and dist.get_rank() == 1:
                batch = batch * torch.inf
            scaler.scale(loss_of(model, batch)).backward()
            if steps is not None or i % 2:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            if i == 1:
                assert scaler.get_scale() == 32.0
                assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
        assert scaler.get_scale() == 32.0
        assert not any(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
        assert_same_on_all_ranks(model, optimizer)
    plain = torch.amp.GradScaler("cpu")
    plain.scale(loss_of(model, batch.nan_to_num(1.0))).backward()
    assert "fusedaccum.GradScaler or loss_scale='dynamic'" in str(raised(plain.step, optimizer))


# Overlap ------------------------------------------------------------------------------------------------------------


@sizes(2, 4)
def check_pieces_go_out_during_the_backward(n_ranks: int) -> None:
    """The last layers are on their way when the gradient of the first arrives; the first layer's piece goes last."""
    model = Usage(6)
    optimizer = wrap(model, accumulation_steps=2, overlap=True, bucket_bytes=200)
    seen: list[list[bool]] = []

    def look(_: object) -> None:
        pieces = optimizer._reduction._pieces
        gone = [pieces is not None and pieces.has_gone(slot_of(optimizer, p)) for p in model.parameters()]
        seen.append(gone)

    model.layers[0].weight.register_post_accumulate_grad_hook(look)
    for batch in mine(inputs(2 * n_ranks), n_ranks):
        loss_of(model, batch).backward()
        if optimizer._window.position == 1:
            error = raised(optimizer.reset)
            assert "are on their way to the other ranks; accepted: step()" in str(error)
        optimizer.step()
    assert not any(seen[0])
    assert all(seen[1][4:])
    assert_same_on_all_ranks(model, optimizer)


def check_the_loop_says_which_is_the_last(n_ranks: int) -> None:
    """Without accumulation_steps; and on one rank only, which costs the overlap and nothing else."""
    for who in ((0, 1), (1,), ()):
        model = mlp()
        optimizer = wrap(model, "sgd", overlap=True, bucket_bytes=100)
        oracle = Oracle(model, "sgd")
        first, last = mine(inputs(2 * n_ranks), n_ranks)
        (loss_of(model, first) / 2).backward()
        if dist.get_rank() in who:
            with optimizer.last_micro_batch():
                (loss_of(model, last) / 2).backward()
        else:
            (loss_of(model, last) / 2).backward()
        assert (optimizer._reduction._pieces is not None) == (len(who) == 2)
        optimizer.step()
        oracle.step([param.grad.clone() for param in model.parameters()], divisor=n_ranks)
        oracle.assert_matches(optimizer)
        assert_same_on_all_ranks(model, optimizer)


def check_a_gradient_in_two_parts_is_refused(n_ranks: int) -> None:
    """Two backwards in the last micro-batch: the first sum is on its way already."""
    model = mlp()
    optimizer = wrap(model, accumulation_steps=1, overlap=True)
    loss_of(model, inputs(1)[0]).backward()
    error = raised(loss_of(model, inputs(1)[0]).backward)
    assert "came after the sum over the ranks had begun; accepted: with overlap=True one backward" in str(error)
    optimizer.step()
    assert_same_on_all_ranks(model, optimizer)


# Checkpoints --------------------------------------------------------------------------------------------------------


@sizes(2, 4)
def check_each_rank_resumes_its_own_window(n_ranks: int) -> None:
    """Saved after micro-batch 2 of 4 on every rank: the bits of no interruption. Another rank's window is refused."""
    start = mlp(torch.bfloat16)
    batches = mine(inputs(8 * n_ranks, torch.bfloat16), n_ranks)
    options = {"accumulation_steps": 4, "max_grad_norm": 0.05, "loss_scale": "dynamic"}
    whole = copy.deepcopy(start)
    step_windows(whole, wrap(whole, **options), batches)
    first = copy.deepcopy(start)
    optimizer = wrap(first, **options)
    step_windows(first, optimizer, batches[:6])
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    second = copy.deepcopy(start)
    resumed = wrap(second, **options)
    file.seek(0)
    held = torch.load(file, weights_only=True)
    everybodys = [None] * n_ranks
    dist.all_gather_object(everybodys, held)
    second.load_state_dict(held["model"])
    anothers = everybodys[(dist.get_rank() + 1) % n_ranks]
    error = raised(resumed.load_state_dict, anothers["optimizer"])
    assert f"this is rank {dist.get_rank()} of {n_ranks}; accepted: each rank's own" in str(error)
    resumed.load_state_dict(held["optimizer"])
    step_windows(second, resumed, batches[6:])
    for p, q in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)
    # Rank 0's between windows is everybody's.
    third = copy.deepcopy(start)
    loaded = wrap(third, **options)
    held = [resumed.state_dict(), second.state_dict()] if dist.get_rank() == 0 else [None, None]
    dist.broadcast_object_list(held)
    loaded.load_state_dict(held[0])
    third.load_state_dict(held[1])
    for run in ((second, resumed), (third, loaded)):
        step_windows(*run, batches[:4])
    for p, q in zip(third.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)
    optimizer._window.close()  # that it was left behind is the check's doing


def check_state_made_by_a_step_of_zeros(n_ranks: int) -> None:
    """torch.distributed.checkpoint makes the state exist by a step of zeros. On all ranks that changes nothing; on rank
    0 alone it does not wait for the others, and its count of steps, one ahead, is refused at the next boundary."""
    for steps in (None, 3):
        for everywhere in (True, False):
            model = mlp()
            optimizer = wrap(model, accumulation_steps=steps)
            if everywhere or dist.get_rank() == 0:
                assert get_optimizer_state_dict(model, optimizer)["state"]
            for _ in range((steps or 1) - 1):
                loss_of(model, inputs(1)[0]).backward()
                optimizer.step()
            loss_of(model, inputs(1)[0]).backward()
            if everywhere:
                optimizer.step()
                assert optimizer.stepped
                assert_same_on_all_ranks(model, optimizer)
            else:
                error = raised(optimizer.step)
                assert "the number of boundaries so far is 1 on rank 0 and 0 on rank 1" in str(error)
                optimizer._window.close()


def check_no_checkpoint_of_sums(n_ranks: int) -> None:
    """What is on its way to the other ranks, or has been summed by clip_grad_norm_, is no rank's own window."""
    model = mlp()
    optimizer = wrap(model, accumulation_steps=1, overlap=True)
    loss_of(model, inputs(1)[0]).backward()
    assert "accepted: state_dict() after step()" in str(raised(optimizer.state_dict))
    optimizer.clip_grad_norm_(1.0)
    assert "accepted: state_dict() after step()" in str(raised(optimizer.state_dict))
    optimizer.step()
    assert optimizer.state_dict()["fusedaccum"]["open"] is None
