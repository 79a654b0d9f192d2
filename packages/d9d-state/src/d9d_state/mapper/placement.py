"""Operations between plain tensors and `DTensor`s, for use with `StateMapper.apply`.

Loading and saving of models do not need them: these functions handle `DTensor` parameters themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, distribute_tensor

from d9d_dist import Region
from d9d_state.mapper.graph import StateMapper, leaf
from d9d_state.mapper.operation import Piece
from d9d_state.tensor_info import TensorInfo


@final
@dataclass(frozen=True, slots=True)
class _Distribute:
    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        (tensor,) = tensors
        if isinstance(tensor, DTensor):
            raise ValueError("got a DTensor; expected the full tensor as a plain tensor on every rank.")
        # With src_data_rank=None, each rank slices its own shard, and nothing is sent.
        return (distribute_tensor(tensor, self.mesh, self.placements, src_data_rank=None),)

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        return inputs

    def pieces(self, output: int, region: Region, target: Tensor, inputs: Sequence[TensorInfo]) -> tuple[Piece]:
        assert output < len(inputs)
        return (Piece(output, region, target),)

    def inverse(self) -> "_Gather":
        return _Gather(self.mesh, self.placements)

    def describe(self) -> str:
        return f"distribute({_described(self.placements)})"


@final
@dataclass(frozen=True, slots=True)
class _Gather:
    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        (tensor,) = tensors
        if not isinstance(tensor, DTensor):  # already full: model export gathers before it calls the mapper
            return tensors
        if tensor.device_mesh != self.mesh or tuple(tensor.placements) != self.placements:
            raise ValueError(
                f"got a DTensor with {_described(tensor.placements)} on {tensor.device_mesh}; "
                f"expected {_described(self.placements)} on {self.mesh}."
            )
        return (tensor.full_tensor(),)

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        return inputs

    def pieces(self, output: int, region: Region, target: Tensor, inputs: Sequence[TensorInfo]) -> tuple[Piece]:
        assert output < len(inputs)
        return (Piece(output, region, target),)

    def inverse(self) -> _Distribute:
        return _Distribute(self.mesh, self.placements)

    def describe(self) -> str:
        return f"gather_full({_described(self.placements)})"


def distribute(name: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> StateMapper:
    """Convert a full plain tensor, equal on every rank, to a `DTensor`. The inverse is `gather_full`. No collectives.

    Args:
        name: Name of the tensor; it does not change.
        mesh: Mesh of the `DTensor`.
        placements: One placement per mesh axis.

    Raises:
        ValueError: If the number of placements is not the number of mesh axes, or a placement is `Partial`.
    """
    return leaf(_Distribute(mesh, _checked(name, mesh, placements)), [name], [name])


def gather_full(name: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> StateMapper:
    """Convert a `DTensor` to a full plain tensor on every rank. The inverse is `distribute`. Collective over the mesh.

    A plain tensor passes through unchanged.

    Args:
        name: Name of the tensor; it does not change.
        mesh: Mesh of the `DTensor`, with equal ranks, axes and axis names.
        placements: One placement per mesh axis.

    Raises:
        ValueError: If the number of placements is not the number of mesh axes, or a placement is `Partial`.
    """
    return leaf(_Gather(mesh, _checked(name, mesh, placements)), [name], [name])


def _checked(name: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[Placement, ...]:
    if len(placements) != mesh.ndim or any(isinstance(placement, Partial) for placement in placements):
        raise ValueError(
            f"{name}: got the placements {_described(placements)} for a mesh of {mesh.ndim} axes; "
            "expected one Shard or Replicate per axis."
        )
    return tuple(placements)


def _described(placements: Sequence[Placement]) -> str:
    return ", ".join(map(str, placements))
