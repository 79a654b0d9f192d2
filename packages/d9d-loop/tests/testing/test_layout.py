import pytest

from d9d_dist import MeshConfig, UserError
from d9d_loop.testing import Layout, parse_layout


def test_reads_degrees_and_the_microbatch() -> None:
    layout = parse_layout("pp=2, dp_shard=4,tp=2,ep=8,microbatch=3")
    mesh = MeshConfig(pipeline_parallel=2, data_parallel_shard=4, tensor_parallel=2, expert_parallel=8)
    assert layout == Layout(mesh, microbatch_size=3)
    assert layout.world_size == 16  # expert parallelism reuses ranks


def test_an_empty_layout_is_one_process() -> None:
    assert parse_layout("") == Layout(MeshConfig(data_parallel_shard=1))
    assert parse_layout("").world_size == 1


@pytest.mark.parametrize("part", ["fsdp=2", "tp", "tp=", "tp=0", "tp=-1", "tp=two", "tp=2,tp=2"])
def test_refuses_invalid_layouts(part: str) -> None:
    message = (
        rf"layout '{part}': got 'tp.*|layout '{part}': got 'fsdp=2'; expected axis=degree, each axis once, .*tp, ep"
    )
    with pytest.raises(UserError, match=message):
        parse_layout(part)
