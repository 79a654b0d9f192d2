import math

import pytest
import torch

from d9d_dist import UserError
from d9d_metrics import Accumulator
from d9d_metrics.accumulator import Reduction


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 6.0), ("max", 4.0), ("min", -1.0)])
def test_an_accumulator_combines_numbers_and_tensors_of_any_dtype(reduction: Reduction, expected: float) -> None:
    accumulator = Accumulator(reduction)
    accumulator.update(3)
    accumulator.update(torch.tensor(4, dtype=torch.int32))
    accumulator.update(torch.tensor(-1.0, dtype=torch.bfloat16))
    assert accumulator.value.dtype == torch.float64
    assert accumulator.value.item() == expected


@pytest.mark.parametrize(("reduction", "identity"), [("sum", 0.0), ("max", -math.inf), ("min", math.inf)])
def test_reset_returns_to_the_identity(reduction: Reduction, identity: float) -> None:
    accumulator = Accumulator(reduction, shape=[2])
    assert accumulator.value.tolist() == [identity, identity]
    accumulator.update(torch.tensor([1.0, 2.0]))
    assert accumulator.value.tolist() == [1.0, 2.0]
    accumulator.reset()
    assert accumulator.value.tolist() == [identity, identity]


@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
@pytest.mark.parametrize("nan", [math.nan, torch.tensor(math.nan)])
def test_nan_propagates(reduction: Reduction, nan: float | torch.Tensor) -> None:
    accumulator = Accumulator(reduction)
    for value in (1.0, nan, 2.0):
        accumulator.update(value)
    assert accumulator.value.isnan()


def test_an_accumulator_detaches_values_from_the_graph() -> None:
    accumulator = Accumulator("sum")
    accumulator.update(torch.tensor(2.0, requires_grad=True) * 3)
    assert not accumulator.value.requires_grad


def test_counts_are_exact_where_floats_are_not() -> None:
    accumulator = Accumulator("count")
    for value in (torch.tensor(2**53), 1, torch.tensor(True)):
        accumulator.update(value)
    assert accumulator.value.item() == 2**53 + 2
    accumulator.update(-3)
    assert accumulator.value.item() == 2**53 - 1
    assert accumulator.value.dtype == torch.int64
    accumulator.reset()
    assert accumulator.value.item() == 0


@pytest.mark.parametrize("reduction", ["sum", "count", "max", "min"])
@pytest.mark.parametrize(("state", "value"), [([3], [2, 3]), ([3], []), ([3], [1]), ([], [1]), ([], [3])])
def test_a_tensor_of_another_shape_is_not_broadcast(reduction: Reduction, state: list[int], value: list[int]) -> None:
    """Neither the value nor the state: torch.maximum would resize the state."""
    accumulator = Accumulator(reduction, shape=state)
    with pytest.raises(UserError, match=r"got a tensor of shape \(.*\); expected shape \(.*\)\. Reduce the tensor"):
        accumulator.update(torch.ones(value, dtype=torch.int64))
    assert accumulator.value.tolist() == Accumulator(reduction, shape=state).value.tolist()


def test_a_concatenation_takes_one_dim() -> None:
    with pytest.raises(UserError, match=r"got a tensor of shape \(2, 1\); expected one dim\."):
        Accumulator("concat", shape=[3]).update(torch.ones(2, 1))


@pytest.mark.parametrize("value", [math.nan, 0.5, torch.tensor(math.nan), torch.tensor(2.0)])
def test_a_count_rejects_non_integers(value: float | torch.Tensor) -> None:
    accumulator = Accumulator("count")
    with pytest.raises(UserError, match=r"a count got .*; expected integers\. Use a sum, or convert"):
        accumulator.update(value)
    assert accumulator.value.item() == 0
