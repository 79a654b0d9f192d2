from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from d9d_state import TensorInfo, cast, transform, transpose
from d9d_state.mapper.convert import permute


def test_the_inverse_of_transpose_restores_the_tensor() -> None:
    tensor = torch.arange(24).view(2, 3, 4)
    mapper = transpose("a", "b", dim0=0, dim1=2)
    output = mapper.apply({"a": tensor})
    assert torch.equal(output["b"], tensor.transpose(0, 2))
    assert torch.equal(mapper.inverse().apply(output)["a"], tensor)


def test_transpose_keeps_the_name_by_default() -> None:
    assert transpose("a").apply({"a": torch.ones(2, 3)})["a"].shape == (3, 2)


def test_the_inverse_of_permute_restores_the_tensor() -> None:
    tensor = torch.arange(24).view(2, 3, 4)
    mapper = permute("a", "b", dims=[-1, 0, 1])
    output = mapper.apply({"a": tensor})
    assert torch.equal(output["b"], tensor.permute(2, 0, 1))
    assert torch.equal(mapper.inverse().apply(output)["a"], tensor)
    assert mapper.inverse().explain() == permute("b", "a", dims=[1, 2, 0]).explain()


@pytest.mark.parametrize("dims", [[0, 0], [0, 2], [-3, 0], [1]])
def test_permute_needs_every_dim_once(dims: list[int]) -> None:
    with pytest.raises(ValueError, match=f"permute of a got dims .*; expected each of {len(dims)} dims once"):
        permute("a", dims=dims)


def test_dims_out_of_range_are_refused() -> None:
    info = TensorInfo((2, 3), torch.float32)
    with pytest.raises(ValueError, match=r"permute\(1, 0, 2\) on a failed: got shape \[2, 3\]; expected 3 dims"):
        permute("a", dims=[1, 0, 2]).infer({"a": info})
    with pytest.raises(
        ValueError, match=r"transpose\(0, 2\) on a failed: got dim 2; expected a dim of a tensor with 2 dims"
    ):
        transpose("a", dim1=2).infer({"a": info})


def test_the_inverse_of_cast_restores_the_dtype() -> None:
    tensor = torch.randn(8).bfloat16()
    mapper = cast("a", "b", dtype=torch.float32, back=torch.bfloat16)
    output = mapper.apply({"a": tensor})["a"]
    assert output.dtype is torch.float32
    assert torch.equal(mapper.inverse().apply({"a": output})["a"], tensor)
    assert len(mapper.groups) == 2


def test_inverse_cast_needs_back() -> None:
    with pytest.raises(ValueError, match=r"cast\(float16\) has no inverse; build it as cast\(..., back=dtype\)"):
        cast("a", dtype=torch.float16).inverse()


def _swap(a: Tensor, b: Tensor) -> Sequence[Tensor]:
    return [b, a]


def test_transform_runs_a_function_and_its_inverse() -> None:
    mapper = transform(["a", "b"], ["c", "d"], _swap, inverse=_swap)
    tensors = {"a": torch.tensor(1), "b": torch.tensor(2)}
    output = mapper.apply(tensors)
    assert {name: int(tensor) for name, tensor in output.items()} == {"c": 2, "d": 1}
    assert mapper.inverse().apply(output) == tensors


def test_a_transform_without_an_inverse_cannot_be_inverted() -> None:
    with pytest.raises(ValueError, match=r"has no inverse; build it as transform\(..., inverse=function\)"):
        transform(["a", "b"], ["c", "d"], _swap).inverse()


def test_transform_must_give_one_tensor_per_name() -> None:
    with pytest.raises(ValueError, match=r"transform\(.*_swap.*\) on a, b returned 2 tensors; expected 1"):
        transform(["a", "b"], ["c"], _swap).apply({"a": torch.ones(1), "b": torch.ones(1)})


@pytest.mark.parametrize("elementwise", [False, True])
def test_a_transform_to_one_name_may_return_the_tensor_alone(elementwise: bool) -> None:
    x = torch.arange(6.0).view(3, 2)
    mapper = transform(["x"], ["y"], lambda tensor: tensor + 1, elementwise=elementwise)
    assert torch.equal(mapper.apply({"x": x})["y"], x + 1)
    two = transform(["x"], ["y", "z"], lambda tensor: tensor[:2], elementwise=False)
    with pytest.raises(ValueError, match=r"returned 1 tensors; expected 2\."):
        two.apply({"x": x})


@pytest.mark.parametrize("returned", [None, 3, [3], {"y": 1}])
def test_a_transform_returns_tensors(returned: Any) -> None:
    with pytest.raises(ValueError, match=r"it returned a value of type \w+; expected tensors, one for each name"):
        transform(["x"], ["y"], lambda _: returned).apply({"x": torch.ones(2)})


def test_an_elementwise_function_keeps_the_shape() -> None:
    mapper = transform(["a", "b"], ["c"], lambda a, b: [a + b], elementwise=True)
    assert mapper.apply({"a": torch.ones(2), "b": torch.ones(2)})["c"].tolist() == [2, 2]
    with pytest.raises(
        ValueError, match=r"elementwise\) on a, b failed: got shapes \[2\] and \[1\]; expected the same"
    ):
        mapper.apply({"a": torch.ones(2), "b": torch.ones(1)})
    for each in ([lambda a: [a[:1]]], [lambda a: [a, a[:, None]]]):
        with pytest.raises(ValueError, match=r"an elementwise function must keep the shape"):
            transform(["a"], ["b"], *each, elementwise=True).infer({"a": TensorInfo((2,), torch.float32)})


def test_an_elementwise_function_and_its_inverse() -> None:
    mapper = transform(["a"], ["a"], lambda a: [-a], inverse=lambda a: [a.neg()], elementwise=True)
    assert "elementwise" in mapper.inverse().explain()
    assert mapper.inverse().apply({"a": torch.ones(1)})["a"].tolist() == [-1]
    with pytest.raises(
        ValueError, match=r"elementwise\) has no inverse; build it as transform\(\.\.\., inverse=function"
    ):
        transform(["a"], ["a"], lambda a: [-a], elementwise=True).inverse()
