"""Protocols of the graph's operations.

A plain `Operation` runs on full tensors. A `Layout` operation only moves values, which are read directly into their
destination. A `Local` or `Regional` operation computes regions of its outputs from regions of its inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

from torch import Tensor

from d9d_dist import Region
from d9d_state.tensor_info import TensorInfo


class Operation(Protocol):
    """Function from tensors to tensors, with shape inference and an optional inverse."""

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs from the inputs, on any device."""
        ...

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        """Infer shapes and dtypes of the outputs, as `infer_on_meta` does; raise `ValueError` for unsuitable inputs."""
        ...

    def inverse(self) -> "Operation":
        """Return the operation that restores the inputs bit for bit; raise `ValueError` if there is none."""
        ...

    def describe(self) -> str:
        """Return name and arguments as short text, for `explain` and error messages."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """Copy of a region of input number `input` into `target`, a view of the output's memory of the same shape."""

    input: int
    region: Region
    target: Tensor


@final
@dataclass(frozen=True, slots=True)
class Constant:
    """Part of an output to fill with a constant, rounded to the output's dtype. `target` is a view of its memory."""

    value: float
    target: Tensor


@runtime_checkable
class Layout(Operation, Protocol):
    """Operation that moves values without changing them, except for a conversion to the output's dtype."""

    def pieces(
        self, output: int, region: Region, target: Tensor, inputs: Sequence[TensorInfo]
    ) -> Iterable[Piece | Constant] | None:
        """Map a non-empty region of output number `output` to regions of the inputs.

        `target` is the memory of the region, with its shape and any strides. Returns non-empty pieces whose targets
        cover each element of `target` exactly once. `None` if no views of `target` can express them: the method is
        called again with a contiguous target, and after another `None` the operation runs on full tensors.
        """
        ...


@runtime_checkable
class Local(Operation, Protocol):
    """Operation that computes regions of its outputs from regions of its inputs, such as an elementwise function."""

    def needs(self, output: int, region: Region, inputs: Sequence[TensorInfo]) -> Sequence[Region]:
        """Return the region of each input that a non-empty region of an output depends on.

        Called on these regions, the operation must return exactly `region` as this output. `inputs` has shape and dtype
        of all inputs.
        """
        ...


@runtime_checkable
class Regional(Operation, Protocol):
    """Operation with one output that computes a region of it from regions of its inputs and the region's position.

    A `Local` operation does not receive the position. Dequantization needs the position, because blocks start at
    multiples of the block size.
    """

    def needs(self, output: int, region: Region, inputs: Sequence[TensorInfo]) -> Sequence[Region]:
        """Return the region of each input that a non-empty region of the output depends on."""
        ...

    def compute(self, region: Region, *inputs: Tensor) -> Tensor:
        """Compute a region of the output from the regions of the inputs that `needs` returns."""
        ...


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
        """Return the outputs; raise `ValueError` if the operation does not accept the input."""
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


def infer_on_meta(operation: Operation, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
    """Infer an operation's output shapes and dtypes by running it on meta tensors; raise `ValueError` if that fails."""
    try:
        outputs = operation(*(info.to_meta() for info in inputs))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ValueError(str(error)) from error
    return tuple(TensorInfo.of(tensor) for tensor in outputs)
