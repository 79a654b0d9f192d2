"""Where a model's parameters are in the checkpoint it was loaded from: adapters in files are named as in there."""

import torch

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


def group_names(name: str, num_groups: int, base_mapper: StateMapper | None) -> tuple[str, ...]:
    """The names that the groups of a parameter [groups, out, in] have in the checkpoint.

    Args:
        name: Its name in the model.
        num_groups: Number of groups.
        base_mapper: From the names of the checkpoint to those of the model; `None` if they are the same.

    Returns:
        A name for each group, in their order; or one name, if the checkpoint has them together.

    Raises:
        UserError: If the mapper does more than to rename the parameter, or to stack it of one tensor for each group.
    """
    part = None if base_mapper is None else base_mapper.restrict(outputs=[name])
    if part is None or not part.nodes:
        return (checkpoint_name(name, base_mapper),)
    # What the way back makes of a small parameter, whose groups are numbered, shows which tensor is which group.
    numbers = torch.arange(num_groups).view(-1, 1, 1).expand(-1, 1, 2)
    try:
        group_of = {key: group.tolist() for key, group in part.inverse().apply({name: numbers}).items()}
    except ValueError as error:
        raise UserError(_is_not_there(name, part)) from error
    name_of = {group[0][0]: key for key, group in group_of.items() if group == [[group[0][0]] * 2]}
    if len(name_of) != num_groups or len(group_of) != num_groups:
        raise UserError(_is_not_there(name, part))
    return tuple(name_of[group] for group in range(num_groups))


def _is_not_there(name: str, part: StateMapper) -> str:
    return (
        f"{name} comes from {shorten(list(part.inputs))} of the base checkpoint; expected one tensor of the same "
        "shape, or one for each expert. Pass the mapper that loads the model before inject(); save what "
        "it joins with save_model_state, merged."
    )
