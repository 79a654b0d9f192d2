"""`StateMapper`: an immutable graph from named input tensors to named output tensors, executed one group at a time.

Nodes are connected by numbered wires; only the graph's inputs and outputs have names. Hence renaming costs nothing,
intermediate names of chained mappers cannot clash, and the graph is acyclic by construction.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Self, final

from torch import Tensor, nn

from d9d_dist import Region
from d9d_state.mapper import _check, _explain
from d9d_state.mapper._component import Component, Node, StateGroup, components
from d9d_state.mapper._shard import deal
from d9d_state.mapper.fill import Destination, TensorSource, fill, planned_reads
from d9d_state.mapper.operation import Operation
from d9d_state.tensor_info import TensorInfo


@final
@dataclass(frozen=True, eq=False)
class StateMapper:
    """Immutable graph from named input tensors to named output tensors.

    Create it with the functions of this package (`rename`, `stack`, `sequential`, ...), not with the constructor.

    Attributes:
        nodes: Operations with their wires, in topological order.
        input_wires: Wire of every input name.
        output_wires: Wire of every output name. A wire without input and producer is unset (`keep`).
        num_wires: Number of wires; wires are numbered from 0.
    """

    nodes: tuple[Node, ...]
    input_wires: Mapping[str, int]
    output_wires: Mapping[str, int]
    num_wires: int

    @property
    def inputs(self) -> Collection[str]:
        """Names that the mapper consumes, in order."""
        return self.input_wires.keys()

    @property
    def outputs(self) -> Collection[str]:
        """Names that the mapper produces or keeps, in order."""
        return self.output_wires.keys()

    @property
    def groups(self) -> tuple[StateGroup, ...]:
        """Independent groups, in a fixed order. Each input and each output is in exactly one group."""
        return tuple(component.group for component in self.components)

    def apply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Transform the tensors of one group.

        Args:
            tensors: Exactly the inputs of one group, on any device, including `meta`.

        Returns:
            The outputs of the group. They may be views of the inputs.

        Raises:
            ValueError: If `tensors` are not exactly the inputs of one group, or an operation does not accept them.
        """
        component = self._component_of_inputs(tensors)
        values = {self.input_wires[name]: tensor for name, tensor in tensors.items()}
        for node in component.nodes:
            results = component.call(node, [values[wire] for wire in node.inputs])
            values.update(zip(node.outputs, results, strict=True))
        return {name: values[self.output_wires[name]] for name in component.group.outputs}

    def infer(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Infer shapes and dtypes of the outputs that `apply` would return.

        Args:
            tensors: Shape and dtype of exactly the inputs of one group.

        Returns:
            Shape and dtype of the group's outputs.

        Raises:
            ValueError: If `tensors` are not exactly the inputs of one group, or an operation does not accept them.
        """
        component = self._component_of_inputs(tensors)
        values = {self.input_wires[name]: info for name, info in tensors.items()}
        component.infer(values)
        return {name: values[self.output_wires[name]] for name in component.group.outputs}

    def fill(self, destinations: Mapping[str, Destination], source: TensorSource) -> None:
        """Fill regions of outputs in place, reading only the required regions of inputs.

        Values that operations only move are read directly into the destinations, without a temporary. Elementwise
        operations run on the required regions, on the destination's device. Any other operation runs on full tensors in
        host memory, once per call.

        Args:
            destinations: Some or all outputs of one group. Nothing is read for empty regions. Kept outputs (`keep`) are
                not changed.
            source: Source of the inputs.

        Raises:
            ValueError: If `destinations` are not outputs of one group, the source lacks an input, an operation does not
                accept its inputs, or a destination's shape or dtype does not match the output. All floating-point
                dtypes match each other.
        """
        fill(self, destinations, source)

    def reads(
        self, destinations: Mapping[str, Region], tensors: Mapping[str, TensorInfo]
    ) -> tuple[tuple[str, Region], ...]:
        """Return the regions of inputs that `fill` would read.

        Args:
            destinations: Regions of outputs, from any number of groups.
            tensors: Shape and dtype of the source's tensors.

        Returns:
            Names and regions of inputs, in the order of the reads.

        Raises:
            ValueError: As in `fill`.
        """
        return planned_reads(self, destinations, tensors)

    def inverse(self) -> "StateMapper":
        """Return the inverse mapper, which restores the inputs of this mapper from its outputs bit for bit.

        Raises:
            ValueError: If an operation has no inverse, or some of the tensors that its inverse needs were dropped.
        """
        nodes = tuple(Node(node.operation.inverse(), node.outputs, node.inputs) for node in reversed(self.nodes))
        return checked(StateMapper(nodes, self.output_wires, self.input_wires, self.num_wires))

    def restrict(self, *, inputs: Iterable[str] | None = None, outputs: Iterable[str] | None = None) -> "StateMapper":
        """Return the mapper with only the groups that contain some names, for example those of a pipeline stage.

        If both `inputs` and `outputs` are given, a group must match both.

        Args:
            inputs: Keep groups that consume any of these names; `None` keeps all.
            outputs: Keep groups that produce any of these names; `None` keeps all.
        """
        wanted_inputs = None if inputs is None else frozenset(inputs)
        wanted_outputs = None if outputs is None else frozenset(outputs)
        kept = [
            component
            for component in self.components
            if (wanted_inputs is None or not wanted_inputs.isdisjoint(component.group.inputs))
            and (wanted_outputs is None or not wanted_outputs.isdisjoint(component.group.outputs))
        ]
        return self._part(kept)

    def shard(self, num_shards: int, index: int, *, num_bytes: Mapping[str, int] | None = None) -> "StateMapper":
        """Return the mapper with only the groups of one worker, balanced over the workers.

        Each group belongs to exactly one shard, and the result is deterministic, so all workers agree without
        communication. Groups are not split: of a mapper with a single group, one worker gets everything.

        Args:
            num_shards: Number of workers.
            index: Index of the worker.
            num_bytes: Size of every input in bytes, used to balance the shards; `None` balances the number of inputs.

        Raises:
            ValueError: If `index` is out of range, or `num_bytes` lacks an input.
        """
        return self._part(deal(self.components, num_shards, index, num_bytes))

    def check(
        self,
        *,
        source: str | Path | Mapping[str, TensorInfo],
        target: nn.Module | Mapping[str, TensorInfo],
        unused: Literal["error", "ignore"] = "error",
    ) -> Self:
        """Compare the mapper with a checkpoint and a model, reading headers only.

        Args:
            source: Folder in the Hugging Face layout, or shape and dtype of its tensors.
            target: Model on any device, including `meta`, or shape and dtype of its tensors.
            unused: `"error"` reports tensors in the source that the mapper does not consume; `"ignore"` allows them.

        Returns:
            This mapper.

        Raises:
            UserError: Listing every mismatch: tensors missing in or unused from the source, outputs missing in the
                model, model tensors that the mapper does not produce, wrong shapes and wrong dtypes. Floating-point
                dtypes match each other.
        """
        _check.check(self, source=source, target=target, unused=unused)
        return self

    def explain(
        self,
        format: Literal["text", "mermaid"] = "text",  # noqa: A002 - the natural name of this argument
        *,
        infos: Mapping[str, TensorInfo] | None = None,
        fold: bool = True,
    ) -> str:
        """Render the graph for people: one line per operation, and one per tensor that passes through unchanged.

        Args:
            format: `"text"` for lines of text, `"mermaid"` for a flowchart, for example for a Markdown code block.
            infos: Shapes and dtypes of inputs, such as `ModelFolder.tensors`. They and the inferred ones are shown.
            fold: Show groups and names that differ only in numbers once: `layers.{0..35}.q`. Within one group of lines,
                ranges of equal length advance together; ranges of different lengths form all combinations.

        Raises:
            ValueError: If the format is unknown.
        """
        return _explain.explain(self, format, infos=infos, fold=fold)

    @cached_property
    def unset_wires(self) -> frozenset[int]:
        """Wires without a value, because they depend on outputs of `keep`."""
        is_set = set(self.input_wires.values())
        for node in self.nodes:
            if is_set.issuperset(node.inputs):
                is_set.update(node.outputs)
        return frozenset(set(range(self.num_wires)) - is_set)

    def _part(self, kept: Iterable[Component]) -> "StateMapper":
        """Build a mapper from some components, with renumbered wires. The cost depends on these components only."""
        nodes: list[Node] = []
        inputs: dict[str, int] = {}
        outputs: dict[str, int] = {}
        wires: dict[int, int] = {}
        for component in kept:
            for name in component.group.inputs:
                inputs[name] = wires.setdefault(self.input_wires[name], len(wires))
            for node in component.nodes:
                taken = tuple([wires.setdefault(wire, len(wires)) for wire in node.inputs])
                nodes.append(
                    Node(node.operation, taken, tuple([wires.setdefault(wire, len(wires)) for wire in node.outputs]))
                )
            for name in component.group.outputs:
                outputs[name] = wires.setdefault(self.output_wires[name], len(wires))
        return StateMapper(tuple(nodes), inputs, outputs, len(wires))

    def component_of_outputs(self, names: Iterable[str]) -> Component:
        """Return the component that produces some outputs.

        Raises:
            ValueError: If `names` is empty or contains outputs of several groups.
        """
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
        """Connected components of the graph, one per group, in the order of `groups`."""
        return components(self.nodes, self.input_wires, self.output_wires, self.num_wires)

    @cached_property
    def _component_by_input(self) -> dict[str, Component]:
        return {name: component for component in self.components for name in component.group.inputs}

    @cached_property
    def _component_by_output(self) -> dict[str, Component]:
        return {name: component for component in self.components for name in component.group.outputs}

    def _component_of_inputs(self, names: Collection[str]) -> Component:
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


def leaf(operation: Operation, inputs: Iterable[str], outputs: Iterable[str]) -> StateMapper:
    """Create a mapper with a single operation.

    Args:
        operation: The operation.
        inputs: Names of its inputs, in order.
        outputs: Names of its outputs, in order.

    Raises:
        ValueError: If `inputs` or `outputs` is empty or contains a name twice.
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
    """Assign consecutive wires to names, starting at `first`.

    Args:
        names: The names.
        first: Wire of the first name.
        what: What happens to the names, for the error message: `"consumed"` or `"produced"`.

    Raises:
        ValueError: If a name occurs more than once; lists these names.
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
    """Raise if there are duplicate names.

    Raises:
        ValueError: If `names` is not empty; lists them.
    """
    if names:
        raise ValueError(f"{what} more than once: {', '.join(dict.fromkeys(names))}. Each name may be {what} once.")


def checked(mapper: StateMapper) -> StateMapper:
    """Return the mapper if every operation has values for all of its inputs or for none.

    Raises:
        ValueError: If an operation has values for some of its inputs only; lists these operations.
    """
    unset = mapper.unset_wires
    partial = [
        node.operation.describe()
        for node in mapper.nodes
        if 0 < len(unset.intersection(node.inputs)) < len(node.inputs)
    ]
    if partial:
        raise ValueError(
            f"{', '.join(partial)} would get only some of its inputs, because the others are kept or dropped; "
            "keep() or drop() all inputs of an operation, or none."
        )
    return mapper
