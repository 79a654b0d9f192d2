import pytest
import torch
from torch import Tensor

from d9d_state import TensorInfo, cast, identity, sequential, stack, transform, transpose
from d9d_state.mapper.operation import Layout, Local, infer_on_meta
from d9d_state.mapper.state_mapper import leaf


class _Double:
    """Custom operation with only the required methods."""

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.cat([tensor, tensor], dim=1) for tensor in tensors)

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        return infer_on_meta(self, *inputs)

    def inverse(self) -> "_Double":
        raise ValueError("double has no inverse; keep the halves apart.")

    def describe(self) -> str:
        return "double"


def test_custom_operation_infers_and_applies() -> None:
    mapper = sequential(leaf(_Double(), ["a"], ["b"]), transpose("b"))
    assert mapper.infer({"a": TensorInfo((2, 3), torch.float16)}) == {"b": TensorInfo((6, 2), torch.float16)}
    assert mapper.apply({"a": torch.ones(2, 3)})["b"].shape == (6, 2)
    assert "a -> double -> (value 1)" in mapper.explain()
    with pytest.raises(ValueError, match="double has no inverse; keep the halves apart"):
        mapper.inverse()
    with pytest.raises(ValueError, match="double on a failed: Dimension out of range"):
        mapper.infer({"a": TensorInfo((2,), torch.float16)})


def test_infer_on_meta_reports_what_a_function_cannot_do() -> None:
    for function in (lambda a: [a.view(7)], lambda a: [a @ a], lambda a: [a[3]], lambda a, b: [a]):
        mapper = transform(["a"], ["b"], function)
        with pytest.raises(ValueError, match=r"transform\(.*<lambda>\) on a failed: ."):
            mapper.infer({"a": TensorInfo((2, 3), torch.float32)})


def test_infer_counts_the_outputs() -> None:
    with pytest.raises(ValueError, match=r"transform\(.*\) on a returned 2 tensors; expected 1"):
        transform(["a"], ["b"], lambda a: [a, a]).infer({"a": TensorInfo((1,), torch.float32)})


def test_infer_takes_exactly_one_group() -> None:
    info = TensorInfo((1,), torch.float32)
    with pytest.raises(ValueError, match="got a; expected all inputs of one group: a, b"):
        stack(["a", "b"], "c").infer({"a": info})
    with pytest.raises(ValueError, match="x is not an input of this mapper"):
        identity("a").infer({"x": info})


def test_operations_are_instances_of_the_layout_or_local_protocol() -> None:
    function = transform(["a"], ["a"], lambda a: [a]).nodes[0].operation
    elementwise = transform(["a"], ["a"], lambda a: [a], elementwise=True).nodes[0].operation
    move = cast("a", dtype=torch.float16).nodes[0].operation
    assert [isinstance(operation, Layout) for operation in (function, elementwise, move)] == [False, False, True]
    assert [isinstance(operation, Local) for operation in (function, elementwise, move)] == [False, True, False]
