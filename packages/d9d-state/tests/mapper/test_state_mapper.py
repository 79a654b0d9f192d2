import pytest

from d9d_state import concat, identity, keep, parallel


def test_groups_are_balanced_by_bytes() -> None:
    mapper = parallel(identity("a", "b", "c", "d", "e"), keep("k"))
    sizes = {"a": 5, "b": 1, "c": 2, "d": 3, "e": 9}
    shards = [mapper.shard(2, index, num_bytes=sizes) for index in range(2)]
    assert [sum(sizes[name] for name in shard.inputs) for shard in shards] == [10, 10]
    assert [list(shard.inputs) for shard in shards] == [["b", "e"], ["a", "c", "d"]]


def test_groups_are_balanced_by_inputs_and_never_split() -> None:
    mapper = parallel(identity("x", "y"), concat(["a", "b", "c"], "abc"), identity("z"))
    shards = [mapper.shard(3, index) for index in range(3)]
    assert [list(shard.inputs) for shard in shards] == [["a", "b", "c"], ["x", "z"], ["y"]]
    assert [list(shard.inputs) for shard in (mapper.shard(9, index) for index in range(9))].count([]) == 5


def test_cost_of_a_shard_depends_on_its_size() -> None:
    mapper = identity(*(str(index) for index in range(100)))
    assert mapper.shard(50, 0).num_wires == 2


def test_shard_index_out_of_range_is_refused() -> None:
    for num_shards, index in ((2, 2), (2, -1), (0, 0)):
        with pytest.raises(
            ValueError, match=f"got index = {index}, num_shards = {num_shards}; expected 0 <= index < num_shards"
        ):
            identity("a").shard(num_shards, index)


def test_missing_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_bytes lacks b, c; expected the size of every input of the mapper"):
        parallel(identity("a"), concat(["b", "c"], "bc")).shard(2, 0, num_bytes={"a": 1})
