"""Exported tensors that a pipeline stage of a model can produce, and the mapper groups that produce these tensors."""

from collections.abc import Mapping, Sequence

from torch import nn

from d9d_dist import DistributedContext, UserError
from d9d_state._export_plan import Offer, Part
from d9d_state.mapper.graph import StateGroup
from d9d_state.mapper.state_mapper import StateMapper
from d9d_state.module_tensors import aliases, module_tensors
from d9d_state.safetensors_header import dtype_name
from d9d_state.tensor_info import TensorInfo


def offer_of(model: nn.Module, mapper: StateMapper, stage: int) -> Offer:
    """Return the exported tensors that this rank can produce from its stage of a model. No collectives."""
    tensors = module_tensors(model)
    infos = {name: TensorInfo.of(tensors[name]) for name in mapper.inputs if name in tensors}
    try:
        produced = _produced(_held_groups(mapper, infos), mapper, infos)
    except ValueError as error:
        return Offer(stage, problem=str(error))
    return Offer(stage, list(infos), produced, unconsumed=_unconsumed(model, mapper))


def _unconsumed(model: nn.Module, mapper: StateMapper) -> list[str]:
    first_names = aliases(model)
    consumed = {first_names[name] for name in mapper.inputs if name in first_names}
    return [name for name, first in first_names.items() if name == first and first not in consumed]


def _held_groups(mapper: StateMapper, held: Mapping[str, TensorInfo]) -> list[StateGroup]:
    return [group for group in mapper.groups if group.inputs and all(name in held for name in group.inputs)]


def _produced(
    groups: Sequence[StateGroup], mapper: StateMapper, infos: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """Infer shape and dtype of the exported tensors, in the order in which the tensors are written."""
    produced: dict[str, TensorInfo] = {}
    for group in groups:
        outputs = mapper.apply({name: infos[name].to_meta() for name in group.inputs})
        produced.update((name, TensorInfo.of(tensor)) for name, tensor in outputs.items())
    for info in produced.values():
        dtype_name(info.dtype)
    return produced


def check_complete(mapper: StateMapper, parts: Sequence[Part]) -> None:
    """Raise `UserError` if the mapper and the model do not match, or a group's inputs are on several stages."""
    held = [frozenset(part.consumed) for part in parts]
    everything = frozenset().union(*held)
    absent = [name for name in mapper.inputs if name not in everything]
    split = [
        ", ".join(group.inputs)
        for group in mapper.groups
        if everything.issuperset(group.inputs) and not any(part.issuperset(group.inputs) for part in held)
    ]
    problems = {
        "consumed, but not in the model": ", ".join(absent),
        "in the model, but not consumed; drop() them if this is intended": ", ".join(
            name for part in parts for name in part.unconsumed
        ),
        "consumed together, but on different pipeline stages": "; ".join(split),
    }
    report = [f"\n  {title}: {names}" for title, names in problems.items() if names]
    if report:
        raise UserError(f"the mapper does not match the model to export:{''.join(report)}")


def part_of(parts: Sequence[Part], ctx: DistributedContext | None) -> Part:
    """Return the part of this rank."""
    return next(part for part in parts if (0 if ctx is None else ctx.rank) in part.ranks)


def groups_of(mapper: StateMapper, part: Part) -> list[StateGroup]:
    """Return the groups of a mapper that produce tensors of a part, in order."""
    return [group for group in mapper.groups if not part.tensors.keys().isdisjoint(group.outputs)]
