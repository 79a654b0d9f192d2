"""Collectives that autograd goes through, for activations: each is a pair of a forward and its adjoint, in backward.

Which adjoint is right depends on what ranks do with the result. Where a value is equal on all ranks, their gradients of
it are either *partial* (each rank used it for something else: the gradient is their sum) or *equal* (all ranks computed
the same with it: the gradient is what any of them has). A function says by its name or its `gradient` which it assumes;
getting it wrong makes gradients wrong by a factor, silently.

    function                          forward             backward
    enter_partial                     identity            all-reduce
    sum_partial                       all-reduce          identity
    gather_shards, partial            all-gather          reduce-scatter
    gather_shards, equal              all-gather          this rank's part
    scatter_partial                   reduce-scatter      all-gather
    take_shard                        this rank's part    all-gather
    exchange                          all-to-all          all-to-all
    sum_over_ranks                    all-reduce          all-reduce

All take a mesh of one axis, `sum_over_ranks` a group, and are collective over it, in backward too, so that all ranks
have to go backward. On one rank they return the tensor as it is. Sums are taken in the dtype of the tensor.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist._mesh_axes import only_axis
from d9d_dist.collectives import all_gather, all_to_all, even_parts, reduce_scatter
from d9d_dist.errors import UserError

_Map: TypeAlias = Callable[[Tensor], Tensor]


def enter_partial(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Forward: identity. Backward: sum over ranks (`sum_partial`'s adjoint).

    For a value that is equal on all ranks, of which each rank's use gives a part of the gradient: the input of a
    column-parallel layer.

    Args:
        x: Equal on all ranks.
        mesh: One axis.
    """
    return _apply(x, mesh, _identity, partial(_sum, group=_group(mesh)))


def sum_partial(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Forward: sum over ranks. Backward: identity (`enter_partial`'s adjoint).

    For a value of which each rank holds a part; afterwards all hold the sum and compute the same with it: the output of
    a row-parallel layer.

    Args:
        x: This rank's part, of the same shape on all ranks.
        mesh: One axis.
    """
    return _apply(x, mesh, partial(_sum, group=_group(mesh)), _identity)


def gather_shards(x: Tensor, mesh: DeviceMesh, *, dim: int, gradient: Literal["partial", "equal"]) -> Tensor:
    """Forward: all-gather. Backward: reduce-scatter (adjoint of `scatter_partial`) or this rank's part (`take_shard`).

    Args:
        x: This rank's shard, of the same shape on all ranks.
        mesh: One axis.
        dim: The dim along which ranks' shards follow each other.
        gradient: What the gradient of the result is on each rank: a part of a sum (ranks use the result for different
            things, such as their columns of a matrix), or equal on all (they all do the same with it).

    Raises:
        UserError: If the gradient is said to be anything else.
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


def scatter_partial(x: Tensor, mesh: DeviceMesh, *, dim: int) -> Tensor:
    """Forward: reduce-scatter. Backward: all-gather (`gather_shards`' adjoint).

    For a value of which each rank holds a part of the sum; afterwards each holds its shard of the sum: the output of a
    row-parallel layer before a sequence-parallel one.

    Args:
        x: This rank's part, of the same shape on all ranks.
        mesh: One axis.
        dim: The dim that is cut.

    Raises:
        UserError: If the number of ranks does not divide the size of the dim.
    """
    group = _group(mesh)
    forward, backward = partial(reduce_scatter, group=group, dim=dim), partial(all_gather, group=group, dim=dim)
    return _apply(x, mesh, forward, backward)


def take_shard(x: Tensor, mesh: DeviceMesh, *, dim: int) -> Tensor:
    """Forward: this rank's part, copied. Backward: all-gather, so that the gradient of `x` is equal on all ranks.

    Args:
        x: Equal on all ranks.
        mesh: One axis.
        dim: The dim that is cut.

    Raises:
        UserError: If the number of ranks does not divide the size of the dim.
    """
    group = _group(mesh)
    return _apply(x, mesh, partial(_take, group=group, dim=dim), partial(all_gather, group=group, dim=dim))


def exchange(x: Tensor, mesh: DeviceMesh, *, scatter_dim: int, gather_dim: int) -> Tensor:
    """Forward: all-to-all; what was split on `gather_dim` is split on `scatter_dim`. Backward: the opposite.

    For attention on some of the heads and all of the sequence, between layers on all heads and a part of the sequence:
    "DeepSpeed Ulysses", arXiv:2309.14509.

    Args:
        x: Of the same shape on all ranks.
        mesh: One axis.
        scatter_dim: The dim of which each rank keeps one part and gives one to every other.
        gather_dim: The dim along which the received parts follow each other.

    Raises:
        UserError: If the number of ranks does not divide the size of `scatter_dim`.
    """
    group = _group(mesh)
    forward = partial(_exchange, group=group, scatter_dim=scatter_dim, gather_dim=gather_dim)
    backward = partial(_exchange, group=group, scatter_dim=gather_dim, gather_dim=scatter_dim)
    return _apply(x, mesh, forward, backward)


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Forward: sum over ranks. Backward: sum over ranks.

    For a sum that each rank uses for something else, such as a statistic of the whole batch: the rank's gradient of it
    is a part.

    Args:
        x: This rank's part, of the same shape on all ranks.
        group: The ranks.
    """
    total = partial(_sum, group=group)
    return x if group.size() == 1 else _Collective.apply(x, total, total)


class _Collective(torch.autograd.Function):
    """A linear map of tensors and its adjoint; the gradient can be differentiated again, by the map itself."""

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


def _sum(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _take(x: Tensor, *, group: dist.ProcessGroup, dim: int) -> Tensor:
    # A copy, so that the result may be changed in place, and the whole tensor be freed.
    return even_parts(x, group.size(), dim=dim)[group.rank()].clone(memory_format=torch.contiguous_format)


def _exchange(x: Tensor, *, group: dist.ProcessGroup, scatter_dim: int, gather_dim: int) -> Tensor:
    received = all_to_all(torch.stack(even_parts(x, group.size(), dim=scatter_dim)), group)
    return torch.cat(received.unbind(), dim=gather_dim)
