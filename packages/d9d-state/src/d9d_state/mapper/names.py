"""Mappers without operations: pass tensors through, rename, keep or drop them."""

from collections.abc import Mapping

from torch import nn

from d9d_state.mapper.state_mapper import StateMapper, named_wires
from d9d_state.module_tensors import unique_tensors


def identity(*names: str) -> StateMapper:
    """Pass tensors through under their names; raise `ValueError` for duplicates. The mapper is its own inverse."""
    wires = named_wires(names, 0, what="consumed")
    return StateMapper((), wires, wires, len(wires))


def identity_of(origin: nn.Module | StateMapper) -> StateMapper:
    """Return an identity mapper for a mapper's outputs, or for a module's parameters and persistent buffers.

    Tied tensors of a module appear under their first name only.
    """
    return identity(*(origin.outputs if isinstance(origin, StateMapper) else unique_tensors(origin)))


def rename(src: str, dst: str) -> StateMapper:
    """Rename the tensor `src` to `dst`. The inverse renames it back."""
    return StateMapper((), {src: 0}, {dst: 0}, 1)


def rename_all(names: Mapping[str, str]) -> StateMapper:
    """Rename each key of `names` to its value; raise `ValueError` if a value occurs twice."""
    new = named_wires(names.values(), 0, what="produced")
    return StateMapper((), dict(zip(names, new.values(), strict=True)), new, len(new))


def keep(*names: str) -> StateMapper:
    """Declare outputs that the checkpoint lacks and whose current values are kept. The inverse is `drop`.

    For newly initialized weights, such as an adapter's, in a model whose other weights are loaded. Raises `ValueError`
    if a name occurs twice.
    """
    wires = named_wires(names, 0, what="produced")
    return StateMapper((), {}, wires, len(wires))


def drop(*names: str) -> StateMapper:
    """Consume inputs and produce nothing; raise `ValueError` for duplicate names. The inverse is `keep`."""
    wires = named_wires(names, 0, what="consumed")
    return StateMapper((), wires, {}, len(wires))
