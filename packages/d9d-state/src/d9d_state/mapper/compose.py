"""Mappers out of mappers: side by side, one after the other, under other prefixes, many times."""

from collections.abc import Collection, Iterable
from itertools import product

from d9d_state.mapper.graph import Node, StateMapper, checked, refuse_duplicates


def parallel(*mappers: StateMapper) -> StateMapper:
    """All mappers side by side.

    Raises:
        ValueError: Listing every name that two of them consume, or that two of them produce.
    """
    nodes: list[Node] = []
    inputs: dict[str, int] = {}
    outputs: dict[str, int] = {}
    consumed_twice: list[str] = []
    produced_twice: list[str] = []
    shift = 0
    for mapper in mappers:
        consumed_twice += [name for name in mapper.input_wires if name in inputs]
        produced_twice += [name for name in mapper.output_wires if name in outputs]
        nodes += (_rewired(node, range(shift, shift + mapper.num_wires)) for node in mapper.nodes)
        inputs.update((name, wire + shift) for name, wire in mapper.input_wires.items())
        outputs.update((name, wire + shift) for name, wire in mapper.output_wires.items())
        shift += mapper.num_wires
    refuse_duplicates(consumed_twice, what="consumed")
    refuse_duplicates(produced_twice, what="produced")
    return StateMapper(tuple(nodes), inputs, outputs, shift)


def sequential(*mappers: StateMapper) -> StateMapper:
    """One mapper after the other, as functions compose: each takes exactly what the one before it gives.

    Nothing passes by a mapper unseen: a tensor that it should leave alone is named, as
    `parallel(mapper, identity(*others))`, and one that is not needed further is given to `drop`.

    Raises:
        ValueError: If no mapper is given; or listing every name that is produced and not consumed by the next mapper,
            and every name that is consumed and not produced by the one before; or if an operation would get some of
            its tensors but not all.
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
        nodes += [_rewired(node, wires) for node in mapper.nodes]
        outputs = {name: wires[wire] for name, wire in mapper.output_wires.items()}
        num_wires += mapper.num_wires
    return checked(StateMapper(tuple(nodes), first.input_wires, outputs, num_wires))


def scope(prefix_in: str, prefix_out: str, mapper: StateMapper) -> StateMapper:
    """Put a prefix before every input name and one before every output name, dots included."""
    return StateMapper(
        nodes=mapper.nodes,
        input_wires={prefix_in + name: wire for name, wire in mapper.input_wires.items()},
        output_wires={prefix_out + name: wire for name, wire in mapper.output_wires.items()},
        num_wires=mapper.num_wires,
    )


def repeat(mapper: StateMapper, **values: Iterable[int | str]) -> StateMapper:
    """The mapper once per value, side by side, with the value put into the names.

    `repeat(rename("h.{i}.w", "layers.{i}.w"), i=range(12))` renames twelve tensors. Several placeholders take every
    combination of their values. Braces that are not named here are left alone.

    Args:
        mapper: Its names hold the placeholders: `{i}` for the keyword `i`.
        values: What each placeholder stands for.

    Raises:
        ValueError: If a placeholder is in no name, or two copies have a name in common.
    """
    names = [*mapper.inputs, *mapper.outputs]
    absent = [key for key in values if not any(f"{{{key}}}" in name for name in names)]
    if absent:
        raise ValueError(f"repeat() got values for {', '.join(absent)}, but no name holds {{{absent[0]}}}.")
    copies = (_filled(mapper, dict(zip(values, choice, strict=True))) for choice in product(*values.values()))
    return parallel(*copies)


def _filled(mapper: StateMapper, values: dict[str, int | str]) -> StateMapper:
    def fill(name: str) -> str:
        for key, value in values.items():
            name = name.replace(f"{{{key}}}", str(value))
        return name

    return StateMapper(
        nodes=mapper.nodes,
        input_wires={fill(name): wire for name, wire in mapper.input_wires.items()},
        output_wires={fill(name): wire for name, wire in mapper.output_wires.items()},
        num_wires=mapper.num_wires,
    )


def _rewired(node: Node, wires: range | list[int]) -> Node:
    return Node(node.operation, tuple(wires[wire] for wire in node.inputs), tuple(wires[wire] for wire in node.outputs))


def _refuse_mismatch(given: Collection[str], taken: Collection[str], position: int) -> None:
    unconsumed = [name for name in given if name not in taken]
    unproduced = [name for name in taken if name not in given]
    problems = []
    if unconsumed:
        problems.append(f"it does not consume {', '.join(unconsumed)}: name them in identity() or drop() beside it")
    if unproduced:
        problems.append(f"it consumes {', '.join(unproduced)}, which the mapper before it does not produce")
    if problems:
        raise ValueError(f"mapper {position} of sequential() does not fit the one before it: {'; '.join(problems)}.")
