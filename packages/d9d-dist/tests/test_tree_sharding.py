from collections import namedtuple
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from d9d_dist import MeshConfig, UserError
from d9d_dist.testing import Device, run_ranks
from d9d_dist.tree_sharding import (
    ShardOn,
    Whole,
    join_trees,
    replicate_spec,
    shard_spec,
    shard_tree,
    unshard_tree,
)

Pair = tuple[Any, Any]
"""A tree and a spec for it."""


def _tensor(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@st.composite
def _tensor_pairs(draw: st.DrawFn, size: int) -> Pair:
    kind = draw(st.sampled_from(["shard", "stack", "replicate"]))
    shape = draw(st.lists(st.integers(0, 5), min_size=kind == "shard", max_size=3))
    dim = draw(st.integers(0, len(shape) - (kind == "shard")))
    if kind == "stack":
        shape.insert(dim, size)
    tensor = _tensor(tuple(shape), draw(st.integers(0, 99)))
    if kind == "replicate":
        return tensor, Whole()
    return tensor, ShardOn(dim - draw(st.sampled_from([0, len(shape)])), stack=kind == "stack")


@st.composite
def _pairs(draw: st.DrawFn, size: int, depth: int = 2) -> Pair:
    """Draw a tree and its spec: most leaves are tensors, and some lists are split."""
    kinds = ["tensor", "tensor", "scalar", "list", "cut list", "tuple", "dict"]
    kind = draw(st.sampled_from(kinds if depth else kinds[:3]))
    if kind == "tensor":
        return draw(_tensor_pairs(size))
    if kind == "scalar":
        return draw(st.sampled_from([1, None, True, "x", 0.5])), Whole()
    children = draw(st.lists(_pairs(size, depth - 1), max_size=4))
    trees, specs = [tree for tree, _ in children], [spec for _, spec in children]
    match kind:
        case "list":
            return trees, specs
        case "cut list":
            return trees, ShardOn()
        case "tuple":
            return tuple(trees), tuple(specs)
        case _:  # spec and tree have different key orders
            keys = "abcd"[: len(trees)]
            return dict(zip(keys, trees, strict=True)), dict(reversed(list(zip(keys, specs, strict=True))))


def _are_equal(found: Any, expected: Any) -> bool:
    (found_leaves, found_structure), (leaves, structure) = tree_flatten(found), tree_flatten(expected)
    return found_structure == structure and all(
        x.dtype == y.dtype and torch.equal(x.cpu(), y) if isinstance(y, Tensor) else type(x) is type(y) and x == y
        for x, y in zip(found_leaves, leaves, strict=True)
    )


@given(st.data(), st.integers(1, 5))
def test_join_is_the_inverse_of_shard(data: st.DataObject, size: int) -> None:
    for tree, spec in data.draw(st.lists(_pairs(size), min_size=5)):
        parts = [shard_tree(tree, spec, rank=rank, size=size) for rank in range(size)]
        assert _are_equal(join_trees(parts, spec), tree)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 4, 7])
def test_parts_equal_tensor_split(length: int, size: int) -> None:
    x = _tensor((2, length), 0)
    tree: Any = {"x": x, "items": list(range(length))}
    spec = {"x": ShardOn(-1), "items": ShardOn()}
    for rank, expected in enumerate(x.tensor_split(size, dim=1)):
        part = shard_tree(tree, spec, rank=rank, size=size)
        assert torch.equal(part["x"], expected)
        assert part["items"] == torch.arange(length).tensor_split(size)[rank].tolist()


def test_parts_are_views_with_a_backward() -> None:
    x = _tensor((4, 2), 0).requires_grad_()
    cut, picked, whole = shard_tree([x, x, x], [ShardOn(), ShardOn(1, stack=True), Whole()], rank=1, size=2)
    assert whole is x
    assert cut._base is x
    assert picked._base is x
    (gradient,) = torch.autograd.grad(cut.sum() + 10 * picked.sum(), x)
    assert gradient.tolist() == [[0, 10], [0, 10], [1, 11], [1, 11]]


def test_stacked_shards_lack_the_dim() -> None:
    x = _tensor((3, 2, 4), 0)
    parts = [shard_tree((x,), (ShardOn(-2, stack=True),), rank=rank, size=2) for rank in range(2)]
    assert [part.shape for (part,) in parts] == [(3, 4)] * 2
    assert _are_equal(join_trees(parts, (ShardOn(-2, stack=True),)), (x,))


def test_specs_are_derived_from_trees() -> None:
    tree = {"x": torch.zeros(2, 3), "y": [torch.zeros(2), (1, None)], "z": torch.zeros(())}
    assert shard_spec(tree) == {"x": ShardOn(), "y": [ShardOn(), (Whole(), Whole())], "z": Whole()}
    of_dim = {"x": ShardOn(-2), "y": [Whole(), (Whole(), Whole())], "z": Whole()}
    assert shard_spec(tree, dim=-2) == of_dim
    assert shard_spec(tree, dim=1)["x"] == ShardOn(1)  # ty: ignore[not-subscriptable, invalid-argument-type]
    assert set(map(type, tree_leaves(replicate_spec(tree)))) == {Whole}
    assert len(tree_leaves(replicate_spec(tree))) == 5


Point = namedtuple("Point", ["x", "y"])


def test_named_tuples_keep_their_type() -> None:
    tree, spec = Point(torch.arange(4), "name"), Point(ShardOn(), Whole())
    part = shard_tree(tree, spec, rank=1, size=2)
    assert isinstance(part, Point)
    assert part.x.tolist() == [2, 3]


def _unshard(pairs: list[Pair]) -> list[bool]:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        group = ctx.group_for("regular", "dp_shard")
        found = []
        for tree, spec in pairs:
            part = shard_tree(tree, spec, rank=ctx.rank, size=ctx.world_size)
            found.append(_are_equal(unshard_tree(part, spec, group), tree))
        return found


@pytest.mark.parametrize("size", [1, 3])
@settings(max_examples=4)
@given(data=st.data())
def test_unshard_is_the_inverse_of_shard(size: int, data: st.DataObject) -> None:
    pairs = data.draw(st.lists(_pairs(size), min_size=8, max_size=8))
    assert run_ranks(_unshard, pairs, world_size=size) == [[True] * len(pairs)] * size


def _unshard_on_device() -> bool:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        x = torch.arange(6.0, device=ctx.device).view(3, 2)
        tree = {"x": x, "parts": [x, {"y": x[:1], "name": "y"}, 3], "same": (x, None)}
        spec = {"x": ShardOn(), "parts": ShardOn(), "same": Whole()}
        part = shard_tree(tree, spec, rank=ctx.rank, size=2)
        whole = unshard_tree(part, spec)
        tensors = [leaf for leaf in tree_leaves(whole) if isinstance(leaf, Tensor)]
        is_right = _are_equal(whole["parts"], [x.cpu(), {"y": x[:1].cpu(), "name": "y"}, 3])
        return is_right and whole["same"] is part["same"] and all(tensor.device == x.device for tensor in tensors)


def test_results_are_on_the_device_of_the_parts(device: Device) -> None:
    assert run_ranks(_unshard_on_device, device=device) == [True] * 2


def _unshard_mismatched() -> str:
    with MeshConfig(data_parallel_shard=-1).build():
        with (
            mock.patch.object(dist, "all_gather_into_tensor", side_effect=AssertionError),
            pytest.raises(UserError) as caught,
        ):
            unshard_tree({"a": torch.zeros(2), "b": 1}, {"a": ShardOn(), "b": ShardOn()})
        return str(caught.value)


def test_unshard_refuses_before_any_collective() -> None:
    expected = (
        "got ShardOn(dim=0, stack=False) for the int 1 at ['b']; expected a tensor or a list. "
        "Use Whole() for other values."
    )
    assert run_ranks(_unshard_mismatched) == [expected] * 2


def _unshard_unsendable(item: object) -> str:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        with pytest.raises(UserError) as caught:
            unshard_tree([item if ctx.rank == 1 else 1], ShardOn())
        return str(caught.value)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (1j, "rank 1: got a value to gather that is not JSON: Object of type complex is not JSON serializable"),
        (Point(1, 2), "got a tree that cannot be sent: Can't serialize TreeSpec of namedtuple class"),
    ],
)
def test_list_items_that_cannot_be_sent_are_refused_on_every_rank(item: object, expected: str) -> None:
    messages = run_ranks(_unshard_unsendable, item)
    assert messages[0] == messages[1]
    assert messages[0].startswith(expected)


MISMATCHES: list[tuple[Any, Any, str]] = [
    (
        {"a": [torch.zeros(2), 1]},
        {"a": [ShardOn()]},
        "the tree and the spec differ at ['a']: got a list of 2 in the tree, and a list of 1 in the spec; expected the "
        "same nesting. A leaf of the spec may apply to a whole subtree.",
    ),
    (
        {"a": 1, "b": 2},
        {"a": Whole(), "c": Whole()},
        "the tree and the spec differ at the root: got a dict with the keys 'a', 'b' in the tree, and a dict with the "
        "keys 'a', 'c' in the spec; expected the same nesting. A leaf of the spec may apply to a whole subtree.",
    ),
    (
        [torch.zeros(2, 3)],
        [{}],
        "the tree and the spec differ at [0]: got a tensor of shape (2, 3) in the tree, and a dict with the keys "
        "(none) in the spec; expected the same nesting. A leaf of the spec may apply to a whole subtree.",
    ),
    (
        ([1],),
        [[Whole()]],
        "the tree and the spec differ at the root: got a tuple of 1 in the tree, and a list of 1 in the spec; expected "
        "the same nesting. A leaf of the spec may apply to a whole subtree.",
    ),
    ({"a": 1}, {"a": None}, "got None in the spec at ['a']; expected ShardOn(...) or Whole()."),
    (
        {"a": "x" * 99},
        {"a": ShardOn()},
        "got ShardOn(dim=0, stack=False) for the str 'xxxxxxxxxxxx...xxxxxxxxxxxxx' at ['a']; expected a "
        "tensor or a list. Use Whole() for other values.",
    ),
    (
        (torch.zeros(2),),
        (ShardOn(1),),
        "got ShardOn(dim=1, stack=False) for a tensor of shape (2,) at [0]; expected an existing dim.",
    ),
    (
        (torch.zeros(2),),
        (ShardOn(-2, stack=True),),
        "got ShardOn(dim=-2, stack=True) for a tensor of shape (2,) at [0]; expected an existing dim.",
    ),
    (
        {"a": [1, 2]},
        {"a": ShardOn(stack=True)},
        "got ShardOn(dim=0, stack=True) for a list at ['a']; expected ShardOn(dim=0), which splits the list.",
    ),
    (
        {"a": torch.zeros(3, 2)},
        {"a": ShardOn(stack=True)},
        "got 3 elements on dim 0 of a tensor of shape (3, 2) at ['a'], to split into 2 shards of one element "
        "(stack=True); expected 2.",
    ),
]


@pytest.mark.parametrize(("tree", "spec", "message"), MISMATCHES)
def test_refuses_trees_that_do_not_match(tree: Any, spec: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        shard_tree(tree, spec, rank=0, size=2)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"a": torch.zeros(3, 2)},
            "got the size 3 of a tensor of shape (3, 2) at ['a'], on dim 0, to split into 2 equal",
        ),
        ({"a": [1, 2, 3]}, "got the size 3 of a list of 3 at ['a'], on dim 0, to split into 2 equal"),
    ],
)
def test_even_refuses_uneven_sizes(tree: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        shard_tree(tree, {"a": ShardOn()}, rank=0, size=2, even=True)
    expected = f"{message} shards; expected a multiple of 2. Use even=False to allow unequal shards."
    assert str(caught.value) == expected
    shard_tree(tree, {"a": ShardOn()}, rank=0, size=3, even=True)


def test_join_refuses_parts_that_do_not_match() -> None:
    spec = {"a": ShardOn()}
    with pytest.raises(UserError, match=r"got no parts to join; expected the parts of all ranks\."):
        join_trees([], spec)
    with pytest.raises(UserError, match=r"the tree and the spec differ at the root: got a dict with the keys 'b'"):
        join_trees([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}], spec)
    mixed: list[dict[str, Any]] = [{"a": torch.zeros(1)}, {"a": [1]}]
    with pytest.raises(UserError, match=r"got tensors and lists together at \['a'\]; expected parts of one kind\."):
        join_trees(mixed, spec)
    with pytest.raises(UserError, match=r"got ShardOn\(dim=0, stack=False\) for the int 1 at \['a'\]"):
        join_trees([{"a": torch.zeros(1)}, {"a": 1}], spec)
