import pytest

from d9d_dist import UserError
from d9d_pipeline.schedule import ranks_of_stages


def test_stage_ranks_of_loop_and_v_placement() -> None:
    assert ranks_of_stages("loop", num_ranks=3, stages_per_rank=2) == (0, 1, 2, 0, 1, 2)
    assert ranks_of_stages("v", num_ranks=3, stages_per_rank=2) == (0, 1, 2, 2, 1, 0)
    assert ranks_of_stages("v", num_ranks=2, stages_per_rank=3) == (0, 1, 1, 0, 0, 1)


def test_rejects_ranks_without_a_stage() -> None:
    with pytest.raises(UserError, match=r"got stages_per_rank = 0; expected at least 1"):
        ranks_of_stages("loop", num_ranks=3, stages_per_rank=0)


def test_rejects_an_unknown_placement() -> None:
    with pytest.raises(UserError, match=r"got the placement 'w'; expected one of \['loop', 'v'\]"):
        ranks_of_stages("w", num_ranks=3, stages_per_rank=2)  # ty: ignore[invalid-argument-type]  (what is tested)
