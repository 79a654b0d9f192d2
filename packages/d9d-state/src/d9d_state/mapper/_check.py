"""Check of a mapper against a checkpoint and a model, by shapes and dtypes only, with all mismatches in one error."""

from collections.abc import Collection, Iterable, Mapping
from typing import Literal, TypeAlias

from d9d_dist.errors import check_choice, refuse_listed
from d9d_state.mapper.graph import Component, Graph, StateGroup
from d9d_state.tensor_info import TensorInfo

Unused: TypeAlias = Literal["error", "ignore"]
"""Treatment of tensors in a source that a mapper does not consume."""


def refuse_mismatches(
    graph: Graph,
    *,
    held: Mapping[str, TensorInfo],
    wanted: Mapping[str, TensorInfo],
    first_names: Mapping[str, str],
    consumed: Collection[str],
    unused: Unused,
) -> None:
    """Raise `UserError` if a mapper, a source's tensors and a model's tensors do not match; list every mismatch.

    `wanted` has the model's tensors, tied tensors under each name; `first_names` maps each name to the tensor's first
    name. Tensors in the source that are not in `consumed` are reported, if `unused` is an error.
    """
    check_choice("unused", unused, Unused)
    skipped = skipped_groups(graph, held=held.keys(), first_names=first_names)
    parts = [part for part in graph.components if not skipped or part.group not in skipped]
    produced = [name for part in parts for name in part.group.outputs]
    filled = {first_names[name] for name in produced if name in first_names}
    sections = {
        "missing in the file": [name for part in parts for name in part.group.inputs if name not in held],
        'in the file, but unused; drop() them, or pass unused="ignore"': [
            name for name in held if unused == "error" and name not in consumed
        ],
        "produced, but not in the model": [name for name in produced if name not in wanted],
        "in the model, but not produced; keep() them if this is intended": [
            name for name in wanted if first_names[name] == name and name not in filled
        ],
        "wrong shape or dtype": [line for part in parts for line in _mismatches(graph, part, held, wanted)],
    }
    refuse_listed("the checkpoint, the mapper and the model do not match", sections)


def skipped_groups(graph: Graph, *, held: Iterable[str], first_names: Mapping[str, str]) -> frozenset[StateGroup]:
    """Return groups to skip: their inputs are absent, and other groups fill their outputs under tied names."""
    held = frozenset(held)
    absent = [group for group in graph.groups if group.inputs and held.isdisjoint(group.inputs)]
    if not absent:
        return frozenset()
    filled = {
        first_names[name]
        for group in graph.groups
        if held.issuperset(group.inputs)
        for name in group.outputs
        if name in first_names
    }
    return frozenset(
        group for group in absent if group.outputs and all(first_names.get(name) in filled for name in group.outputs)
    )


def _mismatches(
    graph: Graph, part: Component, held: Mapping[str, TensorInfo], wanted: Mapping[str, TensorInfo]
) -> list[str]:
    group = part.group
    if not group.inputs or any(name not in held for name in group.inputs):
        return []
    values = {graph.input_wires[name]: held[name] for name in group.inputs}
    try:
        part.infer(values)
    except ValueError as error:
        return [str(error)]
    mismatches = []
    for name in group.outputs:
        given = values[graph.output_wires[name]]
        expected = wanted.get(name, given)
        if not _matches(given, expected):
            sources = ", ".join(group.inputs)
            mismatches.append(f"{name}: got {given.describe()} from {sources}; expected {expected.describe()}")
    return mismatches


def _matches(given: TensorInfo, wanted: TensorInfo) -> bool:
    if given.shape != wanted.shape:
        return False
    # float8 values are meaningless without their scales, so they are not converted to a wider dtype.
    both_floating = given.dtype.is_floating_point and wanted.dtype.is_floating_point
    return given.dtype == wanted.dtype or (both_floating and given.dtype.itemsize > 1)
