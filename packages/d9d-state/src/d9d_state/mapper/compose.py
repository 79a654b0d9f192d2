"""Composition of mappers: in parallel, in sequence, with name prefixes, or repeated over placeholder values."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from itertools import product

from d9d_state.mapper.graph import Node
from d9d_state.mapper.state_mapper import StateMapper, checked, refuse_duplicates


def parallel(*mappers: StateMapper) -> StateMapper:
    """Combine independent mappers into one; raise `ValueError` that lists names consumed or produced twice."""
    nodes: list[Node] = []
    inputs: dict[str, int] = {}
    outputs: dict[str, int] = {}
    consumed_twice: list[str] = []
    produced_twice: list[str] = []
    shift = 0
    for mapper in mappers:
        consumed_twice += [name for name in mapper.input_wires if name in inputs]
        produced_twice += [name for name in mapper.output_wires if name in outputs]
        nodes += [node.rewired(shift.__add__) for node in mapper.nodes]
        inputs.update((name, wire + shift) for name, wire in mapper.input_wires.items())
        outputs.update((name, wire + shift) for name, wire in mapper.output_wires.items())
        shift += mapper.num_wires
    refuse_duplicates(consumed_twice, what="consumed")
    refuse_duplicates(produced_twice, what="produced")
    return StateMapper(tuple(nodes), inputs, outputs, shift)


def sequential(*mappers: StateMapper) -> StateMapper:
    """Chain mappers: each mapper consumes exactly the outputs of the mapper before it.

    Tensors do not pass through a mapper implicitly: name unchanged ones, as in `parallel(mapper, identity(*others))`,
    and `drop` tensors that are no longer needed.

    Raises:
        ValueError: If no mapper is given, or the outputs of a mapper are not exactly the inputs of the next (lists
            the names). Also if an operation would get values for only some of its inputs.
    """
    if not mappers:
        raise ValueError("sequential() got no mappers; expected at least one.")
    first = mappers[0]
    nodes, outputs, num_wires = list(first.nodes), first.output_wires, first.num_wires
    for position, mapper in enumerate(mappers[1:], start=1):
        _refuse_mismatch(outputs, mapper.input_wires, position)
        wires = list(range(num_wires, num_wires + mapper.num_wires))
        for name, wire in mapper.input_wires.items():
            wires[wire] = outputs[name]
        nodes += [node.rewired(wires.__getitem__) for node in mapper.nodes]
        outputs = {name: wires[wire] for name, wire in mapper.output_wires.items()}
        num_wires += mapper.num_wires
    return checked(StateMapper(tuple(nodes), first.input_wires, outputs, num_wires))


def scope(prefix_in: str, prefix_out: str, mapper: StateMapper) -> StateMapper:
    """Add a prefix to every input name and another to every output name. Prefixes include their trailing dot."""
    return _renamed(mapper, lambda name: prefix_in + name, lambda name: prefix_out + name)


def repeat(mapper: StateMapper, **values: Iterable[int | str]) -> StateMapper:
    """Copy a mapper once per value, in parallel, with the value substituted for a placeholder in the names.

    `repeat(rename("h.{i}.w", "layers.{i}.w"), i=range(12))` renames twelve tensors. Several placeholders give a copy
    for every combination of their values. Other text in braces is not changed.

    Raises:
        ValueError: If no name contains a placeholder, or two copies have a name in common.
    """
    names = [*mapper.inputs, *mapper.outputs]
    absent = [key for key in values if not any(f"{{{key}}}" in name for name in names)]
    if absent:
        raise ValueError(f"repeat() got values for {', '.join(absent)}, but no name contains {{{absent[0]}}}.")
    copies = (_filled(mapper, dict(zip(values, choice, strict=True))) for choice in product(*values.values()))
    return parallel(*copies)


def _filled(mapper: StateMapper, values: dict[str, int | str]) -> StateMapper:
    def fill(name: str) -> str:
        for key, value in values.items():
            name = name.replace(f"{{{key}}}", str(value))
        return name

    return _renamed(mapper, fill, fill)


def _renamed(mapper: StateMapper, of_input: Callable[[str], str], of_output: Callable[[str], str]) -> StateMapper:
    inputs = {of_input(name): wire for name, wire in mapper.input_wires.items()}
    outputs = {of_output(name): wire for name, wire in mapper.output_wires.items()}
    return replace(mapper, input_wires=inputs, output_wires=outputs)


def _refuse_mismatch(given: Collection[str], taken: Collection[str], position: int) -> None:
    unconsumed = [name for name in given if name not in taken]
    unproduced = [name for name in taken if name not in given]
    problems = []
    if unconsumed:
        problems.append(
            f"it does not consume {', '.join(unconsumed)}: add them to identity() or drop() in parallel with it"
        )
    if unproduced:
        problems.append(f"it consumes {', '.join(unproduced)}, which the mapper before it does not produce")
    if problems:
        raise ValueError(
            f"mapper {position} of sequential() does not match the mapper before it: {'; '.join(problems)}."
        )
