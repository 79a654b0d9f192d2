"""The mapper itself: one immutable graph from named tensors to named tensors, run one independent group at a time.

Values travel on numbered wires, and only the two ends of the graph have names. Hence renaming costs nothing, the
names between two mappers of a chain can never clash with others, and a mapper contains no cycle by construction.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol, Self, final

from torch import Tensor, nn

from d9d_state.mapper import _check, _explain
from d9d_state.tensor_info import TensorInfo


class Operation(Protocol):
    """What a node of the graph does to its tensors. `describe()` is how `explain` shows it."""

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs from the inputs, on whatever device they are: on meta tensors it infers shapes."""
        ...

    def inverse(self) -> "Operation":
        """The operation that gives the inputs back, bit for bit.

        Raises:
            ValueError: If there is none.
        """
        ...

    def describe(self) -> str:
        """Its name and arguments, short."""
        ...


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


@dataclass(frozen=True, slots=True)
class _Component:
    """A connected part of the graph: what runs when its group is applied."""

    group: StateGroup
    nodes: tuple[Node, ...]


@final
@dataclass(frozen=True, eq=False)
class StateMapper:
    """An immutable graph from named tensors to named tensors.

    Built by the functions of this package (`rename`, `stack`, `sequential`, ...), not by hand.

    Attributes:
        nodes: The operations, each after those whose outputs it takes.
        input_wires: The wire of every input name.
        output_wires: The wire of every output name. A wire that no input and no node feeds stays unset (`keep`).
        num_wires: Every wire is in `range(num_wires)`.
    """

    nodes: tuple[Node, ...]
    input_wires: Mapping[str, int]
    output_wires: Mapping[str, int]
    num_wires: int

    @property
    def inputs(self) -> Collection[str]:
        """Every name that the mapper consumes, in order."""
        return self.input_wires.keys()

    @property
    def outputs(self) -> Collection[str]:
        """Every name that the mapper produces or keeps, in order."""
        return self.output_wires.keys()

    @property
    def groups(self) -> tuple[StateGroup, ...]:
        """The independent groups, in a fixed order. Together they hold each input and each output once."""
        return tuple(component.group for component in self._components)

    def apply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Transform the tensors of one group.

        Args:
            tensors: Exactly the inputs of one group, of any device; meta tensors give shapes and dtypes.

        Returns:
            The outputs of that group. They may be views of the inputs.

        Raises:
            ValueError: If `tensors` is not the inputs of one group, or an operation does not fit their shapes.
        """
        component = self._component_of(tensors)
        values = {self.input_wires[name]: tensor for name, tensor in tensors.items()}
        for node in component.nodes:
            try:
                results = node.operation(*(values[wire] for wire in node.inputs))
            except (RuntimeError, ValueError, IndexError) as error:
                names = ", ".join(component.group.inputs)
                raise ValueError(f"{node.operation.describe()} on {names} failed: {error}") from error
            if len(results) != len(node.outputs):
                raise ValueError(
                    f"{node.operation.describe()} on {', '.join(component.group.inputs)} gave {len(results)} tensors; "
                    f"expected {len(node.outputs)}."
                )
            values.update(zip(node.outputs, results, strict=True))
        return {name: values[self.output_wires[name]] for name in component.group.outputs}

    def inverse(self) -> "StateMapper":
        """The mapper of the way back: `m.inverse()` applied to what `m` gives restores it bit for bit.

        Raises:
            ValueError: If an operation has no inverse, or what it would need was dropped.
        """
        nodes = tuple(Node(node.operation.inverse(), node.outputs, node.inputs) for node in reversed(self.nodes))
        return checked(StateMapper(nodes, self.output_wires, self.input_wires, self.num_wires))

    def restrict(self, *, inputs: Iterable[str] | None = None, outputs: Iterable[str] | None = None) -> "StateMapper":
        """The same mapper with only the groups that touch some names: the part of one pipeline stage, for example.

        Args:
            inputs: Keep the groups that consume any of these; `None` asks for nothing.
            outputs: Keep the groups that produce any of these; `None` asks for nothing.
        """
        wanted_inputs = None if inputs is None else frozenset(inputs)
        wanted_outputs = None if outputs is None else frozenset(outputs)
        kept = [
            component
            for component in self._components
            if (wanted_inputs is None or not wanted_inputs.isdisjoint(component.group.inputs))
            and (wanted_outputs is None or not wanted_outputs.isdisjoint(component.group.outputs))
        ]
        return StateMapper(
            nodes=tuple(node for component in kept for node in component.nodes),
            input_wires={name: self.input_wires[name] for component in kept for name in component.group.inputs},
            output_wires={name: self.output_wires[name] for component in kept for name in component.group.outputs},
            num_wires=self.num_wires,
        )

    def check(
        self,
        *,
        source: str | Path | Mapping[str, TensorInfo],
        target: nn.Module | Mapping[str, TensorInfo],
        unused: Literal["error", "ignore"] = "error",
    ) -> Self:
        """Compare the mapper with a checkpoint and a model, reading headers only.

        Args:
            source: A folder in the Hugging Face layout, or what it holds.
            target: The model, on any device, `meta` included, or the tensors it holds.
            unused: Whether a tensor of the source that the mapper does not consume is a mismatch.

        Returns:
            The mapper.

        Raises:
            UserError: Listing every mismatch: tensors missing in or unused from the source, outputs that the model
                does not have, model tensors that nothing fills, wrong shapes, wrong kinds of dtype.
        """
        _check.check(self, source=source, target=target, unused=unused)
        return self

    def explain(self) -> str:
        """The graph as text, one line per operation."""
        return _explain.explain(self)

    @cached_property
    def unset_wires(self) -> frozenset[int]:
        """The wires that carry no value, because only `keep` feeds them."""
        is_set = set(self.input_wires.values())
        for node in self.nodes:
            if is_set.issuperset(node.inputs):
                is_set.update(node.outputs)
        return frozenset(set(range(self.num_wires)) - is_set)

    @cached_property
    def _components(self) -> tuple[_Component, ...]:
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
            _Component(
                StateGroup(tuple(inputs.get(root, ())), tuple(outputs.get(root, ()))), tuple(nodes.get(root, ()))
            )
            for root in dict.fromkeys([*inputs, *outputs])
        )

    @cached_property
    def _component_by_input(self) -> dict[str, _Component]:
        return {name: component for component in self._components for name in component.group.inputs}

    def _component_of(self, tensors: Mapping[str, Tensor]) -> _Component:
        for name in tensors:
            component = self._component_by_input.get(name)
            if component is None:
                raise ValueError(f"{name} is not an input of this mapper; expected one of its groups' inputs.")
            if tensors.keys() != set(component.group.inputs):
                raise ValueError(
                    f"got {', '.join(tensors)}; expected all inputs of one group: {', '.join(component.group.inputs)}."
                )
            return component
        raise ValueError("got no tensors; a group without inputs keeps its values and is not applied.")


def leaf(operation: Operation, inputs: Iterable[str], outputs: Iterable[str]) -> StateMapper:
    """A mapper of one operation.

    Raises:
        ValueError: If there is no input or no output, or a name occurs twice on one side.
    """
    sources, targets = tuple(inputs), tuple(outputs)
    if not sources or not targets:
        raise ValueError(
            f"{operation.describe()} got {len(sources)} inputs and {len(targets)} outputs; expected at least one each."
        )
    wires = tuple(range(len(sources) + len(targets)))
    return StateMapper(
        nodes=(Node(operation, wires[: len(sources)], wires[len(sources) :]),),
        input_wires=named_wires(sources, 0, what="consumed"),
        output_wires=named_wires(targets, len(sources), what="produced"),
        num_wires=len(wires),
    )


def named_wires(names: Iterable[str], first: int, *, what: str) -> dict[str, int]:
    """Give each name a wire of its own, counted from `first`.

    Raises:
        ValueError: Listing the names that occur more than once.
    """
    wires: dict[str, int] = {}
    twice: list[str] = []
    for wire, name in enumerate(names, first):
        if name in wires:
            twice.append(name)
        wires[name] = wire
    refuse_duplicates(twice, what=what)
    return wires


def refuse_duplicates(names: Collection[str], *, what: str) -> None:
    """Raise if any name was used more than once.

    Raises:
        ValueError: Listing them.
    """
    if names:
        raise ValueError(f"{what} more than once: {', '.join(dict.fromkeys(names))}. Each name may be {what} once.")


def checked(mapper: StateMapper) -> StateMapper:
    """Refuse operations that would get some of their tensors but not all.

    Raises:
        ValueError: Listing those operations.
    """
    unset = mapper.unset_wires
    torn = [
        node.operation.describe()
        for node in mapper.nodes
        if 0 < len(unset.intersection(node.inputs)) < len(node.inputs)
    ]
    if torn:
        raise ValueError(
            f"{', '.join(torn)} would need values that keep() leaves unset or that were dropped; "
            "keep or drop all the inputs of an operation, or none."
        )
    return mapper


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
