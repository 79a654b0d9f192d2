"""Rendering of a mapper as text or as a Mermaid flowchart, for `StateMapper.explain`."""

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Literal

from d9d_state.mapper._outline import Label, Outline, outlines
from d9d_state.mapper.graph import Graph
from d9d_state.tensor_info import TensorInfo

_PLAIN = frozenset(" ._-,:=()[]{}/+*'!")


def explain(
    graph: Graph, form: Literal["text", "mermaid"], *, infos: Mapping[str, TensorInfo] | None, fold: bool
) -> str:
    """Render the graph; see `StateMapper.explain`."""
    shown = outlines(graph, infos or {}, fold=fold)
    if form == "text":
        counts = (
            f"{len(graph.input_wires)} tensors -> {len(graph.output_wires)} tensors, {len(graph.components)} groups"
        )
        return "\n".join([counts, *(line for outline in shown for line in _text(outline))])
    if form == "mermaid":
        ids = (f"n{number}" for number in count())
        return "\n".join(["flowchart LR", *(line for outline in shown for line in _drawn(outline, ids))])
    raise ValueError(f"got format {form!r}; expected 'text' or 'mermaid'.")


def _text(outline: Outline) -> Iterator[str]:
    """Render one line per step; the first line has the number of folded groups."""
    consumed = {label.wire for step in outline.steps for label in step.inputs}
    for number, step in enumerate(outline.steps):
        inputs = ", ".join(_named(label) for label in step.inputs) or "(kept)"
        outputs = ", ".join(_named(label, dropped=label.wire not in consumed) for label in step.outputs) or "(dropped)"
        operation = "" if step.operation is None else f"-> {step.operation} "
        note = f"  ({outline.num_groups} groups)" if outline.num_groups > 1 and number == 0 else ""
        yield f"  {inputs} {operation}-> {outputs}{note}"


def _named(label: Label, *, dropped: bool = False) -> str:
    unnamed = "(dropped)" if dropped else f"(value {label.wire})"
    text = label.name or unnamed
    return text if label.info is None else f"{text} {label.info.describe()}"


def _drawn(outline: Outline, ids: Iterator[str]) -> Iterator[str]:
    """Render Mermaid lines: boxes for inputs, hexagons for operations, rounded boxes for outputs, arrows for values."""
    consumed = {label.wire for step in outline.steps for label in step.inputs}
    producers: dict[int, str] = {}  # Mermaid id of the operation that produces each wire
    margin = "  "
    if outline.num_groups > 1:
        yield f'  subgraph {next(ids)}["{outline.num_groups} groups"]'
        margin = "    "
    for step in outline.steps:
        ends = [f'{next(ids)}(["{_escaped(_named(label))}"])' for label in step.outputs if label.name]
        if any(not label.name and label.wire not in consumed for label in step.outputs) or not step.outputs:
            ends.append(f'{next(ids)}[/"dropped"/]')
        starts = [_start(label, producers, ids) for label in step.inputs] or [f'{next(ids)}[/"kept"/]']
        if step.operation is None:
            yield f"{margin}{starts[0]} --> {ends[0]}"
            continue
        operation = next(ids)
        producers |= {label.wire: operation for label in step.outputs}
        yield f'{margin}{operation}{{{{"{_escaped(step.operation)}"}}}}'
        yield from (f"{margin}{start} --> {operation}" for start in starts)
        yield from (f"{margin}{operation} --> {end}" for end in ends)
    if outline.num_groups > 1:
        yield "  end"


def _start(label: Label, producers: Mapping[int, str], ids: Iterator[str]) -> str:
    if label.name:
        return f'{next(ids)}["{_escaped(_named(label))}"]'
    shape = "" if label.info is None else f' -- "{_escaped(label.info.describe())}"'
    return f"{producers[label.wire]}{shape}"


def _escaped(text: str) -> str:
    return "".join(char if char.isalnum() or char in _PLAIN else f"#{ord(char)};" for char in text)
