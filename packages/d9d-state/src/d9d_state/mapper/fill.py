"""Filling of outputs in place from regions of a source, such as experts read directly into a rank's shard of a stack.

The engine walks from the wanted region of an output back to the inputs. A `Layout` operation maps views of the output's
memory to regions of its inputs, until the source writes into the caller's memory. Operations that compute need
temporary memory: for the required regions, or for full tensors if they are neither `Local` nor `Regional`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, final

import torch
from torch import Tensor

from d9d_dist import Region
from d9d_state.mapper._dims import is_lossless
from d9d_state.mapper.graph import Component, Graph, Node
from d9d_state.mapper.operation import Constant, Layout, Local, Piece, Regional
from d9d_state.tensor_info import TensorInfo


class TensorSource(Protocol):
    """Collection of named tensors whose regions can be read."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every tensor."""
        ...

    def read_into(self, name: str, region: Region, target: Tensor) -> None:
        """Read a region of a tensor into `target`, a plain tensor with the region's shape, any device and any strides.

        `target` has the tensor's dtype, or both dtypes are floating-point and values are converted as by `copy_`.
        """
        ...


@final
@dataclass(frozen=True, slots=True)
class Destination:
    """Memory to fill with a region of an output.

    Attributes:
        region: Wanted region of the output: the whole output, or a `DTensor`'s local shard.
        tensor: Plain tensor with the region's shape, on any device, with any strides.
    """

    region: Region
    tensor: Tensor


def planned_reads(
    graph: Graph, regions: Mapping[str, Region], tensors: Mapping[str, TensorInfo]
) -> tuple[tuple[str, Region], ...]:
    """Return the regions that `fill` would read; see `StateMapper.reads`."""
    recorder = ReadRecorder(tensors)
    wanted = {name: region for name, region in regions.items() if region.num_elements > 0}
    while wanted:
        component = graph.component_of_outputs([next(iter(wanted))])
        part = {name: wanted.pop(name) for name in component.group.outputs if name in wanted}
        if component.group.inputs:
            infos = _infer(graph, component, tensors)
            destinations = {
                name: Destination(region, _empty(region, infos[graph.output_wires[name]].dtype, torch.device("meta")))
                for name, region in part.items()
            }
            fill_component(graph, component, destinations, recorder)
    return tuple((name, region) for name, region, _ in recorder.reads)


@final
class ReadRecorder:
    """Source that records each read, with its target memory, without reading data."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self.tensors = tensors
        self.reads: list[tuple[str, Region, Tensor]] = []

    def read_into(self, name: str, region: Region, target: Tensor) -> None:
        """Record a read."""
        assert tuple(target.shape) == region.sizes
        self.reads.append((name, region, target))


@torch.no_grad()
def fill_component(
    graph: Graph, component: Component, destinations: Mapping[str, Destination], source: TensorSource
) -> None:
    """Fill outputs of one group in place; see `StateMapper.fill`."""
    wanted = {name: each for name, each in destinations.items() if each.region.num_elements > 0}
    if not wanted or not component.group.inputs:
        return
    infos = _infer(graph, component, source.tensors)
    for name, destination in wanted.items():
        _check_destination(name, destination, infos[graph.output_wires[name]])
    names = {graph.input_wires[name]: name for name in component.group.inputs}
    producers = {wire: node for node in component.nodes for wire in node.outputs}
    filling = _Filling(component, names, producers, infos, source)
    for name, destination in wanted.items():
        filling.fill(graph.output_wires[name], destination.region, destination.tensor)


def _infer(graph: Graph, component: Component, held: Mapping[str, TensorInfo]) -> dict[int, TensorInfo]:
    absent = [name for name in component.group.inputs if name not in held]
    if absent:
        raise ValueError(f"the source does not contain {', '.join(absent)}; expected all inputs of the group.")
    infos = {graph.input_wires[name]: held[name] for name in component.group.inputs}
    component.infer(infos)
    return infos


def _check_destination(name: str, destination: Destination, info: TensorInfo) -> None:
    region, tensor = destination.region, destination.tensor
    if not region.is_within(info.shape):
        raise ValueError(
            f"{name}: got the region at {list(region.offsets)} of sizes {list(region.sizes)}; expected a region within "
            f"shape {list(info.shape)}."
        )
    if tuple(tensor.shape) != region.sizes:
        raise ValueError(f"{name}: got a tensor of shape {list(tensor.shape)}; expected {list(region.sizes)}.")
    if tensor.dtype != info.dtype and not (tensor.dtype.is_floating_point and info.dtype.is_floating_point):
        raise ValueError(f"{name}: got a tensor of {tensor.dtype}; expected {info.dtype}.")


@final
@dataclass(frozen=True, slots=True)
class _Filling:
    """State of filling one group. A target has the dtype of its wire, or both dtypes are floating-point."""

    component: Component
    names: Mapping[int, str]
    producers: Mapping[int, Node]
    infos: Mapping[int, TensorInfo]
    source: TensorSource
    results: dict[tuple[int, tuple[Region, ...]], tuple[Tensor, ...]] = field(default_factory=dict)
    """Cached results by a node's first output wire and input regions."""

    def fill(self, wire: int, region: Region, target: Tensor) -> None:
        """Fill a tensor with a region of a wire's value."""
        if wire in self.names:
            self.source.read_into(self.names[wire], region, target)
            return
        node = self.producers[wire]
        output, operation = node.outputs.index(wire), node.operation
        if isinstance(operation, Layout) and self._move(node, operation, output, region, target):
            return
        inputs = [self.infos[each] for each in node.inputs]
        if isinstance(operation, Regional):
            needs = operation.needs(output, region, inputs)
            target.copy_(operation.compute(region, *self._inputs(node, needs, target.device)))
        elif isinstance(operation, Local):
            needs = operation.needs(output, region, inputs)
            result = self._computed(node, needs, target.device, is_cached=len(node.outputs) > 1)[output]
            if tuple(result.shape) != region.sizes:
                shapes = f"it returned shape {list(result.shape)} for a region; expected {list(region.sizes)}."
                raise self.component.failure(node, shapes)
            target.copy_(result)
        else:
            # In host memory, since full tensors may not fit into device memory.
            device = torch.device("meta" if target.is_meta else "cpu")
            needs = [Region.whole(info.shape) for info in inputs]
            target.copy_(region.of(self._computed(node, needs, device, is_cached=True)[output]))

    def _move(self, node: Node, operation: Layout, output: int, region: Region, target: Tensor) -> bool:
        """Fill the target piece by piece; return False if the operation cannot map the target to views."""
        dtype = self.infos[node.outputs[output]].dtype
        pieces = operation.pieces(output, region, target, [self.infos[wire] for wire in node.inputs])
        if pieces is None:
            if target.is_contiguous():
                return False
            contiguous = _empty(region, dtype, target.device)
            is_moved = self._move(node, operation, output, region, contiguous)
            if is_moved:
                target.copy_(contiguous)
            return is_moved
        for piece in pieces:
            if isinstance(piece, Constant):
                piece.target.fill_(torch.tensor(piece.value, dtype=dtype).item())
            else:
                self._fill_rounded(dtype, node.inputs[piece.input], piece)
        return True

    def _fill_rounded(self, dtype: torch.dtype, wire: int, piece: Piece) -> None:
        """Fill a piece with values rounded to `dtype`, independent of the target's dtype."""
        given = self.infos[wire].dtype
        if _is_direct(given, dtype, piece.target.dtype):
            self.fill(wire, piece.region, piece.target)
            return
        values = _empty(piece.region, given, piece.target.device)
        self.fill(wire, piece.region, values)
        piece.target.copy_(values.to(dtype))

    def _computed(
        self, node: Node, needs: Sequence[Region], device: torch.device, *, is_cached: bool
    ) -> tuple[Tensor, ...]:
        key = node.outputs[0], tuple(needs)
        if key in self.results:
            return self.results[key]
        results = self.component.call(node, self._inputs(node, needs, device))
        if is_cached:
            self.results[key] = results
        return results

    def _inputs(self, node: Node, needs: Sequence[Region], device: torch.device) -> list[Tensor]:
        """Read a region of each input of a node into new memory."""
        tensors = []
        for wire, region in zip(node.inputs, needs, strict=True):
            tensors.append(_empty(region, self.infos[wire].dtype, device))
            if region.num_elements > 0:
                self.fill(wire, region, tensors[-1])
        return tensors


def _is_direct(given: torch.dtype, through: torch.dtype, wanted: torch.dtype) -> bool:
    """Return True if converting from `given` to `wanted` directly gives the same values as through `through`."""
    if given == through:
        return True
    if not (given.is_floating_point and through.is_floating_point and wanted.is_floating_point):
        return False
    return through == wanted or is_lossless(given, through)


def _empty(region: Region, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(region.sizes, dtype=dtype, device=device)
