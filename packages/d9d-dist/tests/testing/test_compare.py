import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from d9d_dist import MeshConfig, UserError, parallelize_hsdp
from d9d_dist.testing import (
    Difference,
    assert_rounds_like,
    assert_trees_close,
    differences,
    full_gradients,
    full_parameters,
    full_tree,
    run_ranks,
)


def _tree() -> dict[str, Any]:
    values = torch.arange(1.0, 7.0, dtype=torch.float64).view(2, 3)
    return {"a": {"weight": values}, "b": [torch.tensor([1, 2]), 3.0, "text", None], "c": torch.tensor(2.0)}


def test_equal_trees_of_any_dtype_are_close() -> None:
    assert_trees_close(full_tree(_tree()), _tree())
    assert_trees_close({"x": torch.ones(3)}, {"x": torch.ones(3, dtype=torch.bfloat16)})
    assert_trees_close({"x": torch.tensor([math.inf, 1.0])}, {"x": torch.tensor([math.inf, 1.0])})
    assert_trees_close([torch.ones(2, 2) * 1j], [torch.ones(2, 2) * (1j + 1e-12)])


@given(scale=st.floats(1e-3, 1e3), error=st.sampled_from([0.0, 1e-12, 1e-6, 0.1]), rtol=st.sampled_from([1e-9, 1e-3]))
def test_the_error_is_relative_to_the_norm_of_the_reference(scale: float, error: float, rtol: float) -> None:
    reference = torch.randn(50, dtype=torch.float64) * scale
    deviation = torch.randn_like(reference)
    moved = reference + deviation * (error * reference.norm() / deviation.norm())
    found = list(differences([moved], [reference], rtol=rtol, atol=0.0))
    assert bool(found) == (error > rtol)
    if found:
        assert found[0].error == pytest.approx(error, rel=1e-3)
        assert found[0].index == (int((moved - reference).abs().argmax()),)


def test_the_message_names_the_first_difference_the_place_and_the_rest() -> None:
    moved = _tree()
    moved["a"]["weight"] = moved["a"]["weight"].clone()
    moved["a"]["weight"][1, 2] = 7.0
    moved["b"][1] = 4.0
    del moved["c"]
    moved["d"] = 0
    message = (
        "4 differences, of 6 leaves expected (rtol = 1e-09, atol = 1e-12). First: a.weight: relative error 0.105; the "
        "largest deviation is at index (1, 2): got 7.0, expected 6.0. Then: b.1; c: missing; d: not expected."
    )
    with pytest.raises(AssertionError, match=f"^{re.escape(message)}$"):
        assert_trees_close(moved, _tree())


def test_a_long_list_is_shortened() -> None:
    with pytest.raises(AssertionError, match=r"^20 differences, .* First: 0: relative error 1; .*; 8 and 11 more\.$"):
        assert_trees_close([torch.full((2,), 2.0)] * 20, [torch.ones(2)] * 20)


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), r"0: got the shape \(2, 3\), expected \(3, 2\)"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), r"0: relative error 0.316; .* index \(1,\): got 2, expected 3"),
        (torch.tensor([True]), torch.tensor([False]), "0: the expected tensor is zero.*got True, expected False"),
        (1.5, 1.0, "0: relative error 0.5; got 1.5, expected 1.0"),
        ("a", "b", "0: got 'a', expected 'b'"),
        ("a", torch.ones(1), "0: got 'a', expected tensor"),
        (
            torch.full((2,), 1e-11),
            torch.zeros(2),
            r"0: the expected tensor is zero, the norm of the actual one is 1\.41e-11",
        ),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), r"relative error nan; .* \(1,\): got nan"),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, 2.0]), r"relative error inf; .* \(1,\): got inf"),
        (torch.tensor(2**62 + 1), torch.tensor(2**62), "got 4611686018427387905, expected 4611686018427387904"),
    ],
)
def test_differences_are_described(actual: Any, expected: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_trees_close([actual], [expected])


def test_rounding_around_zero_passes() -> None:
    assert_trees_close([torch.full((3,), 1e-17)], [torch.full((3,), -1e-17)])
    (difference,) = differences([torch.full((3,), 1e-17)], [torch.full((3,), -1e-17)], atol=0.0)
    assert isinstance(difference, Difference)
    assert difference.error == pytest.approx(2.0)


def test_a_copy_is_independent() -> None:
    weight = torch.ones(2, requires_grad=True)
    copy = full_tree({"weight": weight, "name": "x"})
    with torch.no_grad():
        weight.zero_()
    assert copy["weight"].tolist() == [1.0, 1.0]
    assert copy["name"] == "x"
    assert not copy["weight"].requires_grad


def _full_of_layouts() -> Any:
    with MeshConfig(data_parallel_replicate=2, data_parallel_shard=2).build() as ctx:
        mesh = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"]
        values = torch.arange(15.0, device=ctx.device).view(5, 3)
        part = DTensor.from_local(torch.ones(2, device=ctx.device), mesh, [Partial(), Replicate()])
        sharded = distribute_tensor(values, mesh, [Replicate(), Shard(0)])
        with pytest.raises(UserError, match=r"^0 is a DTensor; expected full tensors. Pass the tree through full_tree"):
            assert_trees_close([sharded], [values])
        return full_tree([sharded, {"part": part}, 1])


def test_distributed_tensors_become_full_ones() -> None:
    expected = [torch.arange(15.0).view(5, 3), {"part": torch.full((2,), 2.0)}, 1]
    for tree in run_ranks(_full_of_layouts, world_size=4):
        assert_trees_close(tree, expected)


def _train_once(degrees: dict[str, int]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    model[2].bias.requires_grad_(False)
    with MeshConfig(**degrees).build() as ctx:
        model.to(ctx.device)
        parallelize_hsdp(model, ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"], shard_axis="dp_cp_shard")
        inputs = torch.linspace(0, 1, 24, dtype=torch.float64, device=ctx.device).view(8, 3)
        size = 8 // ctx.world_size
        model(inputs[ctx.rank * size :][:size]).square().sum().backward()
        return full_parameters(model), full_gradients(model)


def test_parameters_and_gradients_have_the_names_of_the_model() -> None:
    parameters, gradients = _train_once({})
    assert list(parameters) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert list(gradients) == ["0.weight", "0.bias", "2.weight"]
    for got in run_ranks(_train_once, {"data_parallel_shard": 2}):
        assert_trees_close(got, (parameters, gradients))


def test_bound_uses_the_reference_and_the_largest_number_of_the_tree() -> None:
    exact = {"w": torch.tensor([4.0, 1.0], dtype=torch.float64), "zero": torch.zeros(2, dtype=torch.float64)}
    eps = torch.finfo(torch.float32).eps
    peer = {name: tensor.float() for name, tensor in exact.items()}
    assert_rounds_like({"w": peer["w"] + 32 * eps, "zero": peer["zero"] - 31 * eps}, exact, peer=peer)
    with pytest.raises(AssertionError, match=r"zero: the error is 3\.93e-06, that of the reference implementation 0$"):
        assert_rounds_like({**peer, "zero": peer["zero"] + 33 * eps}, exact, peer=peer)
    far = {**peer, "w": peer["w"] + 0.5}
    assert_rounds_like({**peer, "w": peer["w"] - 3.9}, exact, peer=far)
    with pytest.raises(AssertionError, match=r"w: the error is nan"):
        assert_rounds_like({**peer, "w": peer["w"] * math.nan}, exact, peer=far)
    with pytest.raises(AssertionError, match="different keys"):
        assert_rounds_like({"w": peer["w"]}, exact, peer=peer)
    with pytest.raises(AssertionError, match="w: the shapes differ"):
        assert_rounds_like({**peer, "w": peer["w"].unsqueeze(0)}, exact, peer=peer)
    assert_rounds_like([torch.empty(0)], [torch.empty(0)], peer=[torch.empty(0)])
