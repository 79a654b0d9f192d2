"""The parts of a graph that do not depend on each other: what runs, is inferred and is filled when a group is."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from d9d_state.mapper.operation import Operation
from d9d_state.tensor_info import TensorInfo


@final
@dataclass(frozen=True, slots=True)
class StateGroup:
    """Names that have to be transformed together, because they depend on each other and on nothing else.

    Attributes:
        inputs: Names that are consumed. Empty when the outputs keep the values that they have.
        outputs: Names that are produced. Empty when the inputs are dropped.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class Node:
    """One operation and the wires it is connected to."""

    operation: Operation
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class Component:
    """A connected part of the graph.

    Attributes:
        group: Its names.
        nodes: Its operations, in the order of the graph.
    """

    group: StateGroup
    nodes: tuple[Node, ...]

    def call(self, node: Node, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Run the operation of a node.

        Raises:
            ValueError: Naming the operation and the inputs of the group, if it fails or the number of tensors is wrong.
        """
        try:
            results = node.operation(*tensors)
        except (RuntimeError, ValueError, IndexError) as error:
            raise self.failure(node, error) from error
        self._refuse_count(node, len(results))
        return results

    def infer(self, values: dict[int, TensorInfo]) -> None:
        """Extend what is known of the wires that inputs feed to all other wires.

        Args:
            values: What is on each wire; changed in place.

        Raises:
            ValueError: Naming the operation and the inputs of the group, if an operation does not fit.
        """
        for node in self.nodes:
            try:
                results = node.operation.infer(*[values[wire] for wire in node.inputs])
            except ValueError as error:
                raise self.failure(node, error) from error
            self._refuse_count(node, len(results))
            values.update(zip(node.outputs, results, strict=True))

    def failure(self, node: Node, problem: object) -> ValueError:
        """The error that says which operation, on which tensors, has a problem."""
        return ValueError(f"{node.operation.describe()} on {', '.join(self.group.inputs)} failed: {problem}")

    def _refuse_count(self, node: Node, count: int) -> None:
        if count != len(node.outputs):
            raise ValueError(
                f"{node.operation.describe()} on {', '.join(self.group.inputs)} gave {count} tensors; "
                f"expected {len(node.outputs)}."
            )


def components(
    nodes: Iterable[Node], input_wires: Mapping[str, int], output_wires: Mapping[str, int], num_wires: int
) -> tuple[Component, ...]:
    """The connected parts of a graph, in the order of their first names, inputs before outputs."""
    nodes = tuple(nodes)
    roots = _connected(num_wires, nodes)
    nodes_of: dict[int, list[Node]] = {}
    for node in nodes:
        nodes_of.setdefault(roots[node.inputs[0]], []).append(node)
    # A wire without nodes is a component with at most a name on each side; there may be very many.
    bare_outputs = {wire: (name,) for name, wire in output_wires.items() if roots[wire] not in nodes_of}
    inputs: dict[int, list[str]] = {root: [] for root in nodes_of}
    outputs: dict[int, list[str]] = {root: [] for root in nodes_of}
    found: dict[int, Component | None] = {}
    for name, wire in input_wires.items():
        root = roots[wire]
        if root in inputs:
            inputs[root].append(name)
            found.setdefault(root)
        else:
            found[root] = Component(StateGroup((name,), bare_outputs.get(wire, ())), ())
    for name, wire in output_wires.items():
        root = roots[wire]
        if root in outputs:
            outputs[root].append(name)
            found.setdefault(root)
        elif root not in found:
            found[root] = Component(StateGroup((), (name,)), ())
    return tuple(
        component or Component(StateGroup(tuple(inputs[root]), tuple(outputs[root])), tuple(nodes_of[root]))
        for root, component in found.items()
    )


def _connected(num_wires: int, nodes: Iterable[Node]) -> list[int]:
    """For each wire a representative of all wires that nodes connect with it."""
    parent = list(range(num_wires))

    def root(wire: int) -> int:
        above = parent[wire]
        while above != wire:
            parent[wire] = parent[above]
            wire, above = above, parent[above]
        return wire

    for node in nodes:
        first = root(node.inputs[0])
        for wire in (*node.inputs[1:], *node.outputs):
            parent[root(wire)] = first
    return [root(wire) for wire in range(num_wires)]
