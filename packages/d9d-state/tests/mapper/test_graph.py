import pytest
import torch

from d9d_state import concat, drop, identity, parallel, rename, stack, transform
from d9d_state.mapper.graph import StateGroup
from d9d_state.mapper.join import split


def test_apply_takes_exactly_one_group() -> None:
    mapper = parallel(stack(["a", "b"], "ab"), identity("c"))
    with pytest.raises(ValueError, match="got a; expected all inputs of one group: a, b"):
        mapper.apply({"a": torch.ones(1)})
    with pytest.raises(ValueError, match="got a, b, c; expected all inputs of one group: a, b"):
        mapper.apply({"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)})
    with pytest.raises(ValueError, match="x is not an input of this mapper"):
        mapper.apply({"x": torch.ones(1)})
    with pytest.raises(ValueError, match="got no tensors"):
        mapper.apply({})


def test_apply_all_transforms_every_group() -> None:
    mapper = parallel(stack(["a", "b"], "ab"), rename("c", "d"))
    found = mapper.apply_all({"a": torch.zeros(1), "b": torch.ones(1), "c": torch.ones(2), "not used": torch.ones(3)})
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"ab": [[0.0], [1.0]], "d": [1.0, 1.0]}
    with pytest.raises(ValueError, match=r"got no tensor 'b'; expected all 3 inputs"):
        mapper.apply_all({"a": torch.ones(1)})


def test_apply_error_names_operation_and_tensors() -> None:
    with pytest.raises(ValueError, match=r"stack\(dim=0\) on a, b failed"):
        stack(["a", "b"], "ab").apply({"a": torch.ones(1), "b": torch.ones(2)})


def test_apply_on_meta_infers_shape_and_dtype() -> None:
    meta = torch.empty(2, 3, dtype=torch.bfloat16, device="meta")
    output = stack(["a", "b"], "ab", dim=1).apply({"a": meta, "b": meta})["ab"]
    assert output.is_meta
    assert output.shape == (2, 2, 3)
    assert output.dtype is torch.bfloat16


def test_groups_contain_every_name_once() -> None:
    mapper = parallel(stack(["a", "b"], "ab"), rename("c", "d"), drop("e"))
    assert mapper.groups == (StateGroup(("a", "b"), ("ab",)), StateGroup(("c",), ("d",)), StateGroup(("e",), ()))


def test_restrict_keeps_whole_groups() -> None:
    mapper = parallel(split("qkv", ["q", "k", "v"], [1, 1, 1]), rename("c", "d"), drop("e"))
    part = mapper.restrict(outputs=["k", "absent"])
    assert part.groups == (StateGroup(("qkv",), ("q", "k", "v")),)
    assert part.apply({"qkv": torch.arange(3)})["v"].tolist() == [2]
    assert mapper.restrict(inputs=["e", "c"]).groups == (StateGroup(("c",), ("d",)), StateGroup(("e",), ()))
    assert mapper.restrict().groups == mapper.groups


def test_restricted_mappers_have_an_inverse() -> None:
    mapper = parallel(split("ab", ["a", "b"], [1, 2]), rename("c", "d")).restrict(inputs=["ab"])
    whole = torch.arange(3)
    assert torch.equal(mapper.inverse().apply(mapper.apply({"ab": whole}))["ab"], whole)


def test_an_operation_needs_names_on_both_sides() -> None:
    with pytest.raises(ValueError, match=r"stack\(dim=0\) got 0 inputs and 1 outputs; expected at least one each"):
        stack([], "a")
    with pytest.raises(ValueError, match="got 1 inputs and 0 outputs"):
        transform(["a"], [], lambda a: [])


def test_an_operation_refuses_a_name_twice() -> None:
    with pytest.raises(ValueError, match="consumed more than once: a"):
        stack(["a", "b", "a"], "c")
    with pytest.raises(ValueError, match="produced more than once: a"):
        split("c", ["a", "a"], [1, 1])


def test_inverse_refuses_operations_without_inverse() -> None:
    with pytest.raises(ValueError, match=r"concat\(dim=0\) has no inverse; build it as concat\(..., sizes="):
        concat(["a", "b"], "c").inverse()
