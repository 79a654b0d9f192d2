from d9d_dist import MeshConfig
from d9d_dist.testing import run_ranks
from d9d_state._ranks import is_main, num_ranks


def _place() -> tuple[bool, int]:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        return is_main(ctx), num_ranks(ctx)


def test_first_rank_is_the_main_process() -> None:
    assert run_ranks(_place) == [(True, 2), (False, 2)]


def test_one_process_is_the_main_process() -> None:
    assert is_main(None)
    assert num_ranks(None) == 1
