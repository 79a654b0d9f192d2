"""Conversions between plain tensors and `DTensor`s, for `StateMapper.apply`.

The functions that load and save models handle `DTensor` parameters themselves and do not need these conversions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, distribute_tensor

from d9d_dist import Region
from d9d_state.mapper._dims import Shape
from d9d_state.mapper.operation import OneInput
from d9d_state.mapper.state_mapper import StateMapper, leaf


@final
@dataclass(frozen=True, slots=True)
class _Place(OneInput):
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    gathers: bool

    def shapes(self, shape: Shape) -> tuple[Shape]:
        return (shape,)

    def move(self, tensor: Tensor) -> tuple[Tensor]:
        if self.gathers:
            return (self._gathered(tensor),)
        if isinstance(tensor, DTensor):
            raise ValueError("got a DTensor; expected the full tensor as a plain tensor on every rank.")
        # With src_data_rank=None, each rank slices its own shard, and nothing is sent.
        return (distribute_tensor(tensor, self.mesh, self.placements, src_data_rank=None),)

    def source(self, output: int, region: Region, target: Tensor, shape: Shape) -> tuple[Region, Tensor]:
        return region, target

    def inverse(self) -> "_Place":
        return _Place(self.mesh, self.placements, not self.gathers)

    def describe(self) -> str:
        return f"{'gather_full' if self.gathers else 'distribute'}({_described(self.placements)})"

    def _gathered(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):  # already full: model export gathers before it calls the mapper
            return tensor
        if tensor.device_mesh != self.mesh or tensor.placements != self.placements:
            raise ValueError(
                f"got a DTensor with {_described(tensor.placements)} on {tensor.device_mesh}; "
                f"expected {_described(self.placements)} on {self.mesh}."
            )
        return tensor.full_tensor()


def distribute(name: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> StateMapper:
    """Convert a full plain tensor, equal on every rank, to a `DTensor`. The inverse is `gather_full`. No collectives.

    `placements` has one placement per axis of `mesh`. The name does not change.

    Raises:
        ValueError: If the number of placements is not the number of mesh axes, or a placement is `Partial`.
    """
    return leaf(_Place(mesh, _checked(name, mesh, placements), gathers=False), [name], [name])


def gather_full(name: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> StateMapper:
    """Convert a `DTensor` to a full plain tensor on every rank. The inverse is `distribute`. Collective over the mesh.

    A plain tensor passes through. `mesh` must have the same ranks, axes and axis names as the tensor's mesh. The name
    does not change.

    Raises:
        ValueError: If the number of placements is not the number of mesh axes, or a placement is `Partial`.
    """
    return leaf(_Place(mesh, _checked(name, mesh, placements), gathers=True), [name], [name])


def _checked(name: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[Placement, ...]:
    if len(placements) != mesh.ndim or any(isinstance(placement, Partial) for placement in placements):
        raise ValueError(
            f"{name}: got the placements {_described(placements)} for a mesh of {mesh.ndim} axes; "
            "expected one Shard or Replicate per axis."
        )
    return tuple(placements)


def _described(placements: Sequence[Placement]) -> str:
    return ", ".join(map(str, placements))
