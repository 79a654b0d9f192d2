"""Plan of an export: the tensors of each file and the rank that writes it. Every rank computes the same plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import nn

from d9d_dist import DistributedContext, UserError, gather_json
from d9d_state._ranks import failing_together, rank_of
from d9d_state.mapper.graph import StateGroup
from d9d_state.mapper.state_mapper import StateMapper
from d9d_state.model_folder import SINGLE_NAME
from d9d_state.module_tensors import aliases, module_tensors
from d9d_state.safetensors_header import dtype_name, dtype_of
from d9d_state.tensor_info import TensorInfo


@final
@dataclass(frozen=True, slots=True)
class Part:
    """Exported tensors that the same ranks can write: the ranks of a pipeline stage, or a single rank.

    `consumed` and `unconsumed` are names of the model's tensors that the mapper does or does not consume.
    """

    ranks: Sequence[int]
    tensors: Mapping[str, TensorInfo]
    consumed: Sequence[str] = ()
    unconsumed: Sequence[str] = ()

    def groups(self, mapper: StateMapper) -> list[StateGroup]:
        """Return the groups of a mapper that produce tensors of this part, in order."""
        return [group for group in mapper.groups if not self.tensors.keys().isdisjoint(group.outputs)]


@final
@dataclass(frozen=True, slots=True)
class PlannedFile:
    """File of an export."""

    name: str
    rank: int
    tensors: Mapping[str, TensorInfo]


def exchange_parts(
    number: int,
    produced: Mapping[str, TensorInfo],
    ctx: DistributedContext | None,
    *,
    consumed: Sequence[str] = (),
    unconsumed: Sequence[str] = (),
) -> tuple[Part, ...]:
    """All-gather the tensors that each rank can write; ranks with equal numbers are one part. Collective.

    A tensor of several parts goes to the first part.
    """
    tensors = [[name, dtype_name(info.dtype), list(info.shape)] for name, info in produced.items()]
    gathered = gather_json([number, tensors, list(consumed), list(unconsumed)], alone=ctx is None)
    parts: list[Part] = []
    taken: set[str] = set()
    for each in sorted({part for part, *_ in gathered}):
        ranks = [rank for rank, (part, *_) in enumerate(gathered) if part == each]
        _, tensors, *names = gathered[ranks[0]]
        infos = {name: TensorInfo(tuple(shape), dtype_of(dtype)) for name, dtype, shape in tensors if name not in taken}
        taken.update(infos)
        parts.append(Part(ranks, infos, *names))
    return tuple(parts)


def exchange_stages(
    model: nn.Module, mapper: StateMapper, ctx: DistributedContext | None
) -> tuple[tuple[Part, ...], Part]:
    """Return the parts of all pipeline stages of a model, and the part of this rank. Collective.

    Raises `UserError` on every rank if the mapper and the model do not match, or a group's inputs are on several
    stages.
    """
    tensors = module_tensors(model)
    first_names = aliases(tensors)
    infos = {name: TensorInfo.of(tensors[name]) for name in mapper.inputs if name in tensors}
    consumed = {first_names[name] for name in infos}
    unconsumed = [name for name, first in first_names.items() if name == first and first not in consumed]
    produced: dict[str, TensorInfo] = {}
    with failing_together(ctx):
        try:
            produced = _produced(mapper, infos)
        except ValueError as error:
            raise UserError(str(error)) from error
    stage = 0 if ctx is None else ctx.coordinate("regular", "pp")
    parts = exchange_parts(stage, produced, ctx, consumed=list(infos), unconsumed=unconsumed)
    _check_complete(mapper, parts)
    return parts, next(part for part in parts if rank_of(ctx) in part.ranks)


def plan_files(parts: Sequence[Part], *, max_bytes: int) -> tuple[PlannedFile, ...]:
    """Assign tensors to files in order, filling each file up to `max_bytes`. A file never spans two parts."""
    files: list[tuple[int, dict[str, TensorInfo]]] = []
    for part in parts:
        shards: list[dict[str, TensorInfo]] = []
        room = 0
        for name, info in part.tensors.items():
            if not shards or info.num_bytes > room:
                shards.append({})
                room = max_bytes
            shards[-1][name] = info
            room -= info.num_bytes
        files += [(part.ranks[index % len(part.ranks)], shard) for index, shard in enumerate(shards)]
    if not files:
        files = [(0, {})]
    return tuple(PlannedFile(_file_name(index, len(files)), *file) for index, file in enumerate(files))


def _file_name(index: int, num_files: int) -> str:
    return SINGLE_NAME if num_files == 1 else f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"


def _produced(mapper: StateMapper, held: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Infer shape and dtype of the exported tensors, in the order in which the tensors are written."""
    produced: dict[str, TensorInfo] = {}
    for group in mapper.groups:
        if group.inputs and all(name in held for name in group.inputs):
            outputs = mapper.apply({name: held[name].to_meta() for name in group.inputs})
            produced.update((name, TensorInfo.of(tensor)) for name, tensor in outputs.items())
    for info in produced.values():
        dtype_name(info.dtype)
    return produced


def _check_complete(mapper: StateMapper, parts: Sequence[Part]) -> None:
    held = [frozenset(part.consumed) for part in parts]
    everything = frozenset().union(*held)
    absent = [name for name in mapper.inputs if name not in everything]
    split = [
        ", ".join(group.inputs)
        for group in mapper.groups
        if everything.issuperset(group.inputs) and not any(part.issuperset(group.inputs) for part in held)
    ]
    unconsumed = [name for part in parts for name in part.unconsumed]
    problems = {
        "consumed, but not in the model": ", ".join(absent),
        "in the model, but not consumed; drop() them if this is intended": ", ".join(unconsumed),
        "consumed together, but on different pipeline stages": "; ".join(split),
    }
    report = [f"\n  {title}: {names}" for title, names in problems.items() if names]
    if report:
        raise UserError(f"the mapper does not match the model to export:{''.join(report)}")
