"""Global gradient norm. Parameter placements define which ranks hold an element, so each element counts once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from d9d_dist.collectives._mesh_axes import axis_names
from d9d_dist.errors import UserError
from d9d_dist.gradients._owned_gradient import refuse_sparse
from d9d_dist.groups.context import DistributedContext

_WIDE = frozenset((torch.float64, torch.complex128))


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
        UserError: If a gradient is not reduced yet, its placements differ from those of its parameter, or it is sparse.
    """
    norms = list(_stage_norms(parameters, ctx, norm_type).values())
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
        0-dim tensors by the axes larger than 1 that shard the gradients, e.g. `"dp_cp_shard x tp"`, or by the ranks of
        axes without names;
        `"replicated"` for gradients that are equal on every rank of a stage.
    """
    return _stage_norms(parameters, ctx, norm_type)


@final
@dataclass(frozen=True, slots=True)
class _Part:
    """This rank's gradient shards that share the same sharding axes.

    Attributes:
        name: Names of these axes, joined by `" x "`.
    """

    name: str
    groups: tuple[dist.ProcessGroup, ...]
    gradients: list[torch.Tensor] = field(default_factory=list)


def _stage_norms(
    parameters: Iterable[nn.Parameter], ctx: DistributedContext, norm_type: float
) -> dict[str, torch.Tensor]:
    """Return the norm of each part by name; equal on all ranks of a stage."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    is_wide = _WIDE.intersection(parameter.dtype for parameter in trained)
    dtype = torch.float64 if is_wide else torch.float32
    parts = _group(trained)
    norms = {part.name: _shard_norm(part.gradients, norm_type, dtype, ctx.device) for part in parts}
    # Reductions over different axes commute, so all parts sharded over a group share one all-reduce.
    for group in dict.fromkeys(group for part in parts for group in part.groups):
        names = [part.name for part in parts if group in part.groups]
        stacked = torch.stack([norms[name] for name in names])
        _all_reduce_norms(stacked, norm_type, group)
        norms.update(zip(names, stacked.unbind(), strict=True))
    return norms


def _group(parameters: Sequence[nn.Parameter]) -> list[_Part]:
    """Return the parts, in an order that depends only on the parameters and is equal on all ranks of a stage."""
    parts: dict[str, _Part] = {}
    plain: list[torch.Tensor] = []
    if not all(isinstance(parameter, DTensor) for parameter in parameters):
        parts["replicated"] = _Part("replicated", (), plain)
    by_placement: dict[tuple[DeviceMesh, tuple[Placement, ...]], _Part] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor):
            if gradient is not None:
                refuse_sparse(gradient)
                plain.append(gradient)
            continue
        place = (parameter.device_mesh, parameter.placements)
        if place not in by_placement:
            part = _Part(*_splits(*place))
            by_placement[place] = parts.setdefault(part.name, part)
            assert by_placement[place].groups == part.groups, "axes of the same name have the same process group"
        if gradient is not None:
            by_placement[place].gradients.append(_local_gradient(parameter, gradient))
    return list(parts.values())


def _splits(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[str, tuple[dist.ProcessGroup, ...]]:
    """Return the joined names and the process groups of the mesh axes that shard a tensor, e.g. `dp_shard x tp`.

    Axes of size 1 are skipped. The name is `replicated` if no axis remains.
    """
    axes = [
        (name, mesh.get_group(axis))
        for axis, (name, placement) in enumerate(zip(axis_names(mesh), placements, strict=True))
        if not placement.is_replicate() and mesh.size(axis) > 1
    ]
    return " x ".join(name for name, _ in axes) or "replicated", tuple(group for _, group in axes)


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
