"""`StateMapper`: an immutable graph from named input tensors to named output tensors, executed one group at a time."""

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal, Self, final

from torch import Tensor, nn

from d9d_dist import Region
from d9d_state.mapper._check import Unused, refuse_mismatches
from d9d_state.mapper._explain import explain
from d9d_state.mapper.fill import Destination, TensorSource, fill_component, planned_reads
from d9d_state.mapper.graph import Component, Graph, Node
from d9d_state.mapper.operation import Operation
from d9d_state.model_folder import ModelFolder
from d9d_state.module_tensors import aliases, module_tensors
from d9d_state.tensor_info import TensorInfo


@final
class StateMapper(Graph):
    """Immutable graph from named input tensors to named output tensors.

    Created by the functions of this package (`rename`, `stack`, `sequential`, ...), not by the constructor.
    """

    @property
    def inputs(self) -> Collection[str]:
        """Names that the mapper consumes, in order."""
        return self.input_wires.keys()

    @property
    def outputs(self) -> Collection[str]:
        """Names that the mapper produces or keeps, in order."""
        return self.output_wires.keys()

    def apply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Transform exactly the tensors of one group, on any device, including `meta`. Outputs may be views of inputs.

        Raises:
            ValueError: If `tensors` are not exactly the inputs of one group, or an operation does not accept them.
        """
        component = self.component_of_inputs(tensors)
        values = {self.input_wires[name]: tensor for name, tensor in tensors.items()}
        for node in component.nodes:
            results = component.call(node, [values[wire] for wire in node.inputs])
            values.update(zip(node.outputs, results, strict=True))
        return {name: values[self.output_wires[name]] for name in component.group.outputs}

    def apply_all(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Transform the tensors of all groups, such as a whole state dict; see `apply`.

        Tensors that no group consumes are ignored.

        Raises:
            ValueError: If an input is missing, or an operation does not accept its tensors.
        """
        missing = [name for name in self.inputs if name not in tensors]
        if missing:
            raise ValueError(f"got no tensor {missing[0]!r}; expected all {len(self.inputs)} inputs of the mapper.")
        outputs: dict[str, Tensor] = {}
        for group in self.groups:
            outputs |= self.apply({name: tensors[name] for name in group.inputs})
        return outputs

    def infer(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Infer shapes and dtypes of the outputs that `apply` would return; raise `ValueError` where `apply` does."""
        component = self.component_of_inputs(tensors)
        values = {self.input_wires[name]: info for name, info in tensors.items()}
        component.infer(values)
        return {name: values[self.output_wires[name]] for name in component.group.outputs}

    def fill(self, destinations: Mapping[str, Destination], source: TensorSource) -> None:
        """Fill regions of outputs in place, reading only the required regions of inputs.

        Values that operations only move are read directly into the destinations. Elementwise operations and
        `dequantize` compute only the required regions, on the destination's device. Any other operation runs on full
        tensors in host memory, once per call.

        `destinations` has some or all outputs of one group. Nothing is read for empty regions. Kept outputs (`keep`)
        are not changed.

        Raises:
            ValueError: If `destinations` are not outputs of one group, or have a wrong shape or dtype; all
                floating-point dtypes match each other. Also if the source lacks an input, or an operation does not
                accept its inputs.
        """
        fill_component(self, self.component_of_outputs(destinations), destinations, source)

    def reads(
        self, destinations: Mapping[str, Region], tensors: Mapping[str, TensorInfo]
    ) -> tuple[tuple[str, Region], ...]:
        """Return names and regions of inputs that `fill` would read, in order, for outputs of any number of groups.

        `tensors` has shape and dtype of the source's tensors. Raises the errors of `fill`.
        """
        return planned_reads(self, destinations, tensors)

    def inverse(self) -> "StateMapper":
        """Return the inverse mapper, which restores the inputs of this mapper from its outputs bit for bit.

        Raises:
            ValueError: If an operation has no inverse, or tensors that its inverse needs were dropped.
        """
        nodes = tuple(Node(node.operation.inverse(), node.outputs, node.inputs) for node in reversed(self.nodes))
        return checked(StateMapper(nodes, self.output_wires, self.input_wires, self.num_wires))

    def restrict(self, *, inputs: Iterable[str] | None = None, outputs: Iterable[str] | None = None) -> "StateMapper":
        """Return the mapper with only the groups that consume any of `inputs` and produce any of `outputs`.

        `None` selects all groups. A pipeline stage, for example, restricts the mapper to its own outputs.
        """
        wanted_inputs = None if inputs is None else frozenset(inputs)
        wanted_outputs = None if outputs is None else frozenset(outputs)
        kept = [
            component
            for component in self.components
            if (wanted_inputs is None or not wanted_inputs.isdisjoint(component.group.inputs))
            and (wanted_outputs is None or not wanted_outputs.isdisjoint(component.group.outputs))
        ]
        return _part(self, kept)

    def shard(self, num_shards: int, index: int, *, num_bytes: Mapping[str, int] | None = None) -> "StateMapper":
        """Return the mapper with only the groups of worker `index`, balanced over the workers.

        Each group belongs to exactly one shard. The result is deterministic, so all workers agree without
        communication. Groups are not split: if the mapper has a single group, one worker gets the whole mapper.
        `num_bytes` has the bytes of every input, to balance the shards; `None` balances the number of inputs.

        Raises:
            ValueError: If `index` is out of range, or `num_bytes` lacks an input.
        """
        if not 0 <= index < num_shards:
            raise ValueError(f"got index = {index}, num_shards = {num_shards}; expected 0 <= index < num_shards.")
        weights = [_weight(component, num_bytes) for component in self.components]
        # Greedy: the largest group goes first, to the worker with the smallest load. The largest load is at most 4/3
        # of the optimum (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969).
        loads = [(0, 0, worker) for worker in range(num_shards)]
        mine: list[int] = []
        for position in sorted(range(len(weights)), key=lambda position: -weights[position]):
            load, count, worker = loads[0]
            heapq.heapreplace(loads, (load + weights[position], count + 1, worker))
            if worker == index:
                mine.append(position)
        return _part(self, [self.components[position] for position in sorted(mine)])

    def check(
        self,
        *,
        source: str | Path | Mapping[str, TensorInfo],
        target: nn.Module | Mapping[str, TensorInfo],
        unused: Unused = "error",
    ) -> Self:
        """Compare the mapper with a checkpoint and a model, reading headers only; return the mapper.

        Args:
            source: Folder in the Hugging Face layout, or shape and dtype of its tensors.
            target: Model on any device, including `meta`, or shape and dtype of its tensors.
            unused: `"error"` reports tensors in the source that the mapper does not consume; `"ignore"` allows them.

        Raises:
            UserError: Listing every mismatch: missing and unused tensors of the source, outputs missing in the model,
                model tensors that the mapper does not produce, wrong shapes and dtypes. Floating-point dtypes match
                each other, except that float8 in the source matches only itself.
        """
        held = source if isinstance(source, Mapping) else ModelFolder.open(source).tensors
        if isinstance(target, nn.Module):
            tensors = module_tensors(target)
            wanted, first_names = {name: TensorInfo.of(each) for name, each in tensors.items()}, aliases(tensors)
        else:
            wanted, first_names = target, {name: name for name in target}
        refuse_mismatches(
            self,
            held=held,
            wanted=wanted,
            first_names=first_names,
            consumed=self.inputs,
            unused=unused,
        )
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
            format: `"text"`, or `"mermaid"` for a flowchart, for example in a Markdown code block.
            infos: Shapes and dtypes of inputs to show, such as `ModelFolder.tensors`. Other shapes and dtypes are
                inferred.
            fold: Show groups and names that differ only in numbers once: `layers.{0..35}.q`. Ranges of equal length
                advance together; ranges of different lengths form all combinations.

        Raises:
            ValueError: If the format is unknown.
        """
        return explain(self, format, infos=infos, fold=fold)


def leaf(operation: Operation, inputs: Iterable[str], outputs: Iterable[str]) -> StateMapper:
    """Create a mapper of one operation from its input and output names, in order.

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
    """Assign consecutive wires to names from `first`; raise `ValueError` for duplicates, described as `what`."""
    listed = list(names)
    refuse_duplicates([name for name, count in Counter(listed).items() if count > 1], what=what)
    return {name: wire for wire, name in enumerate(listed, first)}


def refuse_duplicates(names: Collection[str], *, what: str) -> None:
    """Raise a `ValueError` that lists the names, if there are any."""
    if names:
        raise ValueError(
            f"{what} more than once: {', '.join(dict.fromkeys(names))}. Each name may be {what} only once."
        )


def checked(mapper: StateMapper) -> StateMapper:
    """Return the mapper; raise `ValueError` if an operation has values for only some of its inputs."""
    unset = mapper.unset_wires
    partial = [
        node.operation.describe()
        for node in mapper.nodes
        if 0 < len(unset.intersection(node.inputs)) < len(node.inputs)
    ]
    if partial:
        raise ValueError(
            f"{', '.join(partial)}: an operation would get only some of its inputs, because the others are kept or "
            "dropped; keep() or drop() all inputs of an operation, or none."
        )
    return mapper


def _weight(component: Component, num_bytes: Mapping[str, int] | None) -> int:
    names = component.group.inputs
    if num_bytes is None:
        return len(names)
    absent = [name for name in names if name not in num_bytes]
    if absent:
        raise ValueError(f"num_bytes lacks {', '.join(absent)}; expected the size of every input of the mapper.")
    return sum(num_bytes[name] for name in names)


def _part(graph: Graph, kept: Iterable[Component]) -> StateMapper:
    """Build a mapper from some components, with renumbered wires. The cost depends on these components only."""
    nodes: list[Node] = []
    inputs: dict[str, int] = {}
    outputs: dict[str, int] = {}
    wires: dict[int, int] = {}

    def renumber(wire: int) -> int:
        return wires.setdefault(wire, len(wires))

    for component in kept:
        inputs.update((name, renumber(graph.input_wires[name])) for name in component.group.inputs)
        nodes += [node.rewired(renumber) for node in component.nodes]
        outputs.update((name, renumber(graph.output_wires[name])) for name in component.group.outputs)
    return StateMapper(tuple(nodes), inputs, outputs, len(wires))
