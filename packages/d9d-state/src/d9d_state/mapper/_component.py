"""Connected components of a mapper's graph. Each corresponds to one `StateGroup` and runs independently."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from d9d_state.mapper.operation import Operation
from d9d_state.tensor_info import TensorInfo


@final
@dataclass(frozen=True, slots=True)
class StateGroup:
    """Smallest set of inputs and outputs that are transformed together, independently of all others.

    Attributes:
        inputs: Names that are consumed. Empty if the outputs are kept (`keep`).
        outputs: Names that are produced. Empty if the inputs are dropped (`drop`).
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class Node:
    """One operation with its input and output wires."""

    operation: Operation
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class Component:
    """Connected component of the graph.

    Attributes:
        group: Input and output names of the component.
        nodes: Nodes of the component, in topological order.
    """

    group: StateGroup
    nodes: tuple[Node, ...]

    def call(self, node: Node, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Run the operation of a node.

        Raises:
            ValueError: If the operation fails or returns a wrong number of tensors; names the operation and the group's
                inputs.
        """
        try:
            results = node.operation(*tensors)
        except (RuntimeError, ValueError, IndexError) as error:
            raise self.failure(node, error) from error
        self._refuse_count(node, len(results))
        return results

    def infer(self, values: dict[int, TensorInfo]) -> None:
        """Infer shape and dtype of every wire from those of the input wires.

        Args:
            values: Shape and dtype by wire; the inferred ones are added in place.

        Raises:
            ValueError: If an operation does not accept its inputs; names the operation and the group's inputs.
        """
        for node in self.nodes:
            try:
                results = node.operation.infer(*[values[wire] for wire in node.inputs])
            except ValueError as error:
                raise self.failure(node, error) from error
            self._refuse_count(node, len(results))
            values.update(zip(node.outputs, results, strict=True))

    def failure(self, node: Node, problem: object) -> ValueError:
        """Return an error that names the operation, the group's inputs and the problem."""
        return ValueError(f"{node.operation.describe()} on {', '.join(self.group.inputs)} failed: {problem}")

    def _refuse_count(self, node: Node, count: int) -> None:
        if count != len(node.outputs):
            raise ValueError(
                f"{node.operation.describe()} on {', '.join(self.group.inputs)} returned {count} tensors; "
                f"expected {len(node.outputs)}."
            )


def components(
    nodes: Iterable[Node], input_wires: Mapping[str, int], output_wires: Mapping[str, int], num_wires: int
) -> tuple[Component, ...]:
    """Return the connected components of a graph, ordered by their first input; those without inputs come last."""
    nodes = tuple(nodes)
    roots = _connected(num_wires, nodes)
    nodes_of: dict[int, list[Node]] = {}
    for node in nodes:
        nodes_of.setdefault(roots[node.inputs[0]], []).append(node)
    # Fast path: a wire without nodes is a component with at most one input and one output. There may be very many.
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
    """Return for each wire the representative wire of its connected component (union-find)."""
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
