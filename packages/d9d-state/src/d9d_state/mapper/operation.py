"""What a node of the graph may be: the contract of all operations, and of those that can do with parts of tensors.

An operation that says no more than `Operation` is run on whole tensors. One that only moves values says where they come
from (`Layout`), so that they are read straight to where they are wanted. One that computes, but knows of what parts
(`Local`), is run on those parts only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

from torch import Tensor

from d9d_state.mapper.region import Region
from d9d_state.tensor_info import TensorInfo


class Operation(Protocol):
    """What a node of the graph does to its tensors. `describe()` is how `explain` shows it."""

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs from the inputs, on whatever device they are."""
        ...

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        """Shapes and dtypes of the outputs. `infer_on_meta(self, *inputs)` will do where there is no quicker rule.

        Raises:
            ValueError: If the operation does not fit the inputs.
        """
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
class Piece:
    """A region of an input, and where its values belong.

    Attributes:
        input: Which input.
        region: Which part of it.
        target: A view of the output's memory, of the shape of the region.
    """

    input: int
    region: Region
    target: Tensor


@final
@dataclass(frozen=True, slots=True)
class Constant:
    """A part of an output that no input fills.

    Attributes:
        value: What it is filled with, in the dtype of the output.
        target: A view of the output's memory.
    """

    value: float
    target: Tensor


@runtime_checkable
class Layout(Operation, Protocol):
    """An operation that moves values and changes none, except for converting them to the dtype of its output."""

    def pieces(
        self, output: int, region: Region, target: Tensor, inputs: Sequence[TensorInfo]
    ) -> Iterable[Piece | Constant] | None:
        """Where the values of a region of an output come from.

        Args:
            output: Which output.
            region: A part of it, not empty.
            target: The memory of that part, of its shape, with any strides.
            inputs: Shapes and dtypes of all inputs.

        Returns:
            Pieces, none of them empty, that cover `target`, each element once. `None` if there are no views of `target`
            for them: it is asked again with a contiguous one, and if the answer stays the same, the operation is run on
            whole tensors.
        """
        ...


@runtime_checkable
class Local(Operation, Protocol):
    """An operation that computes parts of its outputs from parts of its inputs; elementwise ones, for example."""

    def needs(self, output: int, region: Region, inputs: Sequence[TensorInfo]) -> Sequence[Region]:
        """What a region of an output is computed from.

        Args:
            output: Which output.
            region: A part of it, not empty.
            inputs: Shapes and dtypes of all inputs.

        Returns:
            A region for each input. Called on these parts, the operation gives just that region as this output.
        """
        ...


def infer_on_meta(operation: Operation, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
    """Infer the outputs of an operation by running it on meta tensors, which have no storage.

    Raises:
        ValueError: If the operation fails on them.
    """
    try:
        outputs = operation(*(info.to_meta() for info in inputs))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ValueError(str(error)) from error
    return tuple(TensorInfo.of(tensor) for tensor in outputs)
