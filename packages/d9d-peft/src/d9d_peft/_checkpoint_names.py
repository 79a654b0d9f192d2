"""Names of a model's parameters in the base checkpoint, which adapter files use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_dist.errors import shorten
from d9d_state import StateMapper


def checkpoint_name(name: str, base_mapper: StateMapper | None, *, first: str | None = None) -> str:
    """Return the name of a tensor in the base checkpoint.

    `first` is the name of a tied tensor in the mapper; the base checkpoint stores it only once. Its other names are
    those of the model, if this is so for the first one.

    Raises:
        UserError: If the mapper also changes the tensor, or the name of a tied tensor is unknown.
    """
    if base_mapper is None:
        return name
    if first is not None and name not in base_mapper.outputs:
        stored = checkpoint_name(first, base_mapper)
        if stored == first:
            return name
        raise UserError(
            f"{name} is tied to {first}, which is {stored} in the base checkpoint; expected a name of {name} in the "
            "checkpoint, because peft unties them. Pass the base_mapper of an untied checkpoint, such as the one for "
            "replace(params, tie_word_embeddings=False)."
        )
    part = base_mapper.restrict(outputs=[name])
    if len(part.inputs) != 1 or part.nodes:
        raise UserError(_unsupported_mapping(name, part))
    return next(iter(part.inputs))


@final
@dataclass(frozen=True, slots=True)
class JointParameter:
    """Parameter [groups, rows, in] of the base checkpoint that holds the weights of one or several layers.

    Attributes:
        name: Name of the parameter in the base checkpoint.
        weights: Names in the model of the weights [groups, out, in], in the order of their rows in the parameter.
    """

    name: str
    weights: tuple[str, ...]


def group_names(
    name: str, shapes: Mapping[str, Sequence[int]], base_mapper: StateMapper | None
) -> tuple[str, ...] | JointParameter:
    """Return the name of each group of a weight [groups, out, in], or the parameter that holds all groups.

    The returned names are in the base checkpoint. `shapes` holds the shapes of all weights with adapters, by name in
    the model. Raises `UserError` unless the mapper renames the weight, stacks one tensor per group, or splits a
    parameter along its rows. All weights of a split parameter need adapters.
    """
    part = None if base_mapper is None else base_mapper.restrict(outputs=[name])
    if part is None or not part.nodes:
        return JointParameter(checkpoint_name(name, base_mapper), (name,))
    without_adapter = [output for output in part.outputs if output not in shapes]
    if without_adapter:
        raise UserError(
            f"{name} and {shorten(without_adapter)} come from the same tensors of the base checkpoint, "
            f"{shorten(list(part.inputs))}, but {shorten(without_adapter)} has no adapter; expected adapters in all of "
            "these parameters. Widen the target."
        )
    # The inverse of the mapper, applied to numbered rows, shows which tensor holds which group and which rows.
    numbers: dict[str, Tensor] = {}
    for output in part.outputs:
        num_groups, num_rows, _ = shapes[output]
        first = sum(tensor.numel() for tensor in numbers.values())
        numbers[output] = (first + torch.arange(num_groups * num_rows * 2)).view(num_groups, num_rows, 2)
    try:
        stored = part.inverse().apply(numbers)
    except ValueError as error:
        raise UserError(_unsupported_mapping(name, part)) from error
    found = _names_per_group(stored, numbers) or _joint_parameter(stored, numbers)
    if found is None:
        raise UserError(_unsupported_mapping(name, part))
    return found


def _names_per_group(stored: Mapping[str, Tensor], numbers: Mapping[str, Tensor]) -> tuple[str, ...] | None:
    """Return the names of the stored tensors if each holds exactly one group of one weight, else `None`."""
    groups = [group for weight in numbers.values() for group in weight]
    names = [[key for key, tensor in stored.items() if torch.equal(tensor, group)] for group in groups]
    if len(numbers) > 1 or len(stored) != len(groups) or not all(names):
        return None
    return tuple(keys[0] for keys in names)


def _joint_parameter(stored: Mapping[str, Tensor], numbers: Mapping[str, Tensor]) -> JointParameter | None:
    """Return the parameter and its weights in row order if one stored tensor holds all weights, else `None`."""
    if len(stored) != 1:
        return None
    ((key, tensor),) = stored.items()
    if tensor.ndim != 3 or tensor.shape[1] != sum(weight.shape[1] for weight in numbers.values()):
        return None
    firsts = tensor[0, :, 0].tolist()
    starts = {name: int(weight[0, 0, 0]) for name, weight in numbers.items()}
    weights = sorted(numbers, key=lambda name: firsts.index(starts[name]) if starts[name] in firsts else -1)
    if not torch.equal(tensor, torch.cat([numbers[name] for name in weights], dim=1)):
        return None
    return JointParameter(key, tuple(weights))


def _unsupported_mapping(name: str, part: StateMapper) -> str:
    return (
        f"{name} comes from {shorten(list(part.inputs))} of the base checkpoint; expected one tensor of the same "
        "shape, one tensor per expert, or rows of a parameter [experts, rows, in]. Pass the mapper that loads the "
        "model before inject(). If it joins several tensors into this one, merge the adapters and save the model with "
        "save_model_state."
    )
