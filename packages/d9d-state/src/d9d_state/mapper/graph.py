"""The mapper itself: one immutable graph from named tensors to named tensors, run one independent group at a time.

Values travel on numbered wires, and only the two ends of the graph have names. Hence renaming costs nothing, the
names between two mappers of a chain can never clash with others, and a mapper contains no cycle by construction.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Self, final

from torch import Tensor, nn

from d9d_state.mapper import _check, _explain
from d9d_state.mapper._component import Component, Node, StateGroup, components
from d9d_state.mapper._shard import deal
from d9d_state.mapper.fill import Destination, TensorSource, fill, planned_reads
from d9d_state.mapper.operation import Operation
from d9d_state.mapper.region import Region
from d9d_state.tensor_info import TensorInfo


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
        return tuple(component.group for component in self.components)

    def apply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Transform the tensors of one group.

        Args:
            tensors: Exactly the inputs of one group, of any device; meta tensors give shapes and dtypes.

        Returns:
            The outputs of that group. They may be views of the inputs.

        Raises:
            ValueError: If `tensors` is not the inputs of one group, or an operation does not fit their shapes.
        """
        component = self._component_of_inputs(tensors)
        values = {self.input_wires[name]: tensor for name, tensor in tensors.items()}
        for node in component.nodes:
            results = component.call(node, [values[wire] for wire in node.inputs])
            values.update(zip(node.outputs, results, strict=True))
        return {name: values[self.output_wires[name]] for name in component.group.outputs}

    def infer(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Shapes and dtypes of what `apply` would give.

        Args:
            tensors: Exactly the inputs of one group.

        Returns:
            The outputs of that group.

        Raises:
            ValueError: If `tensors` is not the inputs of one group, or an operation does not fit their shapes.
        """
        component = self._component_of_inputs(tensors)
        values = {self.input_wires[name]: info for name, info in tensors.items()}
        component.infer(values)
        return {name: values[self.output_wires[name]] for name in component.group.outputs}

    def fill(self, destinations: Mapping[str, Destination], source: TensorSource) -> None:
        """Fill parts of outputs in place, reading only what they are made of.

        What operations only move is read straight into the destinations, without a temporary. What an operation
        computes elementwise is read and computed in parts, on the device of the destination; what any other operation
        computes, on whole tensors in the memory of the host, once for this call.

        Args:
            destinations: Some or all outputs of one group. Empty regions read nothing. Outputs that are kept (`keep`)
                stay as they are.
            source: What is read from.

        Raises:
            ValueError: If `destinations` are not of one group, the source lacks an input, an operation does not fit, or
                a destination has another shape or kind of dtype than the output.
        """
        fill(self, destinations, source)

    def reads(
        self, destinations: Mapping[str, Region], tensors: Mapping[str, TensorInfo]
    ) -> tuple[tuple[str, Region], ...]:
        """What `fill` would read, without reading it.

        Args:
            destinations: Regions of outputs, of any groups.
            tensors: What the source holds.

        Returns:
            Names and regions of inputs, in the order in which they are read.

        Raises:
            ValueError: As `fill` does.
        """
        return planned_reads(self, destinations, tensors)

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
            for component in self.components
            if (wanted_inputs is None or not wanted_inputs.isdisjoint(component.group.inputs))
            and (wanted_outputs is None or not wanted_outputs.isdisjoint(component.group.outputs))
        ]
        return self._part(kept)

    def shard(self, num_shards: int, index: int, *, num_bytes: Mapping[str, int] | None = None) -> "StateMapper":
        """The same mapper with only the groups that one of several workers is to do.

        The shards are disjoint, together they are everything, and every worker that calls this sees the same ones. A
        group is never torn, so that a mapper of a single group gives one worker everything.

        Args:
            num_shards: Number of workers.
            index: Which worker.
            num_bytes: Size of every input, by which the shards are balanced; `None` counts inputs.

        Raises:
            ValueError: If there is no such worker, or `num_bytes` lacks an input.
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

    def explain(
        self,
        format: Literal["text", "mermaid"] = "text",  # noqa: A002 - what a reader would call it
        *,
        infos: Mapping[str, TensorInfo] | None = None,
        fold: bool = True,
    ) -> str:
        """The graph, to be read: one line per operation, and one per tensor that none touches.

        Args:
            format: Lines of text, or a flowchart as Mermaid draws it, in a fenced block of a Markdown file for example.
            infos: What inputs hold, as `ModelFolder.tensors` says; their shapes and those that follow are shown.
            fold: Whether what differs only in numbers is shown once: `layers.{0..35}.q`. In one group of lines, ranges
                of one length count together; of ranges of different lengths, every combination is meant.

        Raises:
            ValueError: If there is no such format.
        """
        return _explain.explain(self, format, infos=infos, fold=fold)

    @cached_property
    def unset_wires(self) -> frozenset[int]:
        """The wires that carry no value, because only `keep` feeds them."""
        is_set = set(self.input_wires.values())
        for node in self.nodes:
            if is_set.issuperset(node.inputs):
                is_set.update(node.outputs)
        return frozenset(set(range(self.num_wires)) - is_set)

    def _part(self, kept: Iterable[Component]) -> "StateMapper":
        """The mapper of some components, on wires of its own: its cost does not depend on the size of the whole."""
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
        """The connected part of the graph that gives some outputs.

        Raises:
            ValueError: If there are none, or they are not of one group.
        """
        found: Component | None = None
        for name in names:
            component = self._component_by_output.get(name)
            if component is None:
                raise ValueError(f"{name} is not an output of this mapper; expected one of its groups' outputs.")
            if found is not None and component is not found:
                raise ValueError(
                    f"{name} is not of the group of {', '.join(found.group.outputs)}; expected outputs of one group."
                )
            found = component
        if found is None:
            raise ValueError("got no tensors; expected outputs of one group.")
        return found

    @cached_property
    def components(self) -> tuple[Component, ...]:
        """The connected parts of the graph, one for each group, in the same order."""
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
