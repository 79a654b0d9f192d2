import pytest
import torch

from d9d_state import cast, concat, drop, identity, keep, parallel, rename, repeat, scope, sequential, split, stack
from d9d_state.mapper.graph import StateGroup


def test_parallel_lists_every_name_that_occurs_twice() -> None:
    with pytest.raises(ValueError, match="consumed more than once: a, b"):
        parallel(identity("a", "b"), rename("a", "x"), rename("b", "y"))
    with pytest.raises(ValueError, match="produced more than once: a, b"):
        parallel(identity("a", "b"), rename("x", "a"), keep("b"))


def test_parallel_of_nothing_maps_nothing() -> None:
    assert parallel().groups == ()


def test_sequential_merges_the_groups_that_a_later_mapper_joins() -> None:
    mapper = sequential(
        parallel(stack(["a", "b"], "ab"), rename("c", "d"), rename("e", "f")),
        parallel(concat(["ab", "d"], "abd"), identity("f")),
    )
    assert mapper.groups == (StateGroup(("a", "b", "c"), ("abd",)), StateGroup(("e",), ("f",)))
    output = mapper.apply({"a": torch.tensor([1]), "b": torch.tensor([2]), "c": torch.tensor([[3]])})
    assert output["abd"].tolist() == [[1], [2], [3]]


def test_sequential_separates_equal_intermediate_names() -> None:
    swap = parallel(rename("a", "b"), rename("b", "a"))
    tensors = {"a": torch.tensor(1)}
    assert swap.apply(tensors)["b"] is tensors["a"]
    assert sequential(swap, swap).apply(tensors)["a"] is tensors["a"]
    assert sequential(swap, swap, swap).groups == swap.groups


def test_nodes_of_repeated_mappers_are_in_topological_order() -> None:
    there, back = rename("a", "b"), rename("b", "a")
    tensor = torch.ones(1)
    for mapper in (sequential(there, back), sequential(there, back, there, back)):
        assert mapper.groups == (StateGroup(("a",), ("a",)),)
        assert mapper.apply({"a": tensor})["a"] is tensor
    twice = sequential(*[concat(["a"], "a")] * 3, stack(["a"], "a"))
    assert [(node.inputs, node.outputs) for node in twice.nodes] == sorted(
        (node.inputs, node.outputs) for node in twice.nodes
    )
    made: set[int] = set(twice.input_wires.values())
    for node in twice.nodes:
        assert made.issuperset(node.inputs)
        assert made.isdisjoint(node.outputs)
        made.update(node.outputs)


def test_parallel_separates_intermediate_names_of_chains() -> None:
    mapper = parallel(
        sequential(rename("a", "t"), rename("t", "b")),
        sequential(stack(["c", "d"], "t"), rename("t", "e")),
    )
    assert mapper.groups == (StateGroup(("a",), ("b",)), StateGroup(("c", "d"), ("e",)))


def test_sequential_lists_all_unconnected_names() -> None:
    with pytest.raises(
        ValueError,
        match=r"mapper 1 of sequential\(\) does not match the mapper before it: it does not consume a, b: add them to "
        r"identity\(\) or drop\(\) in parallel with it; it consumes x, y, which the mapper before it does not produce",
    ):
        sequential(identity("a", "b", "c"), identity("c", "x", "y"))


def test_sequential_needs_a_mapper() -> None:
    with pytest.raises(ValueError, match="got no mappers"):
        sequential()


def test_drop_removes_the_outputs_of_a_group() -> None:
    mapper = sequential(stack(["a", "b"], "ab"), drop("ab"))
    assert mapper.groups == (StateGroup(("a", "b"), ()),)
    assert mapper.apply({"a": torch.ones(1), "b": torch.ones(1)}) == {}
    assert mapper.inverse().unset_wires >= set(mapper.input_wires.values())


def test_outputs_of_keep_stay_unset_after_further_operations() -> None:
    mapper = sequential(keep("a"), cast("a", dtype=torch.float16, back=torch.float32), rename("a", "b"))
    assert mapper.groups == (StateGroup((), ("b",)),)


def test_operation_with_partial_inputs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stack\(dim=0\): an operation would get only some of its inputs"):
        sequential(parallel(keep("a"), identity("b")), stack(["a", "b"], "c"))
    dropping = sequential(split("c", ["a", "b"], [1, 1]), parallel(drop("a"), identity("b")))
    assert dropping.apply({"c": torch.tensor([1, 2])})["b"].tolist() == [2]
    with pytest.raises(
        ValueError,
        match=r"concat\(dim=0, sizes=\[1, 1\]\): an operation would get only some of its inputs, "
        r"because .* are kept or dropped",
    ):
        dropping.inverse()


def test_scope_prefixes_both_ends() -> None:
    mapper = scope("model.", "", stack(["a", "b"], "ab"))
    assert mapper.groups == (StateGroup(("model.a", "model.b"), ("ab",)),)


def test_repeat_fills_the_placeholders_in_every_combination() -> None:
    mapper = repeat(rename("l.{i}.e.{j}", "e.{j}.l.{i}"), i=range(2), j=["x", "y"])
    assert [group.inputs[0] for group in mapper.groups] == ["l.0.e.x", "l.0.e.y", "l.1.e.x", "l.1.e.y"]
    assert list(mapper.outputs) == ["e.x.l.0", "e.y.l.0", "e.x.l.1", "e.y.l.1"]


def test_repeat_does_not_change_other_braces() -> None:
    inner = repeat(rename("{i}.{j}", "{j}.{i}"), i=range(2))
    assert list(repeat(inner, j=["x"]).inputs) == ["0.x", "1.x"]


def test_repeat_refuses_unused_placeholder() -> None:
    with pytest.raises(ValueError, match=r"got values for j, but no name contains \{j\}"):
        repeat(rename("{i}", "a.{i}"), i=range(2), j=range(2))


def test_repeat_refuses_copies_with_a_name_in_common() -> None:
    with pytest.raises(ValueError, match="consumed more than once: a"):
        repeat(rename("a", "b.{i}"), i=range(2))
