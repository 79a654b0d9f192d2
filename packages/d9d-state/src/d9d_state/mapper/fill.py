"""Outputs filled in place from regions of a source: how a stack of experts is read straight into a rank's shard of it.

From a wanted region of an output, the engine walks back to the inputs. An operation that only moves values turns the
memory of its output into views of it that have the shapes of regions of its inputs, and so down to the source, which
writes into memory of the caller. Only where something is computed is there a temporary, of the part that is needed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, final

import torch
from torch import Tensor

from d9d_state.mapper._component import Component, Node
from d9d_state.mapper._dims import is_lossless
from d9d_state.mapper.operation import Constant, Layout, Local, Piece
from d9d_state.mapper.region import Region
from d9d_state.tensor_info import TensorInfo

if TYPE_CHECKING:
    from d9d_state.mapper.graph import StateMapper


class TensorSource(Protocol):
    """Named tensors of which parts can be read."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every tensor."""
        ...

    def read_into(self, name: str, region: Region, target: Tensor) -> None:
        """Copy a region of a tensor.

        Args:
            name: The tensor.
            region: Which part of it.
            target: Plain, of the shape of the region, with any strides, on any device. It has the dtype of the tensor,
                or both are floating and values are converted as `copy_` does.
        """
        ...


@final
@dataclass(frozen=True, slots=True)
class Destination:
    """Memory for a part of an output.

    Attributes:
        region: Which part of the whole output is wanted; all of it, or a `DTensor`'s shard.
        tensor: Plain, of the shape of the region, with any strides, on any device.
    """

    region: Region
    tensor: Tensor


@torch.no_grad()
def fill(mapper: "StateMapper", destinations: Mapping[str, Destination], source: TensorSource) -> None:
    """Fill outputs of one group in place; see `StateMapper.fill`."""
    wanted = {name: each for name, each in destinations.items() if each.region.num_elements > 0}
    component = mapper.component_of_outputs(destinations)
    if not wanted or not component.group.inputs:
        return
    _fill_component(mapper, component, wanted, source)


@torch.no_grad()
def planned_reads(
    mapper: "StateMapper", regions: Mapping[str, Region], tensors: Mapping[str, TensorInfo]
) -> tuple[tuple[str, Region], ...]:
    """What `fill` would read; see `StateMapper.reads`."""
    recorder = _Recorder(tensors)
    wanted: dict[str, Region] = {name: region for name, region in regions.items() if region.num_elements > 0}
    while wanted:
        component = mapper.component_of_outputs([next(iter(wanted))])
        part = {name: wanted.pop(name) for name in component.group.outputs if name in wanted}
        if component.group.inputs:
            infos = _infer(mapper, component, tensors)
            destinations = {
                name: Destination(region, _empty(region, infos[mapper.output_wires[name]].dtype, torch.device("meta")))
                for name, region in part.items()
            }
            _fill_component(mapper, component, destinations, recorder)
    return tuple(recorder.reads)


@final
class _Recorder:
    """A source that remembers what it is asked for and gives nothing."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self.tensors: Mapping[str, TensorInfo] = tensors
        self.reads: list[tuple[str, Region]] = []

    def read_into(self, name: str, region: Region, target: Tensor) -> None:
        assert tuple(target.shape) == region.sizes
        self.reads.append((name, region))


def _fill_component(
    mapper: "StateMapper", component: Component, destinations: Mapping[str, Destination], source: TensorSource
) -> None:
    infos = _infer(mapper, component, source.tensors)
    for name, destination in destinations.items():
        _refuse_misfit(name, destination, infos[mapper.output_wires[name]])
    names = {mapper.input_wires[name]: name for name in component.group.inputs}
    filling = _Filling(component, names, infos, source)
    for name, destination in destinations.items():
        filling.fill(mapper.output_wires[name], destination.region, destination.tensor)


def _infer(mapper: "StateMapper", component: Component, held: Mapping[str, TensorInfo]) -> dict[int, TensorInfo]:
    absent = [name for name in component.group.inputs if name not in held]
    if absent:
        raise ValueError(f"the source does not hold {', '.join(absent)}; expected all inputs of the group.")
    infos = {mapper.input_wires[name]: held[name] for name in component.group.inputs}
    component.infer(infos)
    return infos


def _refuse_misfit(name: str, destination: Destination, info: TensorInfo) -> None:
    region, tensor = destination.region, destination.tensor
    if not region.is_within(info.shape):
        raise ValueError(
            f"{name}: got the region at {list(region.offsets)} of sizes {list(region.sizes)}; expected one within "
            f"{list(info.shape)}."
        )
    if tuple(tensor.shape) != region.sizes:
        raise ValueError(f"{name}: got a tensor of shape {list(tensor.shape)}; expected {list(region.sizes)}.")
    if tensor.dtype != info.dtype and not (tensor.dtype.is_floating_point and info.dtype.is_floating_point):
        raise ValueError(f"{name}: got a tensor of {tensor.dtype}; expected {info.dtype}.")


@final
class _Filling:
    """One group while it is filled.

    On every call of `fill`, the target has the dtype of the wire, or both are floating.
    """

    def __init__(
        self, component: Component, names: Mapping[int, str], infos: Mapping[int, TensorInfo], source: TensorSource
    ) -> None:
        self._component = component
        self._names = names
        self._infos = infos
        self._source = source
        self._producers = {wire: node for node in component.nodes for wire in node.outputs}
        # What was computed and may be asked for again, by the first output of the node and the regions it was given.
        self._results: dict[tuple[int, tuple[Region, ...]], tuple[Tensor, ...]] = {}

    def fill(self, wire: int, region: Region, target: Tensor) -> None:
        """Fill a tensor with a region of what is on a wire."""
        if wire in self._names:
            self._source.read_into(self._names[wire], region, target)
            return
        node = self._producers[wire]
        output = node.outputs.index(wire)
        if isinstance(node.operation, Layout) and self._move(node, node.operation, output, region, target):
            return
        inputs = [self._infos[each] for each in node.inputs]
        if isinstance(node.operation, Local):
            needs = node.operation.needs(output, region, inputs)
            target.copy_(self._part(node, needs, output, region, target.device))
        else:
            target.copy_(region.of(self._whole(node, inputs, is_meta=target.is_meta)[output]))

    def _move(self, node: Node, operation: Layout, output: int, region: Region, target: Tensor) -> bool:
        """Fill the target piece by piece; whether the operation could say how."""
        inputs = [self._infos[wire] for wire in node.inputs]
        dtype = self._infos[node.outputs[output]].dtype
        pieces = operation.pieces(output, region, target, inputs)
        if pieces is not None:
            self._fill_pieces(node, dtype, pieces)
            return True
        if target.is_contiguous():
            return False
        between = _empty(region, dtype, target.device)
        pieces = operation.pieces(output, region, between, inputs)
        if pieces is None:
            return False
        self._fill_pieces(node, dtype, pieces)
        target.copy_(between)
        return True

    def _fill_pieces(self, node: Node, dtype: torch.dtype, pieces: Iterable[Piece | Constant]) -> None:
        for piece in pieces:
            if isinstance(piece, Constant):
                piece.target.fill_(torch.tensor(piece.value, dtype=dtype).item())
            else:
                self._fill_through(dtype, node.inputs[piece.input], piece)

    def _fill_through(self, dtype: torch.dtype, wire: int, piece: Piece) -> None:
        """Fill a piece with values that are to be rounded to a dtype, whatever the dtype of the target."""
        given = self._infos[wire].dtype
        if _is_direct(given, dtype, piece.target.dtype):
            self.fill(wire, piece.region, piece.target)
            return
        values = _empty(piece.region, given, piece.target.device)
        self.fill(wire, piece.region, values)
        piece.target.copy_(values.to(dtype))

    def _part(self, node: Node, needs: Sequence[Region], output: int, region: Region, device: torch.device) -> Tensor:
        """An output of a node, computed from parts of its inputs."""
        result = self._computed(node, needs, device)[output]
        if tuple(result.shape) != region.sizes:
            shapes = f"it made shape {list(result.shape)} of a part; expected {list(region.sizes)}."
            raise self._component.failure(node, shapes)
        return result

    def _whole(self, node: Node, inputs: Sequence[TensorInfo], *, is_meta: bool) -> tuple[Tensor, ...]:
        """All outputs of a node, in the memory of the host: nobody said that the device has room for them."""
        device = torch.device("meta" if is_meta else "cpu")
        return self._computed(node, [Region.whole(info.shape) for info in inputs], device, again=True)

    def _computed(
        self, node: Node, needs: Sequence[Region], device: torch.device, *, again: bool = False
    ) -> tuple[Tensor, ...]:
        key = node.outputs[0], tuple(needs)
        if key in self._results:
            return self._results[key]
        tensors = []
        for wire, region in zip(node.inputs, needs, strict=True):
            tensors.append(_empty(region, self._infos[wire].dtype, device))
            if region.num_elements > 0:
                self.fill(wire, region, tensors[-1])
        results = self._component.call(node, tensors)
        if again or len(node.outputs) > 1:
            self._results[key] = results
        return results


def _is_direct(given: torch.dtype, through: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether values of one dtype, rounded to a second, may be written to memory of a third as they are."""
    if given == through:
        return True
    if not (given.is_floating_point and through.is_floating_point and wanted.is_floating_point):
        return False
    return through == wanted or is_lossless(given, through)


def _empty(region: Region, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(region.sizes, dtype=dtype, device=device)
