import pytest

from d9d_dist import MeshConfig
from d9d_dist.testing import run_ranks
from d9d_state import StateError
from d9d_state._consensus import agree, broadcast_int, is_main, num_ranks


def _agree(problems: list[str | None]) -> str | None:
    with MeshConfig(data_parallel_shard=len(problems)).build() as ctx:
        try:
            agree(problems[ctx.rank], ctx)
        except StateError as error:
            return str(error)
        return None


def test_agree_returns_if_no_rank_has_a_problem() -> None:
    assert run_ranks(_agree, [None, None]) == [None, None]


def test_problem_of_one_rank_raises_on_all() -> None:
    assert run_ranks(_agree, [None, "übel"]) == ["rank 1: übel"] * 2


def test_problems_of_all_ranks_are_listed() -> None:
    assert run_ranks(_agree, ["short", "long" * 2000]) == [f"rank 0: short; rank 1: {'long' * 1000}"] * 2


def _broadcast() -> tuple[int, bool, int]:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        return broadcast_int(2**60 + ctx.rank, ctx), is_main(ctx), num_ranks(ctx)


def test_broadcast_int_sends_value_of_main_process() -> None:
    assert run_ranks(_broadcast) == [(2**60, True, 2), (2**60, False, 2)]


def test_one_process_agrees_with_itself() -> None:
    agree(None, None)
    assert broadcast_int(3, None) == 3
    assert is_main(None)
    assert num_ranks(None) == 1
    with pytest.raises(StateError, match=r"^bad$"):
        agree("bad", None)
