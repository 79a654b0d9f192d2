"""Weights of a model with the names and shapes of an export, without files: gathered tensors or this rank's shards.

For programs that receive weights during training, such as inference engines.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from d9d_dist import DistributedContext, Region, UserError, gather_in_blocks, local_region, local_tensor
from d9d_state._export_plan import exchange_stages
from d9d_state._ranks import num_ranks
from d9d_state.mapper.fill import Destination, ReadRecorder
from d9d_state.mapper.graph import StateGroup
from d9d_state.mapper.names import identity_of
from d9d_state.mapper.state_mapper import StateMapper
from d9d_state.module_tensors import module_tensors
from d9d_state.tensor_info import TensorInfo


def gathered_weights(
    model: nn.Module, mapper: StateMapper | None = None, ctx: DistributedContext | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that `save_model_state` would write, unsharded, one group of the mapper at a time. Collective.

    The ranks of a pipeline stage gather a group and transform it, and every rank yields its tensors. A rank holds one
    group in addition to the model and to the tensors that the caller keeps. A loop variable keeps one tensor, until the
    variable is deleted. Ranks must consume the iterator completely, and must not change the model before its end.

    Args:
        model: Whole model or this rank's pipeline stage, on any device, with plain tensors or `DTensor`s.
        mapper: Maps names and shapes in memory to those on disk, usually `load_mapper.inverse()`; `None` keeps them.
        ctx: Distributed context; `None` for a single process.

    Yields:
        Name and tensor, on the device of the model, for this rank's stage, in the order of the mapper's groups. The
        tensor may be a view of the group's tensors, or of the model's if they are not sharded: clone the tensor to keep
        it or to change it.

    Raises:
        UserError: On every rank, if mapper and model do not match.
        ValueError: If `ctx` is missing although there are several ranks.
    """
    num_ranks(ctx)
    mapper = identity_of(model) if mapper is None else mapper
    _, mine = exchange_stages(model, mapper, ctx)
    tensors = module_tensors(model)
    for group in mine.groups(mapper):
        with torch.no_grad():  # not as a decorator, which would keep the last tensor alive
            outputs = mapper.apply({name: gather_in_blocks(tensors[name]) for name in group.inputs})
        while outputs:
            name, tensor = outputs.popitem()
            if name in mine.tensors:
                yield name, tensor
            del tensor  # this view may keep the group in memory while the next group is gathered


def weight_shards(model: nn.Module, load_mapper: StateMapper | None = None) -> Iterator[tuple[str, Tensor, Region]]:
    """Yield this rank's shards of a model's tensors as regions of the tensors on disk. No collectives.

    The shards of all ranks cover each tensor on disk, except for parts that the mapper does not read. Ranks that hold
    replicas of a parameter yield equal regions.

    Args:
        model: Whole model or this rank's pipeline stage, on any device, with plain tensors or `DTensor`s.
        load_mapper: Maps names and shapes on disk to those of the whole model; `None` if they are equal. The mapper
            must have an inverse.

    Yields:
        Name on disk; shard, a view of the parameter's memory, or a copy if the dtype on disk differs; region of the
        tensor on disk. Empty shards are skipped.

    Raises:
        UserError: If the mapper computes new values, instead of only moving them. Use `gathered_weights` then.
        ValueError: If the mapper has no inverse.
    """
    mapper = identity_of(model) if load_mapper is None else load_mapper
    tensors = module_tensors(model)
    part = mapper.restrict(outputs=tensors)
    for group in part.groups:
        if group.inputs:
            yield from _shards_of_group(part, group, {name: tensors[name] for name in group.outputs if name in tensors})


def _shards_of_group(
    mapper: StateMapper, group: StateGroup, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, Region]]:
    inverse = mapper.restrict(outputs=group.outputs).inverse()
    infos = inverse.infer({name: TensorInfo.of(tensors[name]) for name in group.outputs})
    seen: set[tuple[str, Region]] = set()
    for name, tensor in tensors.items():
        local = local_tensor(tensor).detach()
        # Load into a `meta` tensor to record which view of the parameter's memory each region on disk fills.
        memory = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
        recorder = ReadRecorder(infos)
        mapper.fill({name: Destination(local_region(tensor, name), memory)}, recorder)
        for source, region, target in recorder.reads:
            if target.untyped_storage()._cdata != memory.untyped_storage()._cdata:
                raise UserError(
                    f"{source} is computed from {name} by the state mapper; expected an operation that only moves "
                    "values. Use weights() without shards, or gathered_weights()."
                )
            if (source, region) not in seen:
                seen.add((source, region))
                offset = local.storage_offset() + target.storage_offset()
                shard = local.as_strided(target.shape, target.stride(), offset)
                yield source, shard.to(infos[source].dtype), region
