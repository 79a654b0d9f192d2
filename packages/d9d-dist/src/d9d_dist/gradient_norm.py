"""Global gradient norm. Parameter placements define which ranks hold an element, so each element counts once."""

from collections.abc import Iterable, Sequence
from functools import cache
from math import inf
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from d9d_dist._mesh_axes import axis_names
from d9d_dist.context import DistributedContext
from d9d_dist.errors import UserError

_WIDE = frozenset((torch.float64, torch.complex128))

_Part: TypeAlias = tuple[str, tuple[dist.ProcessGroup, ...]]
"""Joined names and process groups of the axes of more than one rank that shard some gradients."""

_REPLICATED: _Part = ("replicated", ())


@torch.no_grad()
def global_grad_norm(
    parameters: Iterable[nn.Parameter], *, ctx: DistributedContext, norm_type: float = 2.0
) -> torch.Tensor:
    """Return the norm of all gradients of a job as one vector, each element counted once.

    Parameters are grouped by the mesh axes that shard them (see `grad_norm_parts`), and pipeline stages are combined.
    Collective: one all-reduce of a few numbers for each process group of those axes, and one over several pipeline
    stages. No full tensors and no host-device synchronization.

    Args:
        parameters: All parameters of this rank, including those without a gradient: collectives depend only on the
            parameters, so a gradient may be missing on some ranks. Plain tensors count as replicated over all ranks of
            a stage, missing gradients as zero.
        ctx: Distributed context.
        norm_type: The p of the p-norm; `float("inf")` for the maximum.

    Returns:
        A 0-dim tensor on the job's device, equal on every rank: float64 if a parameter is, or if there are several
        pipeline stages; else float32.

    Raises:
        UserError: If a gradient is not reduced yet, or its placements differ from those of its parameter.
    """
    norms = list(grad_norm_parts(parameters, ctx=ctx, norm_type=norm_type).values())
    if len(norms) == 1:
        norm = norms[0]
    else:
        norm = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), device=ctx.device)
    if ctx.size("regular", "pp") > 1:
        norm = norm.double()  # dtypes may differ between stages, and a stage may have no parameters
        _all_reduce_norms(norm, norm_type, ctx.group_for("regular", "pp"))
    return norm


@torch.no_grad()
def grad_norm_parts(
    parameters: Iterable[nn.Parameter], *, ctx: DistributedContext, norm_type: float = 2.0
) -> dict[str, torch.Tensor]:
    """Return the norms of groups of gradients that are sharded over the same axes, e.g. to locate exploding gradients.

    The p-th powers of the norms add up to the p-th power of the stage's norm. Issues the collectives of
    `global_grad_norm` except the one over pipeline stages, which have separate parts. Arguments and errors are those of
    `global_grad_norm`.

    Returns:
        0-dim tensors by the axes larger than 1 that shard the gradients, e.g. `"dp_cp_shard x tp"`;
        `"replicated"` for gradients that are equal on every rank of a stage.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    is_wide = _WIDE.intersection(parameter.dtype for parameter in trained)
    dtype = torch.float64 if is_wide else torch.float32
    parts = _group(trained)
    assert len({name for name, _ in parts}) == len(parts), "axes of the same name have the same process group"
    norms = {part: _shard_norm(gradients, norm_type, dtype, ctx.device) for part, gradients in parts.items()}
    # Reductions over different axes commute, so all parts sharded over a group share one all-reduce.
    for group in dict.fromkeys(group for _, groups in parts for group in groups):
        sharing = [part for part in parts if group in part[1]]
        stacked = torch.stack([norms[part] for part in sharing])
        _all_reduce_norms(stacked, norm_type, group)
        norms.update(zip(sharing, stacked.unbind(), strict=True))
    return {name: norm for (name, _), norm in norms.items()}


def _group(parameters: Sequence[nn.Parameter]) -> dict[_Part, list[torch.Tensor]]:
    """Return this rank's gradient shards by part, in an order that is equal on all ranks of a stage."""
    part_of = cache(_splits)
    has_plain = not all(isinstance(parameter, DTensor) for parameter in parameters)
    parts: dict[_Part, list[torch.Tensor]] = {_REPLICATED: []} if has_plain else {}
    for parameter in parameters:
        is_distributed = isinstance(parameter, DTensor)
        part = part_of(parameter.device_mesh, parameter.placements) if is_distributed else _REPLICATED
        shards = parts.setdefault(part, [])
        if parameter.grad is not None:
            shards.append(_local_gradient(parameter, parameter.grad) if is_distributed else parameter.grad)
    return parts


def _splits(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> _Part:
    axes = [
        (name, mesh.get_group(axis))
        for axis, (name, placement) in enumerate(zip(axis_names(mesh), placements, strict=True))
        if not placement.is_replicate() and mesh.size(axis) > 1
    ]
    return (" x ".join(name for name, _ in axes), tuple(group for _, group in axes)) if axes else _REPLICATED


def _local_gradient(parameter: DTensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a gradient; raise if its placements differ from the parameter's."""
    if not isinstance(gradient, DTensor):
        raise UserError(
            f"got a plain tensor as the gradient of a parameter of shape {tuple(parameter.shape)} that is a DTensor; "
            f"expected a DTensor with the placements {_show(parameter.placements)}, which determine the elements of "
            "this rank. Convert it with DTensor.from_local."
        )
    if gradient.placements != parameter.placements:
        raise UserError(
            f"got a gradient with the placements {_show(gradient.placements)} for a parameter of shape "
            f"{tuple(parameter.shape)} with {_show(parameter.placements)}, on the axes "
            f"({', '.join(axis_names(parameter.device_mesh))}); expected equal placements. A Partial gradient is not"
            " reduced yet: call GradientSync.finish(), or sync_gradients(model), before computing its norm."
        )
    return gradient.to_local()


def _show(placements: Sequence[Placement]) -> str:
    return f"({', '.join(map(repr, placements))})"


def _shard_norm(
    gradients: Sequence[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the norm of this rank's shards, which may be empty."""
    filled = [gradient.abs() if gradient.is_complex() else gradient for gradient in gradients if gradient.numel()]
    if not filled:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(filled, norm_type, dtype=dtype)), norm_type)


def _all_reduce_norms(norms: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> None:
    """Replace norms over this rank's shards by norms over the shards of all ranks, in place. Collective."""
    if norm_type == inf:
        dist.all_reduce(norms, op=dist.ReduceOp.MAX, group=group)
        return
    dist.all_reduce(norms.pow_(norm_type), group=group)
    norms.pow_(1.0 / norm_type)
