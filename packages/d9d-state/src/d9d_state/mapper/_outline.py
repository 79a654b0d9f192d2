"""Outline of a mapper for `explain`: the steps of each group, with groups that differ only in numbers folded."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import final

from d9d_state.mapper._number_ranges import folded_rows
from d9d_state.mapper.graph import Component, Graph
from d9d_state.tensor_info import TensorInfo

# Index numbers in a name. Folded ranges and placeholders in braces are skipped, as are numbers with leading zeros.
_NUMBER = re.compile(r"(\{[^}]*\})|(?<!\d)(0|[1-9]\d*)(?!\d)")
_FEWEST_LISTED = 3  # minimum number of adjacent names that are folded


@final
@dataclass(frozen=True, slots=True)
class Label:
    """Label of a wire; the name of a value between two operations is empty."""

    name: str
    wire: int
    info: TensorInfo | None


@final
@dataclass(frozen=True, slots=True)
class Step:
    """One operation, or a tensor that passes through unchanged."""

    inputs: tuple[Label, ...]
    operation: str | None
    outputs: tuple[Label, ...]


@final
@dataclass(frozen=True, slots=True)
class Outline:
    """Steps of one group, or of several groups that differ only in the numbers in their names."""

    steps: tuple[Step, ...]
    num_groups: int = 1


def outlines(graph: Graph, infos: Mapping[str, TensorInfo], *, fold: bool) -> list[Outline]:
    """Return the outlines of a mapper's groups; `fold` merges groups and names that differ only in numbers."""
    groups = [tuple(_steps(graph, part, infos)) for part in graph.components]
    return _folded(groups) if fold else [Outline(steps) for steps in groups]


def _steps(graph: Graph, part: Component, infos: Mapping[str, TensorInfo]) -> Iterator[Step]:
    names_in = {graph.input_wires[name]: name for name in part.group.inputs}
    names_out = {graph.output_wires[name]: name for name in part.group.outputs}
    values = {graph.input_wires[name]: infos[name] for name in part.group.inputs if name in infos}
    if part.group.inputs and len(values) == len(part.group.inputs):
        with suppress(ValueError):  # `check` reports mismatches; `explain` shows what could be inferred
            part.infer(values)
    numbers: dict[int, int] = {}

    def label(wire: int, names: Mapping[int, str]) -> Label:
        return Label(names.get(wire, ""), numbers.setdefault(wire, len(numbers)), values.get(wire))

    if not part.group.inputs:
        for wire in names_out:
            yield Step((), None, (label(wire, names_out),))
        return
    for node in part.nodes:
        inputs = tuple(label(wire, names_in) for wire in node.inputs)
        yield Step(inputs, node.operation.describe(), tuple(label(wire, names_out) for wire in node.outputs))
    if not part.nodes:
        (wire,) = names_in
        yield Step((label(wire, names_in),), None, (label(wire, names_out),) if names_out else ())


def _folded_list(labels: Sequence[Label]) -> Iterator[Label]:
    """Fold runs of adjacent names in which one number counts up by one."""
    start = 0
    while start < len(labels):
        stop = start + 1
        while stop < len(labels) and _follows(labels[stop - 1], labels[stop]):
            stop += 1
        if stop - start >= _FEWEST_LISTED:
            ((texts, _),) = folded_rows([_numbers(label.name) for label in labels[start:stop]])
            yield replace(labels[start], name=_refilled(labels[start].name, iter(texts)))
            start = stop
        else:
            yield labels[start]
            start += 1


def _follows(one: Label, other: Label) -> bool:
    if one.info != other.info or _kind(one.name) != _kind(other.name):
        return False
    steps = [after - before for before, after in zip(_numbers(one.name), _numbers(other.name), strict=True)]
    return set(steps) <= {0, 1} and sum(steps) == 1


def _folded(groups: Sequence[tuple[Step, ...]]) -> list[Outline]:
    """Fold lists of names, and groups that differ only in numbers, at the position of the first of them."""
    groups_by_kind: dict[tuple[Step, ...], list[tuple[Step, ...]]] = {}
    for group in groups:
        steps = tuple(
            Step(tuple(_folded_list(step.inputs)), step.operation, tuple(_folded_list(step.outputs))) for step in group
        )
        groups_by_kind.setdefault(_renamed(steps, _kind), []).append(steps)
    shown = []
    for members in groups_by_kind.values():
        rows = []
        for steps in members:
            names = [label.name for step in steps for label in (*step.inputs, *step.outputs)]
            rows.append(tuple(number for name in names for number in _numbers(name)))
        for texts, count in folded_rows(rows):
            shown.append(Outline(_renamed(members[0], partial(_refilled, texts=iter(texts))), count))
    return shown


def _renamed(steps: Sequence[Step], rename: Callable[[str], str]) -> tuple[Step, ...]:
    """Rename all labels, in order: the inputs of a step before its outputs."""
    renamed = []
    for step in steps:
        inputs = tuple([replace(label, name=rename(label.name)) for label in step.inputs])
        outputs = tuple([replace(label, name=rename(label.name)) for label in step.outputs])
        renamed.append(Step(inputs, step.operation, outputs))
    return tuple(renamed)


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(match[2]) for match in _NUMBER.finditer(name) if match[2] is not None)


def _kind(name: str) -> str:
    return _refilled(name, repeat("\0"))


def _refilled(name: str, texts: Iterator[str]) -> str:
    """Replace each number by the next text."""
    return _NUMBER.sub(lambda match: match[1] or next(texts), name)
