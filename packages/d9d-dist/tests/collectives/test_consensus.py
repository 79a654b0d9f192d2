import math
import os
import re
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from d9d_dist import MeshConfig, UserError, agree, gather_json
from d9d_dist.collectives import consensus
from d9d_dist.collectives.consensus import _describe_difference
from d9d_dist.testing import Device, run_ranks


def _value(rank: int) -> Any:
    return {"name": "ü\udcff" * 1000 * rank, "parts": [rank, {"y": None}], "pair": (0.1, 2**70), "flag": rank == 1}


def _received(rank: int) -> Any:
    return {**_value(rank), "pair": [0.1, 2**70]}


def _gathered() -> tuple[bool, list[Any], list[Any], list[Any]]:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        gathered = gather_json(_value(ctx.rank))
        only_one = gather_json(ctx.rank if ctx.rank == 1 else None)
        alone = gather_json(ctx.rank, alone=True)
        with mock.patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor) as collective:
            nothing = gather_json(None)
            gather_json("x" * 500)
            assert collective.call_count == 2  # sizes and texts together
            gather_json("x" * 501 * ctx.rank)
            assert collective.call_count == 4
        return gathered == [_received(rank) for rank in range(3)], only_one, alone, nothing


@pytest.mark.world_size(3)
def test_every_rank_gathers_the_values_of_all_ranks(device: Device) -> None:
    for rank, found in enumerate(run_ranks(_gathered, world_size=3, device=device)):
        assert found == (True, [None, 1, None], [rank], [None] * 3)


def _gathered_in_groups() -> list[int]:
    """Gather in groups of some of the job's ranks: 0 and 2, 1 and 3."""
    with MeshConfig(data_parallel_replicate=2, data_parallel_shard=2).build() as ctx:
        return gather_json(ctx.rank, ctx.group_for("regular", "dp_replicate"))


@pytest.mark.world_size(4)
def test_values_are_gathered_only_within_the_group(device: Device) -> None:
    assert run_ranks(_gathered_in_groups, world_size=4, device=device) == [[0, 2], [1, 3]] * 2


def _refused(bad_ranks: list[int], kind: str) -> str:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        bad = {"nan": math.nan, "object": {1, 2}, "long": "x" * 50}[kind]
        with mock.patch.object(consensus, "_MAX_BYTES", 50), pytest.raises(UserError) as caught:
            gather_json(bad if ctx.rank in bad_ranks else 1)
        agree(same={"the message": str(caught.value)})
        return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("nan", "got a value to gather that is not JSON: Out of range float values are not JSON compliant"),
        ("object", "got a value to gather that is not JSON: Object of type set is not JSON serializable"),
        ("long", "got 52 bytes of JSON to gather; expected at most 50."),
    ],
)
def test_values_that_cannot_be_sent_are_refused_on_every_rank(kind: str, expected: str) -> None:
    for message in run_ranks(_refused, [1], kind):
        assert message.startswith(f"rank 1: {expected}")
    for message in run_ranks(_refused, [0, 1], kind):
        assert message.startswith(f"ranks 0, 1: {expected}")


class _OtherError(RuntimeError):
    pass


def _agree(problems: list[str | UserError | None]) -> str | None:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        try:
            agree(problems[ctx.rank], error=_OtherError)
        except (_OtherError, UserError) as error:
            return f"{type(error).__name__}: {error}"
        return None


@pytest.mark.world_size(3)
@pytest.mark.parametrize(
    ("problems", "expected"),
    [
        ([None, None, None], None),
        ([None, "übel", None], "_OtherError: rank 1: übel"),
        (["same", "same", "same"], "_OtherError: ranks 0, 1, 2: same"),
        (["same", None, "same"], "_OtherError: ranks 0, 2: same"),
        (["short", "long" * 2000, None], f"_OtherError: rank 0: short; rank 1: {'long' * 1000}"),
        ([None, "", None], "_OtherError: rank 1: "),
        ([UserError("theirs"), None, UserError("theirs")], "UserError: theirs"),
        ([UserError("theirs"), None, UserError("mine")], "UserError: rank 0: theirs; rank 2: mine"),
        ([UserError("theirs"), "broken", None], "_OtherError: rank 0: theirs; rank 1: broken"),
    ],
)
def test_a_problem_on_any_rank_raises_on_all_ranks(
    problems: list[str | UserError | None], expected: str | None, device: Device
) -> None:
    assert run_ranks(_agree, problems, world_size=3, device=device) == [expected] * 3


def test_agreement_and_gathering_work_in_one_process() -> None:
    agree()
    agree(same={"x": "1"})
    assert gather_json((1, None)) == [[1, None]]
    for alone in (False, True):
        with pytest.raises(_OtherError, match=r"^bad$"):
            agree("bad", error=_OtherError, alone=alone)
        with pytest.raises(UserError, match=r"^got a value to gather that is not JSON: "):
            gather_json(object(), alone=alone)


def _messages(values: list[str | bytes]) -> str:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        agree(same={"the same": "x" * 10_000})
        agree(same={"bytes or text": b"x" if ctx.rank else "x"})
        with pytest.raises(UserError) as caught:
            agree(same={"the data": "x", "the optimizer": values[ctx.rank]})
        agree(same={"the message": str(caught.value)})
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
        r": ranks 10, 11, 12, 13, 14, 15, 16, 17 and 2 more differ", _describe_difference("x", ["0"] * 10 + ["1"] * 10)
    )


def _build_with(shard_on_rank: list[int]) -> str:
    shard = shard_on_rank[int(os.environ["RANK"])]
    with pytest.raises(UserError) as caught:
        MeshConfig(data_parallel_shard=shard, tensor_parallel=4 // shard).build()
    return str(caught.value)


def test_differing_mesh_degrees_are_reported_before_meshes_are_built() -> None:
    for message in run_ranks(_build_with, [2, 2, 4, 2], world_size=4):
        assert message.startswith("the mesh differs between the 4 ranks: rank 2 differs from rank 0;")
