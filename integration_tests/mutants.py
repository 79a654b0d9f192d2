"""Deliberate bugs, each of which must make a cell of the oracle fail: an oracle that cannot fail proves nothing.

A mutant is a context in which every rank trains. It changes one thing, of the kinds that frameworks silently get wrong:
a reduction that is dropped or doubled, a mean for a sum, a norm that omits an axis, an order that is not restored.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

import d9d_dist.context_parallel.all_gather
import d9d_dist.context_parallel.all_to_all
import d9d_dist.context_parallel.ring
import d9d_dist.context_parallel.split
import d9d_dist.data_parallel.parallelize
import d9d_dist.gradients._gradient_buckets
import d9d_dist.gradients._local_parameters
import d9d_dist.gradients.gradient_norm
import d9d_dist.tensor_parallel.styles
import d9d_dist.tensor_parallel.vocab
import d9d_dist.values._fill_by_index
import d9d_loop.engine.model_build
import d9d_loop.engine.step_totals
import d9d_modules.chunked_cross_entropy
import d9d_pipeline._stage
import d9d_pipeline.channel
import d9d_pipeline.executor
from d9d_dist import (
    ContextSplit,
    DistributedContext,
    RowParallel,
    SequenceParallel,
    TensorRegion,
    gather_from_axis,
    indexed_blocks,
    local_tensor,
    reduce_from_axis,
    set_gradient_sync,
)
from d9d_dist.context_parallel.blocks import MergedBlocks
from d9d_dist.split_backward import DeferredWeightGrads
from d9d_pipeline import SharedParameters

Bug: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Builds the context manager that applies the bug on a rank."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug and the cell that must catch it.

    Attributes:
        name: Name of the bug.
        bug: Context manager that applies the bug.
        cell: Name of a cell of the oracle, or of a similar one.
        num_steps: Number of optimizer steps until the bug has an effect.
        is_nightly: True if the mutant runs only with `--all`, in the lane `oracle` of `.ci/nightly`. So does its cell,
            unless another mutant of the default run has the same cell.
    """

    name: str
    bug: Bug
    cell: str
    num_steps: int = 1
    is_nightly: bool = False


class Listed(Protocol):
    """Decorator that adds a bug to a list, with the cell that must catch it."""

    def __call__(self, cell: str, *, num_steps: int = 1, is_nightly: bool = False) -> Callable[[Bug], Bug]: ...


def list_in(mutants: list[Mutant]) -> Listed:
    """Return the decorator for a list."""

    def caught_by(cell: str, *, num_steps: int = 1, is_nightly: bool = False) -> Callable[[Bug], Bug]:
        def put(bug: Bug) -> Bug:
            name = getattr(bug, "__name__", repr(bug)).replace("_", " ")
            mutants.append(Mutant(name, bug, cell, num_steps, is_nightly))
            return bug

        return put

    return caught_by


MUTANTS: list[Mutant] = []
caught_by = list_in(MUTANTS)


@contextmanager
def collectives_replaced(module: Any, **replaced: Any) -> Generator[None]:
    """Replace functions of `torch.distributed` in one module."""

    class Changed(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

    with mock.patch.object(module, "dist", Changed(**replaced)):
        yield


class _Done:
    """Work handle of an asynchronous collective that was not started."""

    def wait(self) -> None:
        pass


# --- sums over data-parallel ranks


@caught_by("dense,dp_shard=2")
def sharded_gradients_are_averaged() -> AbstractContextManager[object]:
    return mock.patch.object(FSDPModule, "set_gradient_divide_factor", return_value=None)


@contextmanager
def _hybrid_over(change: Callable[[DeviceMesh, str], DeviceMesh]) -> Generator[None]:
    """Apply hybrid sharding over fewer axes than given; the Trainer's own check would refuse it."""
    with (
        mock.patch.object(d9d_dist.data_parallel.parallelize, "_replicate_and_shard", change),
        mock.patch.object(d9d_loop.engine.model_build, "check_parallelized"),
    ):
        yield


@caught_by("dense,dp_replicate=2,dp_shard=2")
def hybrid_sharding_does_not_reduce_over_replicas() -> AbstractContextManager[object]:
    return _hybrid_over(lambda mesh, axis: mesh[axis])


@caught_by("dense,dp_shard=2,cp_replicate=2", is_nightly=True)
def hybrid_sharding_forgets_the_axis_after_the_shards() -> AbstractContextManager[object]:
    real = d9d_dist.data_parallel.parallelize._replicate_and_shard
    return _hybrid_over(lambda mesh, axis: real(mesh["dp_replicate", axis], axis))


@caught_by("plain,dp_replicate=2")
def replicas_are_not_reduced() -> AbstractContextManager[object]:
    return collectives_replaced(d9d_dist.gradients._gradient_buckets, all_reduce=lambda *args, **kwargs: _Done())


@caught_by("plain,dp_replicate=2", is_nightly=True)
def replicas_are_reduced_twice() -> AbstractContextManager[object]:
    def twice(tensor: Tensor, **kwargs: Any) -> Any:
        dist.all_reduce(tensor, group=kwargs["group"])
        return dist.all_reduce(tensor, **kwargs)

    return collectives_replaced(d9d_dist.gradients._gradient_buckets, all_reduce=twice)


@caught_by("plain,dp_replicate=2", is_nightly=True)
def replicas_are_averaged() -> AbstractContextManager[object]:
    def mean(tensor: Tensor, **kwargs: Any) -> Any:
        return dist.all_reduce(tensor.div_(dist.get_world_size(kwargs["group"])), **kwargs)

    return collectives_replaced(d9d_dist.gradients._gradient_buckets, all_reduce=mean)


@caught_by("plain,dp_replicate=2,cp_replicate=2", is_nightly=True)
def replicas_that_split_a_sequence_are_not_reduced() -> AbstractContextManager[object]:
    real = d9d_dist.gradients._local_parameters.LocalParameters.gradient_placements

    def forgetful(self: Any, parameter: DTensor) -> Any:
        self.partial_axes.discard("cp_replicate")
        return real(self, parameter)

    return mock.patch.object(d9d_dist.gradients._local_parameters.LocalParameters, "gradient_placements", forgetful)


@caught_by("dense,dp_shard=2,microbatch=1")
@contextmanager
def only_the_last_microbatch_counts() -> Generator[None]:
    real = d9d_pipeline._stage.Stage.forward

    def forget(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._module.zero_grad()
        return real(self, *args, **kwargs)

    def always(module: nn.Module, enabled: bool) -> None:
        set_gradient_sync(module, True)

    with (
        mock.patch.object(d9d_pipeline._stage.Stage, "forward", forget),
        mock.patch.object(d9d_pipeline._stage, "set_gradient_sync", always),
    ):
        yield


@caught_by("plain,dp_replicate=2,microbatch=1", is_nightly=True)
def replicas_keep_the_first_microbatch_only() -> AbstractContextManager[object]:
    real = d9d_dist.gradients._gradient_buckets.Slot.set_aside

    def forget(self: Any) -> None:
        self.parameter.grad = None
        real(self)

    return mock.patch.object(d9d_dist.gradients._gradient_buckets.Slot, "set_aside", forget)


# --- the global weight


@caught_by("dense,dp_shard=2,mask=ragged")
def each_rank_divides_by_its_own_weight() -> AbstractContextManager[object]:
    return collectives_replaced(d9d_loop.engine.step_totals, all_reduce=lambda *args, **kwargs: None)


@caught_by("dense,cp_shard=2", is_nightly=True)
def the_weight_omits_context_parallel_ranks() -> AbstractContextManager[object]:
    real = DistributedContext.group_for
    return mock.patch.object(
        DistributedContext, "group_for", lambda self, domain, *axes: real(self, domain, *(set(axes) - {"cp"}))
    )


@caught_by("dense,tp=2,dp_shard=2", is_nightly=True)
@contextmanager
def the_weight_counts_tensor_parallel_ranks() -> Generator[None]:
    """Count tokens once per tensor-parallel rank: the loss is correct, but gradients are too small."""

    def doubled(totals: Tensor, **kwargs: Any) -> None:
        dist.all_reduce(totals, group=kwargs["group"])
        totals.mul_(2)

    with collectives_replaced(d9d_loop.engine.step_totals, all_reduce=doubled):
        yield


# --- the norm


def _norm_over(change: Callable[[DeviceMesh, tuple[Any, ...]], tuple[Any, ...]]) -> AbstractContextManager[object]:
    """Compute the norm with other placements of the parameters."""
    real = d9d_dist.gradients.gradient_norm._splits
    return mock.patch.object(
        d9d_dist.gradients.gradient_norm, "_splits", lambda mesh, placements: real(mesh, change(mesh, placements))
    )


@caught_by("dense,dp_shard=2", is_nightly=True)
def the_norm_forgets_that_parameters_are_sharded() -> AbstractContextManager[object]:
    return _norm_over(lambda mesh, placements: (Replicate(),) * len(placements))


@caught_by("dense,dp_shard=2,tp=2", is_nightly=True)
def the_norm_forgets_the_tensor_parallel_axis() -> AbstractContextManager[object]:
    return _norm_over(lambda mesh, placements: (*placements[:-1], Replicate()))


@caught_by("dense,dp_replicate=2,dp_shard=2", is_nightly=True)
def the_norm_counts_replicas() -> AbstractContextManager[object]:
    return _norm_over(lambda mesh, placements: (Shard(0),) * len(placements))


@caught_by("dense,dp_shard=2", is_nightly=True)
def gradients_are_clipped_by_the_norm_of_a_shard() -> AbstractContextManager[object]:
    return collectives_replaced(d9d_dist.gradients.gradient_norm, all_reduce=lambda *args, **kwargs: None)


# --- tensor parallelism


@caught_by("dense,tp=2")
def a_sequence_parallel_norm_is_not_reduced() -> AbstractContextManager[object]:
    return mock.patch.object(SequenceParallel, "has_partial_gradients", False)


@caught_by("dense,tp=2", is_nightly=True)
def a_norm_over_heads_is_not_reduced() -> AbstractContextManager[object]:
    return mock.patch.object(TensorRegion, "has_partial_gradients", False)


@caught_by("plain,tp=2")
def parts_of_an_inputs_gradient_are_not_summed() -> AbstractContextManager[object]:
    return mock.patch.object(d9d_dist.tensor_parallel.styles, "copy_to_axis", lambda x, mesh: x)


@caught_by("plain,tp=2", is_nightly=True)
def an_output_and_its_gradient_are_both_summed() -> AbstractContextManager[object]:
    real = d9d_dist.tensor_parallel.styles.copy_to_axis
    return mock.patch.object(
        d9d_dist.tensor_parallel.styles, "reduce_from_axis", lambda x, mesh: reduce_from_axis(real(x, mesh), mesh)
    )


@caught_by("plain,tp=2", is_nightly=True)
def a_row_parallel_output_is_not_summed() -> AbstractContextManager[object]:
    return mock.patch.object(d9d_dist.tensor_parallel.styles, "reduce_from_axis", lambda x, mesh: x)


@caught_by("dense,tp=2", is_nightly=True)
def gathered_tokens_give_each_rank_its_own_gradient_only() -> AbstractContextManager[object]:
    def equal(x: Tensor, mesh: Any, *, dim: int, gradient: str) -> Tensor:
        return gather_from_axis(x, mesh, dim=dim, gradient="equal")

    return mock.patch.object(d9d_dist.tensor_parallel.styles, "gather_from_axis", equal)


@caught_by("plain,tp=2")
def gathered_logits_count_their_gradient_on_every_rank() -> AbstractContextManager[object]:
    def partial(x: Tensor, mesh: Any, *, dim: int, gradient: str) -> Tensor:
        return gather_from_axis(x, mesh, dim=dim, gradient="partial")

    return mock.patch.object(d9d_dist.tensor_parallel.styles, "gather_from_axis", partial)


@caught_by("plain,tp=2", is_nightly=True)
def every_rank_adds_the_bias() -> AbstractContextManager[object]:
    def forward(self: RowParallel, module: nn.Module, mesh: Any, inner: Any, *args: Any) -> Tensor:
        return d9d_dist.tensor_parallel.styles._redistribute_output(inner(*args), self.output, mesh)

    return mock.patch.object(RowParallel, "forward", forward)


@caught_by("dense,tp=2", is_nightly=True)
def tokens_of_other_ranks_are_embedded_too() -> AbstractContextManager[object]:
    real = d9d_dist.tensor_parallel.vocab._local_ids

    def everywhere(ids: Tensor, num_local: int, mesh: Any) -> tuple[Tensor, Tensor]:
        local, is_here = real(ids, num_local, mesh)
        return local, torch.ones_like(is_here)

    return mock.patch.object(d9d_dist.tensor_parallel.vocab, "_local_ids", everywhere)


@caught_by("dense,tp=2")
def a_loss_normalizes_over_its_part_of_the_vocabulary() -> AbstractContextManager[object]:
    def only_the_largest(tensor: Tensor, **kwargs: Any) -> None:
        if kwargs.get("op") is dist.ReduceOp.MAX:
            dist.all_reduce(tensor, **kwargs)

    return collectives_replaced(d9d_modules.chunked_cross_entropy, all_reduce=only_the_largest)


@caught_by("tied,tp=2")
@contextmanager
def splitting_unties_the_head() -> Generator[None]:
    """Disable the Trainer's check, which refuses such a model, so that the oracle has to detect it."""
    real = d9d_dist.gradients._local_parameters.distribute_parameters

    def untie(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        head = model.get_submodule("lm_head")
        head.weight = nn.Parameter(head.get_parameter("weight").detach())
        real(model, *args, **kwargs)

    with (
        mock.patch("d9d_dist.tensor_parallel.parallelize.distribute_parameters", untie),
        mock.patch.object(d9d_loop.engine.model_build, "check_unchanged"),
    ):
        yield


@caught_by("plain,tp=2")
def the_weight_is_summed_over_tensor_parallel_ranks() -> AbstractContextManager[object]:
    real = DistributedContext.group_for

    def with_tensor_parallel(self: Any, domain: Any, *axes: str) -> Any:
        return real(self, domain, *({*axes, "tp"} if domain == "batch" else axes))

    return mock.patch.object(DistributedContext, "group_for", with_tensor_parallel)


# --- pipeline parallelism


@caught_by("tied,pp=2")
def the_head_keeps_its_share_of_a_tied_gradient() -> AbstractContextManager[object]:
    return mock.patch.object(SharedParameters, "add_gradients")


@caught_by("tied,pp=4", is_nightly=True)
def a_tied_gradient_is_added_twice_with_more_than_two_ranks() -> AbstractContextManager[object]:
    real = SharedParameters._to_owner

    def twice(self: Any, pair: Any) -> Tensor | None:
        gradient = real(self, pair)
        return gradient if gradient is None or self._group.size() <= 2 else 2 * gradient

    return mock.patch.object(SharedParameters, "_to_owner", twice)


@caught_by("tied,pp=2,schedule=zbv", num_steps=2)
def the_head_keeps_its_value_of_a_tied_weight() -> AbstractContextManager[object]:
    return mock.patch.object(SharedParameters, "copy_values")


@caught_by("dense,pp=2,schedule=zb1p,microbatch=1")
def deferred_weight_gradients_are_never_computed() -> AbstractContextManager[object]:
    return mock.patch.object(DeferredWeightGrads, "compute")


@caught_by("dense,pp=2,dp_shard=2,schedule=zbv,microbatch=1", is_nightly=True)
@contextmanager
def split_gradients_are_reduced_after_the_first_microbatch() -> Generator[None]:
    real = d9d_pipeline._stage.Stage.__init__

    def first(self: Any, module: nn.Module, **options: Any) -> None:
        options["last_backward"] = None if options["last_backward"] is None else 0
        real(self, module, **options)

    with mock.patch.object(d9d_pipeline._stage.Stage, "__init__", first):
        yield


@caught_by("dense,pp=2")
def the_norm_covers_only_the_stages_of_the_rank() -> AbstractContextManager[object]:
    return collectives_replaced(d9d_dist.gradients.gradient_norm, all_reduce=lambda *args, **kwargs: None)


@caught_by("dense,pp=2", is_nightly=True)
def only_the_last_stage_knows_the_weight() -> AbstractContextManager[object]:
    real = DistributedContext.group_for

    def without_pipeline(self: Any, domain: Any, *axes: str) -> Any:
        return real(self, domain, *(set(axes) - {"pp"} or axes))

    return mock.patch.object(DistributedContext, "group_for", without_pipeline)


@caught_by("dense,pp=2,microbatch=1,mask=ragged")
@contextmanager
def every_loss_uses_the_first_batch() -> Generator[None]:
    real = d9d_pipeline.executor.Executor._loss

    def first(self: Any, stage: int, microbatch: int, step: Any) -> None:
        handler = step.on_output
        step.on_output = lambda output, _: handler(output, 0)
        real(self, stage, microbatch, step)
        step.on_output = handler

    with mock.patch.object(d9d_pipeline.executor.Executor, "_loss", first):
        yield


@caught_by("plain,pp=2")
def sent_gradients_are_zero() -> AbstractContextManager[object]:
    real = d9d_pipeline.channel.Channel.send_gradients

    def zeros(self: Any, gradients: Any, **options: Any) -> None:
        real(self, [gradient if gradient is None else torch.zeros_like(gradient) for gradient in gradients], **options)

    return mock.patch.object(d9d_pipeline.channel.Channel, "send_gradients", zeros)


@caught_by("dense,pp=2,microbatch=1,schedule=zbv", is_nightly=True)
@contextmanager
def gradients_of_the_own_next_stage_are_halved() -> Generator[None]:
    real = d9d_pipeline._stage.Stage.backward_input

    def halved(self: Any, *args: Any) -> Any:
        received, later = real(self, *args)
        return [gradient if gradient is None else gradient / 2 for gradient in received], later

    with mock.patch.object(d9d_pipeline._stage.Stage, "backward_input", halved):
        yield


# --- context parallelism


@caught_by("plain,cp_shard=2")
def positions_count_from_zero_on_every_rank() -> AbstractContextManager[object]:
    def local(self: ContextSplit, length: int) -> Tensor:
        return torch.arange(length // self.mesh.size()).unsqueeze(0)

    return mock.patch.object(ContextSplit, "positions", local)


@caught_by("dense,cp_shard=2", is_nightly=True)
def the_load_balance_is_not_undone() -> AbstractContextManager[object]:
    return mock.patch.object(d9d_dist.context_parallel.all_gather, "to_natural_order", lambda x, num_ranks, dim: x)


@caught_by("dense,cp_shard=2,method=all_to_all", is_nightly=True)
def exchanged_heads_keep_the_order_of_ranks() -> AbstractContextManager[object]:
    return mock.patch.object(d9d_dist.context_parallel.all_to_all, "to_natural_order", lambda x, num_ranks, dim: x)


@caught_by("dense,cp_shard=2", is_nightly=True)
def keys_get_the_gradient_of_their_own_rank_only() -> AbstractContextManager[object]:
    def equal(x: Tensor, mesh: Any, *, dim: int, gradient: str) -> Tensor:
        return gather_from_axis(x, mesh, dim=dim, gradient="equal")

    return mock.patch.object(d9d_dist.context_parallel.all_gather, "gather_from_axis", equal)


@caught_by("dense,cp_shard=2,method=ring", is_nightly=True)
def a_ring_ignores_keys_of_other_ranks() -> AbstractContextManager[object]:
    return mock.patch.object(MergedBlocks, "add", return_value=None)


@caught_by("dense,cp_shard=2,method=ring", is_nightly=True)
def a_ring_keeps_the_gradients_of_received_keys() -> AbstractContextManager[object]:
    real = d9d_dist.context_parallel.ring._send_to_next

    def keep(tensors: list[Tensor], mesh: Any, *, tag: int) -> Any:
        arrival: Any = real(tensors, mesh, tag=tag)
        if tag:
            arrival._kept, arrival._received = arrival._received, tensors  # gloo still writes to the received tensors
        return arrival

    return mock.patch.object(d9d_dist.context_parallel.ring, "_send_to_next", keep)


@caught_by("plain,cp_shard=2")
def documents_are_forgotten_where_a_row_is_cut() -> AbstractContextManager[object]:
    cls = d9d_dist.context_parallel.all_gather.AllGatherAttention
    real = cls.__call__
    return mock.patch.object(cls, "__call__", lambda self, q, k, v, documents_BS=None: real(self, q, k, v))


@caught_by("dense,cp_shard=2")
def a_rank_takes_consecutive_tokens() -> AbstractContextManager[object]:
    def consecutive(self: ContextSplit) -> tuple[int, int]:
        rank = self.mesh.get_local_rank()
        return 2 * rank, 2 * rank + 1

    return mock.patch.object(ContextSplit, "_chunks", consecutive)


# --- initial values


@caught_by("dense,dp_shard=2", is_nightly=True)
def initial_values_follow_the_shard() -> AbstractContextManager[object]:
    def from_zero(tensor: Tensor, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        yield from indexed_blocks(local_tensor(tensor), name)

    return mock.patch.object(d9d_dist.values._fill_by_index, "indexed_blocks", from_zero)
