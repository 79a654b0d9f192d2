import pytest
import torch
from torch import nn

from d9d_state import drop, identity, identity_of, keep, parallel, rename, rename_all, sequential
from d9d_state.mapper.graph import StateGroup


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def test_identity_passes_the_tensor_itself() -> None:
    tensor = torch.ones(2)
    assert identity("a", "b").apply({"a": tensor})["a"] is tensor


def test_identity_has_one_group_per_name() -> None:
    assert identity("a", "b").groups == (StateGroup(("a",), ("a",)), StateGroup(("b",), ("b",)))


def test_identity_refuses_a_name_twice() -> None:
    with pytest.raises(ValueError, match="consumed more than once: a"):
        identity("a", "b", "a")


def test_identity_of_lists_tied_tensors_once_and_only_persistent_buffers() -> None:
    assert list(identity_of(_Tied()).inputs) == ["scale", "embedding.weight"]


def test_identity_of_mapper_passes_its_outputs() -> None:
    mapper = parallel(rename("a", "b"), drop("c"), keep("d"))
    assert list(identity_of(mapper).inputs) == list(identity_of(mapper).outputs) == ["b", "d"]
    assert sequential(mapper, identity_of(mapper)).groups == mapper.groups


def test_rename_all_exchanges_names_and_refuses_duplicates() -> None:
    mapper = rename_all({"a": "b", "c": "a"})
    assert mapper.groups == parallel(rename("a", "b"), rename("c", "a")).groups
    assert mapper.inverse().groups == rename_all({"b": "a", "a": "c"}).groups
    with pytest.raises(ValueError, match="b"):
        rename_all({"a": "b", "c": "b"})


def test_rename_passes_the_tensor_under_another_name() -> None:
    tensor = torch.ones(2)
    assert rename("a", "b").apply({"a": tensor}) == {"b": tensor}
    assert rename("a", "b").inverse().apply({"b": tensor}) == {"a": tensor}


def test_keep_is_a_group_without_inputs_and_drop_is_the_inverse_of_keep() -> None:
    mapper = keep("a", "b")
    assert mapper.groups == (StateGroup((), ("a",)), StateGroup((), ("b",)))
    assert mapper.inverse().groups == drop("a", "b").groups == (StateGroup(("a",), ()), StateGroup(("b",), ()))
    assert drop("a").apply({"a": torch.ones(1)}) == {}
    assert drop("a").inverse().groups == keep("a").groups


def test_keep_and_drop_refuse_a_name_twice() -> None:
    with pytest.raises(ValueError, match="produced more than once: a"):
        keep("a", "a")
    with pytest.raises(ValueError, match="consumed more than once: a"):
        drop("a", "a")
