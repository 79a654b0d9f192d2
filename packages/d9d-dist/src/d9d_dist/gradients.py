"""What happens to gradients between backward and the optimizer: summed over ranks, divided once, measured, clipped."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from d9d_dist.context import DistributedContext


def set_gradient_sync(module: nn.Module, enabled: bool) -> None:
    """Choose whether the next backward passes reduce gradients over ranks, or only add them up locally.

    Reduce on the last microbatch of a step: the result is the same sum, for one reduction's traffic.

    Args:
        module: A model or one stage of it; a module without data parallelism is left alone.
        enabled: Whether to reduce.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.set_requires_gradient_sync(enabled, recurse=False)


@torch.no_grad()
def scale_gradients_(parameters: Iterable[nn.Parameter], factor: torch.Tensor | float) -> None:
    """Multiply every gradient by a factor, in place. No collectives.

    Args:
        parameters: Parameters; those without a gradient are passed over.
        factor: E.g. one over the global weight of the batch; a 0-dim tensor causes no host synchronisation.
    """
    gradients = [_local(gradient) for gradient in _gradients(parameters)]
    if not gradients:
        return
    if isinstance(factor, torch.Tensor):
        # A factor of the gradients' own dtype keeps the fused kernel; one of less than float32 would be inexact.
        factor = factor.to(torch.promote_types(gradients[0].dtype, torch.float32))
    torch._foreach_mul_(gradients, factor)


@torch.no_grad()
def global_grad_norm(
    parameters: Iterable[nn.Parameter], *, ctx: DistributedContext, norm_type: float = 2.0
) -> torch.Tensor:
    """The norm of all gradients of a job taken as one vector, each element counted once.

    Placements say what is split: powers are added up over the ranks of each axis on which a gradient is a `Shard`,
    never over a `Replicate`; stages of a pipeline hold different parameters and are added up too. One all-reduce for
    each distinct set of axes; no full tensor is built.

    Args:
        parameters: The parameters of this rank; plain tensors count as replicated over all ranks of a stage.
        ctx: The job's context.
        norm_type: The p of the p-norm; `float("inf")` for the maximum.

    Returns:
        A 0-dim tensor on the job's device, equal on every rank; float32, or float64 where a gradient is.
    """
    groups: dict[tuple[tuple[DeviceMesh, int], ...], list[torch.Tensor]] = {}
    for gradient in _gradients(parameters):
        groups.setdefault(_sharded_axes(gradient), []).append(_local(gradient))
    dtypes = [gradient.dtype for gradients in groups.values() for gradient in gradients]
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    reduction = dist.ReduceOp.MAX if norm_type == float("inf") else dist.ReduceOp.SUM
    total = torch.zeros((), dtype=dtype, device=ctx.device)
    for axes, gradients in groups.items():
        part = _accumulated_power(gradients, norm_type, dtype)
        for mesh, axis in axes:
            dist.all_reduce(part, op=reduction, group=mesh.get_group(axis))
        total = torch.maximum(total, part) if norm_type == float("inf") else total + part
    stages = ctx.mesh_for("regular")["pp"]
    if stages.size() > 1:
        dist.all_reduce(total, op=reduction, group=stages.get_group())
    return total if norm_type == float("inf") else total ** (1.0 / norm_type)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[nn.Parameter], max_norm: float, *, ctx: DistributedContext, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale all gradients down, in place, so that their global norm is at most `max_norm`; right in every layout.

    As `torch.nn.utils.clip_grad_norm_`, the factor is `max_norm / (norm + 1e-6)`, at most 1.

    Args:
        parameters: The parameters of this rank.
        max_norm: The largest norm to let pass; infinity only measures.
        ctx: The job's context.
        norm_type: The p of the p-norm.

    Returns:
        The global norm before clipping; see `global_grad_norm`, whose collectives this issues.
    """
    parameters = list(parameters)
    norm = global_grad_norm(parameters, ctx=ctx, norm_type=norm_type)
    if max_norm != float("inf"):
        scale_gradients_(parameters, (max_norm / (norm + 1e-6)).clamp_(max=1.0))
    return norm


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded_axes(gradient: torch.Tensor) -> tuple[tuple[DeviceMesh, int], ...]:
    """The mesh axes of more than one rank over which a gradient's elements are shared out."""
    if not isinstance(gradient, DTensor):
        return ()
    for placement in gradient.placements:
        assert not placement.is_partial(), "a gradient must be reduced before its norm is taken"
    return tuple(
        (gradient.device_mesh, axis)
        for axis, placement in enumerate(gradient.placements)
        if not placement.is_replicate() and gradient.device_mesh.size(axis) > 1
    )


def _accumulated_power(gradients: list[torch.Tensor], norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    """The sum over elements of |g|^p, or the largest |g|, of this rank's part, of which some shards may be empty."""
    filled = [gradient for gradient in gradients if gradient.numel()]
    if not filled:
        return torch.zeros((), dtype=dtype, device=gradients[0].device)
    norms = torch.stack(torch._foreach_norm(filled, norm_type, dtype=dtype))
    return norms.max() if norm_type == float("inf") else (norms**norm_type).sum()
