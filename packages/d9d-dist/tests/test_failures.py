import time
import traceback

import pytest
import torch.distributed as dist

from d9d_dist import MeshConfig
from d9d_dist.testing import run_ranks


def _fail_while_others_wait() -> tuple[float, str]:
    """Raise on rank 1 while rank 0 is inside a collective; return each rank's time to leave, and its error."""
    start, text = time.monotonic(), ""
    try:
        with MeshConfig(tensor_parallel=2).build() as ctx:
            group = ctx.group_for("regular", "tp")
            dist.barrier(group)
            if ctx.rank == 1:
                raise KeyError("the culprit")
            dist.barrier(group)
    except (KeyError, RuntimeError) as error:
        text = "".join(traceback.format_exception(error))
    return time.monotonic() - start, text


def test_a_failing_rank_does_not_wait_and_the_others_name_its_error() -> None:
    (waited, waiting), (took, culprit) = run_ranks(_fail_while_others_wait, timeout=60)
    assert "KeyError: 'the culprit'" in culprit
    assert "Rank" not in culprit
    assert "RuntimeError" in waiting
    assert "Rank 1 failed before this rank: KeyError: 'the culprit'" in waiting
    assert max(waited, took) < 50  # the groups' timeout is 30 minutes


def _fail_alike() -> list[str]:
    with pytest.raises(ValueError, match="alike") as caught, MeshConfig(data_parallel_shard=2).build():
        raise ValueError("alike")
    return list(getattr(caught.value, "__notes__", []))


def test_ranks_with_the_same_error_do_not_name_each_other() -> None:
    assert run_ranks(_fail_alike) == [[], []]


def _fail_in_a_group_of_another() -> bool:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(KeyError), MeshConfig().build():
            raise KeyError
        return dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_process_group_started_elsewhere_is_not_destroyed() -> None:
    assert _fail_in_a_group_of_another()
