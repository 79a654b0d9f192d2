"""`Graph`: operations connected by wires, and its connected components."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import final

from torch import Tensor

from d9d_state.mapper.operation import Operation
from d9d_state.tensor_info import TensorInfo


@final
@dataclass(frozen=True, slots=True)
class StateGroup:
    """Smallest set of inputs and outputs that can be transformed independently of all others.

    There are no inputs if the outputs are kept (`keep`), and no outputs if the inputs are dropped (`drop`).
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

    def rewired(self, rewire: Callable[[int], int]) -> "Node":
        """Return the node with other wires; `rewire` is called for the inputs first."""
        return Node(
            self.operation,
            tuple([rewire(wire) for wire in self.inputs]),
            tuple([rewire(wire) for wire in self.outputs]),
        )


@final
@dataclass(frozen=True, slots=True)
class Component:
    """Connected component of the graph."""

    group: StateGroup
    nodes: tuple[Node, ...]

    def call(self, node: Node, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Run a node's operation; raise `ValueError` if it fails or returns a wrong number of tensors."""
        try:
            results = node.operation(*tensors)
        except (RuntimeError, ValueError, IndexError) as error:
            raise self.failure(node, error) from error
        self._refuse_count(node, len(results))
        return results

    def infer(self, values: dict[int, TensorInfo]) -> None:
        """Add shape and dtype of every wire to `values`; raise `ValueError` if an operation refuses its inputs."""
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


@dataclass(frozen=True, eq=False)
class Graph:
    """Immutable graph of operations from named inputs to named outputs.

    Nodes are connected by numbered wires; only the graph's inputs and outputs have names. Hence renaming changes no
    nodes, intermediate names of chained mappers cannot clash, and the graph is acyclic by construction.

    Attributes:
        nodes: Operations with their wires, in topological order.
        input_wires: Wire of every input name.
        output_wires: Wire of every output name. A wire without input and producer is unset (`keep`).
        num_wires: Number of wires, which are numbered from 0.
    """

    nodes: tuple[Node, ...]
    input_wires: Mapping[str, int]
    output_wires: Mapping[str, int]
    num_wires: int

    @property
    def groups(self) -> tuple[StateGroup, ...]:
        """Independent groups, in a fixed order. Each input and each output is in exactly one group."""
        return tuple(component.group for component in self.components)

    @cached_property
    def unset_wires(self) -> frozenset[int]:
        """Wires without a value, because they depend on outputs of `keep`."""
        is_set = set(self.input_wires.values())
        for node in self.nodes:
            if is_set.issuperset(node.inputs):
                is_set.update(node.outputs)
        return frozenset(set(range(self.num_wires)) - is_set)

    def component_of_outputs(self, names: Iterable[str]) -> Component:
        """Return the component that produces the given outputs; raise `ValueError` if they belong to several groups."""
        found: Component | None = None
        for name in names:
            component = self._component_by_output.get(name)
            if component is None:
                raise ValueError(f"{name} is not an output of this mapper; expected one of its groups' outputs.")
            if found is not None and component is not found:
                raise ValueError(
                    f"{name} is not in the group of {', '.join(found.group.outputs)}; expected outputs of one group."
                )
            found = component
        if found is None:
            raise ValueError("got no tensors; expected outputs of one group.")
        return found

    @cached_property
    def components(self) -> tuple[Component, ...]:
        """Connected components of the graph, ordered by first input; those without inputs come last."""
        roots = _connected(self.num_wires, self.nodes)
        inputs: dict[int, list[str]] = {}
        outputs: dict[int, list[str]] = {}
        nodes: dict[int, list[Node]] = {}
        for name, wire in self.input_wires.items():
            inputs.setdefault(roots[wire], []).append(name)
        for name, wire in self.output_wires.items():
            outputs.setdefault(roots[wire], []).append(name)
        for node in self.nodes:
            nodes.setdefault(roots[node.inputs[0]], []).append(node)
        return tuple(
            Component(StateGroup(tuple(inputs.get(root, ())), tuple(outputs.get(root, ()))), tuple(nodes.get(root, ())))
            for root in {**inputs, **outputs}
        )

    @cached_property
    def _component_by_input(self) -> dict[str, Component]:
        return {name: component for component in self.components for name in component.group.inputs}

    @cached_property
    def _component_by_output(self) -> dict[str, Component]:
        return {name: component for component in self.components for name in component.group.outputs}

    def component_of_inputs(self, names: Collection[str]) -> Component:
        """Return the component that consumes exactly the given inputs; raise `ValueError` if there is none."""
        for name in names:
            component = self._component_by_input.get(name)
            if component is None:
                raise ValueError(f"{name} is not an input of this mapper; expected one of its groups' inputs.")
            if len(names) != len(component.group.inputs) or any(each not in names for each in component.group.inputs):
                raise ValueError(
                    f"got {', '.join(names)}; expected all inputs of one group: {', '.join(component.group.inputs)}."
                )
            return component
        raise ValueError(
            "got no tensors; expected the inputs of one group. Groups without inputs (keep) cannot be applied."
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
