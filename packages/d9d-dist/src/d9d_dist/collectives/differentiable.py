"""Differentiable collectives for activations: each function has a forward and an adjoint, which runs in backward.

The correct adjoint depends on how ranks use the result. For a value that is equal on all ranks, gradients are *partial*
if each rank uses the value differently: the full gradient is their sum over ranks. Gradients are *equal* if all ranks
compute the same with the value: each rank has the full gradient. The name of a function or its argument `gradient`
states which case applies. A wrong choice silently scales gradients by a factor.

    function                          forward             backward
    copy_to_axis                      identity            all-reduce
    reduce_from_axis                  all-reduce          identity
    gather_from_axis, partial         all-gather          reduce-scatter
    gather_from_axis, equal           all-gather          this rank's part
    reduce_scatter_to_axis            reduce-scatter      all-gather
    scatter_to_axis                   this rank's part    all-gather
    all_to_all_reshard                all-to-all          all-to-all
    sum_over_ranks                    all-reduce          all-reduce

All functions take a 1-D mesh (`sum_over_ranks` a group). They are collective over it in forward and in backward, so all
ranks must run backward. On one rank they return the tensor itself. Sums are computed in the dtype of the tensor.
Tensors have the same shape on all ranks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist.collectives._compiled import all_gather, all_reduce, reduce_scatter
from d9d_dist.collectives._mesh_axes import only_axis
from d9d_dist.collectives.tensors import all_to_all, even_parts
from d9d_dist.errors import UserError

_Map: TypeAlias = Callable[[Tensor], Tensor]


def copy_to_axis(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return `x`, a tensor that is equal on all ranks. Backward all-reduces its gradient.

    For a value whose gradient is partial on each rank, such as the input of a column-parallel layer. The adjoint of
    `reduce_from_axis`.
    """
    return _apply(x, mesh, _identity, partial(all_reduce, group=_group(mesh)))


def reduce_from_axis(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum over ranks, by an all-reduce. Backward is the identity.

    For a partial value whose sum all ranks use in the same way, such as the output of a row-parallel layer. The adjoint
    of `copy_to_axis`.
    """
    return _apply(x, mesh, partial(all_reduce, group=_group(mesh)), _identity)


def gather_from_axis(x: Tensor, mesh: DeviceMesh, *, dim: int, gradient: Literal["partial", "equal"]) -> Tensor:
    """Return the ranks' shards, concatenated along `dim`, by an all-gather.

    Args:
        x: This rank's shard.
        mesh: Mesh of one axis.
        dim: Dim along which the ranks' shards are concatenated.
        gradient: `"partial"` if ranks use the result differently, such as for their own columns of a matrix: backward
            reduce-scatters (adjoint of `reduce_scatter_to_axis`). `"equal"` if all ranks compute the same with the
            result: backward takes this rank's part of its own gradient, without a collective (adjoint of
            `scatter_to_axis`).

    Raises:
        UserError: If `gradient` is neither `"partial"` nor `"equal"`.
    """
    group = _group(mesh)
    forward = partial(all_gather, group=group, dim=dim)
    match gradient:
        case "partial":
            return _apply(x, mesh, forward, partial(reduce_scatter, group=group, dim=dim))
        case "equal":
            return _apply(x, mesh, forward, partial(_take, group=group, dim=dim))
        case _:
            raise UserError(f"got gradient = {gradient!r}; expected 'partial' or 'equal'.")


def reduce_scatter_to_axis(x: Tensor, mesh: DeviceMesh, *, dim: int) -> Tensor:
    """Return this rank's shard, along `dim`, of the sum over ranks. One reduce-scatter; backward all-gathers.

    For a partial value if each rank needs one shard of the sum, such as the output of a row-parallel layer before a
    sequence-parallel one. The adjoint of `gather_from_axis` with partial gradients. Raises `UserError` if the number of
    ranks does not divide the size of the dim.
    """
    group = _group(mesh)
    forward, backward = partial(reduce_scatter, group=group, dim=dim), partial(all_gather, group=group, dim=dim)
    return _apply(x, mesh, forward, backward)


def scatter_to_axis(x: Tensor, mesh: DeviceMesh, *, dim: int) -> Tensor:
    """Return a copy of this rank's shard, along `dim`, of a tensor that is equal on all ranks.

    Backward all-gathers, so that the gradient of `x` is equal on all ranks. Raises `UserError` if the number of ranks
    does not divide the size of the dim.
    """
    group = _group(mesh)
    return _apply(x, mesh, partial(_take, group=group, dim=dim), partial(all_gather, group=group, dim=dim))


def all_to_all_reshard(x: Tensor, mesh: DeviceMesh, *, scatter_dim: int, gather_dim: int) -> Tensor:
    """Reshard a tensor from `gather_dim` to `scatter_dim`. One all-to-all; backward is the inverse.

    For attention over some heads and the whole sequence, between layers over all heads and a part of the sequence:
    "DeepSpeed Ulysses", arXiv:2309.14509. The received parts are concatenated along `gather_dim`. Raises `UserError` if
    the number of ranks does not divide the size of `scatter_dim`.
    """
    group = _group(mesh)
    forward = partial(_exchange, group=group, scatter_dim=scatter_dim, gather_dim=gather_dim)
    backward = partial(_exchange, group=group, scatter_dim=gather_dim, gather_dim=scatter_dim)
    return _apply(x, mesh, forward, backward)


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks. Backward sums the gradient over ranks. Both are all-reduces.

    For a sum that each rank uses differently, such as a statistic of the whole batch: gradients of the result are
    partial.
    """
    total = partial(all_reduce, group=group)
    return x if group.size() == 1 else _Collective.apply(x, total, total)


class _Collective(torch.autograd.Function):
    """Linear map of a tensor and its adjoint; differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: _Map, adjoint: _Map) -> Tensor:
        ctx.maps = forward, adjoint
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        forward, adjoint = ctx.maps
        return _Collective.apply(gradients[0], adjoint, forward), None, None


def _apply(x: Tensor, mesh: DeviceMesh, forward: _Map, adjoint: _Map) -> Tensor:
    return x if mesh.size() == 1 else _Collective.apply(x, forward, adjoint)


def _group(mesh: DeviceMesh) -> dist.ProcessGroup:
    only_axis(mesh, example="tp")
    return mesh.get_group()


def _identity(x: Tensor) -> Tensor:
    return x.view_as(x)


def _take(x: Tensor, *, group: dist.ProcessGroup, dim: int) -> Tensor:
    # A copy, so that the result may be changed in place and the whole tensor can be freed.
    return even_parts(x, group.size(), dim=dim)[group.rank()].clone(memory_format=torch.contiguous_format)


def _exchange(x: Tensor, *, group: dist.ProcessGroup, scatter_dim: int, gather_dim: int) -> Tensor:
    received = all_to_all(torch.stack(even_parts(x, group.size(), dim=scatter_dim)), group)
    return torch.cat(received.unbind(), dim=gather_dim)
