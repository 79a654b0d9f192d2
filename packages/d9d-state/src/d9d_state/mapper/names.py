"""Mappers that only deal in names: tensors pass through untouched, keep what they have, or are dropped."""

from torch import nn

from d9d_state.mapper.graph import StateMapper, named_wires
from d9d_state.module_tensors import unique_tensors


def identity(*names: str) -> StateMapper:
    """Pass these tensors on under their own names. It is its own inverse.

    Raises:
        ValueError: If a name occurs twice.
    """
    wires = named_wires(names, 0, what="consumed")
    return StateMapper((), wires, wires, len(wires))


def identity_of(origin: nn.Module | StateMapper) -> StateMapper:
    """Pass on every parameter and persistent buffer of a module, or every output of a mapper.

    Args:
        origin: A module, of which a tied tensor is passed under its first name only; or a mapper.
    """
    return identity(*(origin.outputs if isinstance(origin, StateMapper) else unique_tensors(origin)))


def rename(src: str, dst: str) -> StateMapper:
    """Pass the tensor `src` on under the name `dst`. The inverse renames it back."""
    return StateMapper((), {src: 0}, {dst: 0}, 1)


def keep(*names: str) -> StateMapper:
    """Leave these outputs as they are: nothing in the checkpoint fills them. The inverse is `drop`.

    It is how freshly initialised weights, an adapter's for example, stand beside loaded ones.

    Raises:
        ValueError: If a name occurs twice.
    """
    wires = named_wires(names, 0, what="produced")
    return StateMapper((), {}, wires, len(wires))


def drop(*names: str) -> StateMapper:
    """Consume these inputs and produce nothing from them. The inverse is `keep`.

    Raises:
        ValueError: If a name occurs twice.
    """
    wires = named_wires(names, 0, what="consumed")
    return StateMapper((), wires, {}, len(wires))
