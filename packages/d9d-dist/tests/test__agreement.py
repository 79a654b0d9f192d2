import os
import re

import pytest

from d9d_dist import MeshConfig, UserError
from d9d_dist._agreement import _describe
from d9d_dist.testing import Device, run_ranks


def _messages(values: list[str | bytes]) -> str:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        ctx.check_agreement("the same", "x" * 10_000)
        ctx.check_agreement("bytes or text", b"x" if ctx.rank else "x")
        with pytest.raises(UserError) as caught:
            ctx.check_agreement("the optimizer", values[ctx.rank])
        ctx.check_agreement("the message", str(caught.value))
        return str(caught.value)


@pytest.mark.world_size(3)
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["a", "b", "a"], "rank 1 differs from rank 0;"),
        (["b", b"a", "a"], "rank 0 differs from rank 1;"),
        (["a", "b", "c"], "ranks 1, 2 differ from rank 0;"),
    ],
)
def test_every_rank_names_the_ranks_that_differ(values: list[str | bytes], expected: str, device: Device) -> None:
    message = (
        f"the optimizer differs between the 3 ranks: {expected} expected equal values. Start all ranks with "
        "the same code, configuration and arguments."
    )
    assert run_ranks(_messages, values, world_size=3, device=device) == [message] * 3


def test_a_long_list_of_ranks_is_shortened() -> None:
    assert re.search(
        r": ranks 10, 11, 12, 13, 14, 15, 16, 17 and 2 more differ", _describe("x", [(0,)] * 10 + [(1,)] * 10)
    )


def _build_with(shard_on_rank: list[int]) -> str:
    shard = shard_on_rank[int(os.environ["RANK"])]
    with pytest.raises(UserError) as caught:
        MeshConfig(data_parallel_shard=shard, tensor_parallel=4 // shard).build()
    return str(caught.value)


def test_ranks_with_other_degrees_are_named_before_meshes_are_built() -> None:
    for message in run_ranks(_build_with, [2, 2, 4, 2], world_size=4, timeout=60):
        assert message.startswith("the mesh differs between the 4 ranks: rank 2 differs from rank 0;")
