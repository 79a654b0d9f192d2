"""`OneInput`: base of the operations that move the values of one tensor without changing them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from d9d_dist import Region
from d9d_state.mapper.operation import Piece
from d9d_state.tensor_info import TensorInfo


class OneInput(ABC):
    """`Layout` operation with one input. Subclasses add `inverse` and `describe`."""

    __slots__ = ()

    @abstractmethod
    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the output shapes; raise `ValueError` if the operation does not accept the input's shape."""

    @abstractmethod
    def move(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs for an input of an accepted shape."""

    @abstractmethod
    def source(self, output: int, region: Region, target: Tensor, shape: tuple[int, ...]) -> tuple[Region, Tensor]:
        """Return the input region that fills a region of an output, and the view of `target` that it fills."""

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        (tensor,) = tensors
        self.shapes(tuple(tensor.shape))
        return self.move(tensor)

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        """Return shape and dtype of the outputs."""
        (info,) = inputs
        return tuple(TensorInfo(shape, info.dtype) for shape in self.shapes(info.shape))

    def pieces(self, output: int, region: Region, target: Tensor, inputs: Sequence[TensorInfo]) -> tuple[Piece]:
        """Map a region of an output to the region of the input that fills it."""
        return (Piece(0, *self.source(output, region, target, inputs[0].shape)),)
