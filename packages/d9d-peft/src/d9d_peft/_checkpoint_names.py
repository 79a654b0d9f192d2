"""Where a model's parameters are in the checkpoint it was loaded from: adapters in files are named as in there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_peft._targets import shorten
from d9d_state import StateMapper


def checkpoint_name(name: str, base_mapper: StateMapper | None) -> str:
    """The name that a parameter or buffer has in the checkpoint.

    Args:
        name: Its name in the model.
        base_mapper: From the names of the checkpoint to those of the model; `None` if they are the same.

    Raises:
        UserError: If the mapper does more to it than to rename it.
    """
    if base_mapper is None:
        return name
    part = base_mapper.restrict(outputs=[name])
    if len(part.inputs) != 1 or part.nodes:
        raise UserError(_is_not_there(name, part))
    return next(iter(part.inputs))


@final
@dataclass(frozen=True, slots=True)
class JointParameter:
    """A parameter [groups, rows, in] of the checkpoint that holds the weights of one or several layers.

    Attributes:
        name: Its name in the checkpoint.
        weights: Names in the model of the weights [groups, out, in] that it holds, in the order of its rows.
    """

    name: str
    weights: tuple[str, ...]


def group_names(
    name: str, shapes: Mapping[str, Sequence[int]], base_mapper: StateMapper | None
) -> tuple[str, ...] | JointParameter:
    """The names that the groups of a weight [groups, out, in] have in the checkpoint.

    Args:
        name: Its name in the model.
        shapes: Shapes of all such weights with adapters, by name.
        base_mapper: From the names of the checkpoint to those of the model; `None` if they are the same.

    Returns:
        A name for each group, in their order; or the parameter that holds all groups.

    Raises:
        UserError: If the mapper does more than to rename the weight, to stack it of one tensor for each group, or to
            split a parameter along its rows; or if it splits off a weight that has no adapter.
    """
    part = None if base_mapper is None else base_mapper.restrict(outputs=[name])
    if part is None or not part.nodes:
        return JointParameter(checkpoint_name(name, base_mapper), (name,))
    bare = [output for output in part.outputs if output not in shapes]
    if bare:
        raise UserError(
            f"{name} comes from {shorten(list(part.inputs))} of the base checkpoint, as {shorten(bare)} does, which "
            "has no adapter; expected adapters in all of them. Widen the target."
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
        raise UserError(_is_not_there(name, part)) from error
    found = _one_for_each_group(stored, numbers) or _joint(stored, numbers)
    if found is None:
        raise UserError(_is_not_there(name, part))
    return found


def _one_for_each_group(stored: Mapping[str, Tensor], numbers: Mapping[str, Tensor]) -> tuple[str, ...] | None:
    """The names of the tensors that each hold one group of one weight; `None` if they do not."""
    groups = [group for weight in numbers.values() for group in weight]
    names = [[key for key, tensor in stored.items() if torch.equal(tensor, group)] for group in groups]
    if len(numbers) > 1 or len(stored) != len(groups) or not all(names):
        return None
    return tuple(keys[0] for keys in names)


def _joint(stored: Mapping[str, Tensor], numbers: Mapping[str, Tensor]) -> JointParameter | None:
    """The one tensor that holds the rows of all weights one after the other; `None` if there is none."""
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


def _is_not_there(name: str, part: StateMapper) -> str:
    return (
        f"{name} comes from {shorten(list(part.inputs))} of the base checkpoint; expected one tensor of the same "
        "shape, one for each expert, or rows of a parameter [experts, rows, in]. Pass the mapper that loads the model "
        "before inject(); save what it joins with save_model_state, merged."
    )
