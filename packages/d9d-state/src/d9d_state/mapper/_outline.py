"""Outline of a mapper for `explain`: the steps of each group, with groups that differ only in numbers folded."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    """Label of a wire; `name` is `None` for a value between two operations."""

    name: str | None
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
    whole = [Outline(tuple(_steps(graph, part, infos))) for part in graph.components]
    return _folded([_with_lists_folded(each) for each in whole]) if fold else whole


def _steps(graph: Graph, part: Component, infos: Mapping[str, TensorInfo]) -> Iterator[Step]:
    names_in = {graph.input_wires[name]: name for name in part.group.inputs}
    names_out = {graph.output_wires[name]: name for name in part.group.outputs}
    values = _values(graph, part, infos)
    numbers: dict[int, int] = {}

    def label(wire: int, names: Mapping[int, str]) -> Label:
        return Label(names.get(wire), numbers.setdefault(wire, len(numbers)), values.get(wire))

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


def _values(graph: Graph, part: Component, infos: Mapping[str, TensorInfo]) -> dict[int, TensorInfo]:
    """Infer shapes and dtypes of the wires, as far as the known inputs allow."""
    values = {graph.input_wires[name]: infos[name] for name in part.group.inputs if name in infos}
    if part.group.inputs and len(values) == len(part.group.inputs):
        try:
            part.infer(values)
        except ValueError:  # `check` reports mismatches; `explain` shows what could be inferred
            return values
    return values


def _with_lists_folded(outline: Outline) -> Outline:
    steps = [
        replace(step, inputs=tuple(_folded_list(step.inputs)), outputs=tuple(_folded_list(step.outputs)))
        for step in outline.steps
    ]
    return replace(outline, steps=tuple(steps))


def _folded_list(labels: Sequence[Label]) -> Iterator[Label]:
    """Fold runs of adjacent names in which one number counts up by one."""
    start = 0
    while start < len(labels):
        stop = start + 1
        while stop < len(labels) and _follows(labels[stop - 1], labels[stop]):
            stop += 1
        if stop - start >= _FEWEST_LISTED:
            rows = [_numbers(labels[index].name or "") for index in range(start, stop)]
            ((texts, _),) = folded_rows(rows)
            yield replace(labels[start], name=_refilled(labels[start].name or "", texts))
            start = stop
        else:
            yield labels[start]
            start += 1


def _follows(one: Label, other: Label) -> bool:
    if one.name is None or other.name is None or one.info != other.info or _kind(one.name) != _kind(other.name):
        return False
    steps = [after - before for before, after in zip(_numbers(one.name), _numbers(other.name), strict=True)]
    return set(steps) <= {0, 1} and sum(steps) == 1


def _folded(whole: Sequence[Outline]) -> list[Outline]:
    """Fold outlines that differ only in numbers, at the position of the first of them."""
    outlines_by_kind: dict[tuple[object, ...], list[Outline]] = {}
    for outline in whole:
        outlines_by_kind.setdefault(tuple(_step_kind(step) for step in outline.steps), []).append(outline)
    shown = []
    for members in outlines_by_kind.values():
        rows = [tuple(number for label in _labels(each) for number in _numbers(label.name or "")) for each in members]
        for texts, count in folded_rows(rows):
            left = iter(texts)
            steps = tuple(_refilled_step(step, left) for step in members[0].steps)
            shown.append(Outline(steps, count))
    return shown


def _step_kind(step: Step) -> tuple[object, ...]:
    inputs = tuple((_kind(label.name), label.wire, label.info) for label in step.inputs)
    outputs = tuple((_kind(label.name), label.wire, label.info) for label in step.outputs)
    return inputs, step.operation, outputs


def _labels(outline: Outline) -> Iterator[Label]:
    for step in outline.steps:
        yield from step.inputs
        yield from step.outputs


def _refilled_step(step: Step, texts: Iterator[str]) -> Step:
    def refill(label: Label) -> Label:
        if label.name is None:
            return label
        return replace(label, name=_refilled(label.name, [next(texts) for _ in _numbers(label.name)]))

    # Inputs come first, as in `_labels`.
    inputs = tuple([refill(label) for label in step.inputs])
    return Step(inputs, step.operation, tuple([refill(label) for label in step.outputs]))


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(match[2]) for match in _NUMBER.finditer(name) if match[2] is not None)


def _kind(name: str | None) -> str | None:
    return None if name is None else _NUMBER.sub(lambda match: match[1] or "\0", name)


def _refilled(name: str, texts: Sequence[str]) -> str:
    left = iter(texts)
    return _NUMBER.sub(lambda match: match[1] or next(left), name)
