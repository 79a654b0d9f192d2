import pytest
import torch

from d9d_state import StateMapper, TensorInfo, concat, split, stack, unstack


def test_unstack_restores_stacked_tensors() -> None:
    parts = {"a": torch.arange(6).view(2, 3), "b": torch.arange(6, 12).view(2, 3)}
    whole = stack(["a", "b"], "ab", dim=1).apply(parts)["ab"]
    assert torch.equal(whole, torch.stack([parts["a"], parts["b"]], dim=1))
    back = unstack("ab", ["a", "b"], dim=1).apply({"ab": whole})
    assert all(torch.equal(back[name], parts[name]) for name in parts)


def test_stack_inverts_to_unstack_and_back() -> None:
    assert stack(["a", "b"], "ab", dim=1).inverse().explain() == unstack("ab", ["a", "b"], dim=1).explain()
    assert unstack("ab", ["a", "b"]).inverse().explain() == stack(["a", "b"], "ab").explain()


def test_unstack_checks_the_size() -> None:
    with pytest.raises(ValueError, match=r"dim 0 of shape \[3, 2\] must have size 2"):
        unstack("ab", ["a", "b"]).apply({"ab": torch.ones(3, 2)})


def test_split_restores_concatenated_tensors() -> None:
    parts = {"a": torch.arange(4).view(2, 2), "b": torch.arange(6).view(2, 3)}
    mapper = concat(["a", "b"], "ab", dim=1, sizes=[2, 3])
    whole = mapper.apply(parts)["ab"]
    assert torch.equal(whole, torch.cat([parts["a"], parts["b"]], dim=1))
    back = split("ab", ["a", "b"], [2, 3], dim=1).apply({"ab": whole})
    assert all(torch.equal(back[name], parts[name]) for name in parts)
    assert mapper.inverse().explain() == split("ab", ["a", "b"], [2, 3], dim=1).explain()
    assert mapper.inverse().inverse().explain() == mapper.explain()


def test_concat_needs_no_sizes_to_load() -> None:
    assert concat(["a", "b"], "ab").apply({"a": torch.ones(1), "b": torch.ones(2)})["ab"].shape == (3,)


def test_concat_checks_the_sizes_it_was_given() -> None:
    with pytest.raises(ValueError, match=r"got sizes \[1, 2\] in dim 0; expected \[2, 1\]"):
        concat(["a", "b"], "ab", sizes=[2, 1]).apply({"a": torch.ones(1), "b": torch.ones(2)})


def test_split_checks_the_size() -> None:
    with pytest.raises(ValueError, match=r"dim 0 of shape \[4\] must have size 3, the sum of \[1, 2\]"):
        split("ab", ["a", "b"], [1, 2]).apply({"ab": torch.ones(4)})


def test_concat_and_split_need_one_size_per_part() -> None:
    with pytest.raises(ValueError, match="concat into ab got 1 sizes for 2 tensors"):
        concat(["a", "b"], "ab", sizes=[1])
    with pytest.raises(ValueError, match="split of ab got 1 sizes for 2 tensors"):
        split("ab", ["a", "b"], [1])


@pytest.mark.parametrize(
    ("mapper", "shapes", "message"),
    [
        (stack(["a", "b"], "c"), [(2,), (3,)], r"got shapes \[2\] and \[3\]; expected the same shape"),
        (stack(["a", "b"], "c", dim=3), [(2,), (2,)], "got dim 3; expected a dim of a tensor with 2 dims"),
        (unstack("a", ["b"], dim=-2), [(2,)], "got dim -2; expected a dim of a tensor with 1 dims"),
        (concat(["a", "b"], "c"), [(2,), (2, 2)], r"got shapes \[2\] and \[2, 2\]; expected the same shape"),
        (
            concat(["a", "b"], "c"),
            [(2, 3), (2, 2)],
            r"got shapes \[2, 3\] and \[2, 2\]; expected equal shapes except in dim 0",
        ),
        (concat(["a", "b"], "c"), [(), ()], "got dim 0; expected a dim of a tensor with 0 dims"),
        (split("a", ["b"], [1], dim=1), [(1,)], "got dim 1; expected a dim of a tensor with 1 dims"),
    ],
)
def test_mismatched_tensors_are_refused(mapper: StateMapper, shapes: list[tuple[int, ...]], message: str) -> None:
    named = dict(zip(mapper.inputs, shapes, strict=True))
    with pytest.raises(ValueError, match=message):
        mapper.infer({name: TensorInfo(shape, torch.float32) for name, shape in named.items()})
    with pytest.raises(ValueError, match=message):
        mapper.apply({name: torch.ones(shape) for name, shape in named.items()})


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"concat into ab got sizes \[3, -1\]; expected sizes of 0 or more"):
        concat(["a", "b"], "ab", sizes=[3, -1])
    with pytest.raises(ValueError, match=r"split of ab got sizes \[3, -1\]; expected sizes of 0 or more"):
        split("ab", ["a", "b"], [3, -1])
