"""Parameters that are DTensors: FSDP2's shards and tensor-parallel ones. The kernels see the local tensor of each.

FSDP2 and tensor parallelism reduce gradients themselves; what is left to do over the ranks is one sum at the boundary,
of the squares that the norm is made of. It goes through the default process group, which every mesh here must cover, so
that all ranks get the same bits, and step or skip together.

Nothing here imports ``torch.distributed.tensor``: while nobody else has, there is no DTensor.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(value: Any) -> bool:
    """Whether ``value`` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    cls = getattr(module, "DTensor", None)  # None while it is being imported, too
    return cls is not None and isinstance(value, cls)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, the same memory, outside of autograd; any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[attr-defined, no-any-return]


def around(param: Tensor, local: Tensor) -> Tensor:
    """``local``, of the shape of the parameter's local tensor and any dtype, as a DTensor sharded as ``param`` is.

    Not by ``DTensor.from_local``, which carries a local tensor to the mesh's device: with FSDP2's CPU offload the
    shards of a mesh of GPUs lie on the host.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    sharded: DTensor = param  # type: ignore[assignment]
    meta = TensorMeta(sharded.shape, sharded.stride(), local.dtype)
    spec = DTensorSpec(sharded.device_mesh, sharded.placements, tensor_meta=meta)
    # A DTensor takes its storage offset from the local tensor that it is made of, though it has no storage, and
    # copy.deepcopy takes one that is not 0 for memory (seen on torch 2.13).
    result = DTensor(local.new_empty(()).expand(local.shape), spec, requires_grad=False)  # type: ignore[call-arg, arg-type]
    result._local_tensor = local
    return result


def n_replicas(param: Tensor) -> int:
    """Ranks that hold each element of the parameter: 1 under FSDP, the size of the replicating dimensions of others."""
    sharded: DTensor = param  # type: ignore[assignment]
    n = 1
    for size, placement in zip(sharded.device_mesh.shape, sharded.placements, strict=True):
        if placement.is_replicate():
            n *= size
    return n


def _is_partition(placement: Placement) -> bool:
    """Whether the ranks' local tensors are disjoint parts of the whole."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, (Shard, _StridedShard))


def check_param(name: str, param: Tensor) -> None:
    """Raises TypeError or ValueError for a DTensor that cannot be stepped part by part."""
    sharded: DTensor = param  # type: ignore[assignment]
    for placement in sharded.placements:
        if not (placement.is_replicate() or _is_partition(placement)):
            raise TypeError(f"{name} is a DTensor with placement {placement}; accepted: Shard, Replicate")
    local = local_of(param)
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(f"{name} is a DTensor around a {type(local).__name__}; accepted: around plain tensors")
    mesh, n_ranks = sharded.device_mesh, torch.distributed.get_world_size()
    if mesh.size() != n_ranks:
        raise ValueError(
            f"{name} lies on a mesh of {mesh.size()} of the {n_ranks} ranks ({mesh}); accepted: a mesh of all ranks. "
            "Nothing would reduce its gradient, or the norm, over the others"
        )


def in_place_of(name: str, grad: Tensor, param: Tensor) -> Tensor:
    """The local tensor of a gradient, which is brought to the parameter's placements first: the engine may deliver a
    sum that is still spread over the ranks (Partial). All ranks of the mesh must call it. A plain one's
    gradient is returned as it is.

    Raises:
        RuntimeError: a gradient that is not on the parameter's mesh.
    """
    if not is_dtensor(param):
        return grad
    sharded: DTensor = param  # type: ignore[assignment]
    if not is_dtensor(grad) or grad.device_mesh != sharded.device_mesh:  # type: ignore[attr-defined]
        found = f"on {grad.device_mesh}" if is_dtensor(grad) else f"a {type(grad).__name__}"  # type: ignore[attr-defined]
        raise RuntimeError(
            f"the gradient of {name} is {found}; accepted: a DTensor on the parameter's mesh {sharded.device_mesh}"
        )
    placed: DTensor = grad  # type: ignore[assignment]
    if placed.placements != sharded.placements:
        placed = placed.redistribute(placements=sharded.placements)
    return local_of(placed)


def mesh_of(param: Tensor) -> DeviceMesh | None:
    """The ranks that a parameter lies on; None for a plain one."""
    return param.device_mesh if is_dtensor(param) else None  # type: ignore[attr-defined, no-any-return]


def check_loaded(what: str, value: Any, mesh: DeviceMesh | None) -> None:
    """Raises ValueError for a saved DTensor that lies on other ranks than those of ``mesh``, which have the parameter:
    it loads, but without them nobody can tell the whole."""
    if not is_dtensor(value):
        return
    saved: DTensor = value  # type: ignore[assignment]
    if saved.device_mesh != mesh:
        raise ValueError(
            f"loaded state dict has {what} on the mesh {saved.device_mesh}; accepted: on the parameter's "
            f"({'none' if mesh is None else mesh}), or whole. torch.distributed.checkpoint loads what another number "
            "of ranks has saved"
        )


def part_of(name: str, value: Tensor, param: Tensor) -> Tensor:
    """The local part of a value of the parameter's whole shape: a DTensor of any placements on its mesh, which all
    ranks of the mesh then bring to the parameter's, or a plain tensor that every rank has.

    Raises:
        ValueError: another shape.
    """
    from torch.distributed.tensor import distribute_tensor

    sharded: DTensor = param  # type: ignore[assignment]
    if value.shape != sharded.shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; accepted: {tuple(sharded.shape)}, the parameter's")
    if is_dtensor(value):
        return in_place_of(name, value, param)
    placed = distribute_tensor(value.detach(), sharded.device_mesh, sharded.placements, src_data_rank=None)
    return local_of(placed)


def over_ranks(values: Tensor, param: Tensor, op: str = "SUM") -> Tensor:
    """The sum (``"SUM"``) or least (``"MIN"``) of everybody's ``values``, with the same bits on all ranks, which must
    all call it.

    Args:
        values: on any device.
        param: any DTensor; the default process group adds on its mesh's device, where an offloaded parameter is not.
    """
    kind = param.device_mesh.device_type  # type: ignore[attr-defined]
    device = param.device
    if device.type != kind:
        device = torch.device(kind, torch.get_device_module(kind).current_device())
    result = values.to(device, copy=True)
    torch.distributed.all_reduce(result, op=getattr(torch.distributed.ReduceOp, op))
    return result.to(values.device)
