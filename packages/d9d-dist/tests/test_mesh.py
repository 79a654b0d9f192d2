from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from d9d_dist import MeshConfig, UserError


@given(st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 6))
def test_every_domain_holds_every_rank(degrees: tuple[int, int, int, int, int, int]) -> None:
    pp, rep, shard, cps, cpr, tp = degrees
    world_size = pp * rep * shard * cps * cpr * tp
    config = MeshConfig(
        pipeline_parallel=pp,
        data_parallel_replicate=rep,
        data_parallel_shard=-1,
        context_parallel_shard=cps,
        context_parallel_replicate=cpr,
        tensor_parallel=tp,
        expert_parallel=shard,
    ).resolve(world_size)
    assert config.data_parallel_shard == shard
    assert {prod(axes.values()) for axes in config.domains().values()} == {world_size}
    assert config.domains()["expert"]["ep_shard"] == shard


def test_axes_have_their_documented_names() -> None:
    domains = MeshConfig().domains()
    assert list(domains["regular"]) == ["pp", "dp_replicate", "dp_shard", "cp_shard", "cp_replicate", "tp"]
    assert list(domains["dense"]) == ["pp", "dp_replicate", "dp_cp_shard", "cp_replicate", "tp"]
    assert list(domains["expert"]) == ["pp", "ep_replicate", "ep_shard"]
    assert list(domains["batch"]) == ["pp", "dp", "cp", "tp"]
    assert list(domains["flat"]) == ["world"]


def test_refuses_a_product_that_is_not_the_world() -> None:
    config = MeshConfig(data_parallel_replicate=2, data_parallel_shard=2)
    with pytest.raises(
        UserError,
        match=r"mesh: data_parallel_replicate 2 x data_parallel_shard 2 make 4 ranks, but the job has 3\. "
        r"Start 4 ranks \(torchrun --nproc-per-node 4\), or let one degree take the rest, e\.g\. --mesh\.",
    ):
        config.resolve(3)


def test_refuses_a_rest_that_does_not_divide() -> None:
    with pytest.raises(UserError, match=r"tensor_parallel 3 on 8 ranks; expected .* 3, to divide 8. Start a multiple"):
        MeshConfig(data_parallel_shard=-1, tensor_parallel=3).resolve(8)


def test_refuses_two_rests() -> None:
    with pytest.raises(UserError, match=r"mesh\.data_parallel_replicate and mesh\.data_parallel_shard are both -1"):
        MeshConfig(data_parallel_replicate=-1, data_parallel_shard=-1).resolve(8)


def test_refuses_an_expert_degree_that_does_not_divide() -> None:
    with pytest.raises(UserError, match=r"mesh\.expert_parallel = 3; expected a divisor of the 4 ranks of a pipeline"):
        MeshConfig(pipeline_parallel=2, data_parallel_shard=4, expert_parallel=3).resolve(8)


def test_experts_may_take_all_ranks_of_a_stage() -> None:
    config = MeshConfig(pipeline_parallel=2, data_parallel_shard=4, expert_parallel=-1).resolve(8)
    assert config.domains()["expert"] == {"pp": 2, "ep_replicate": 1, "ep_shard": 4}


@pytest.mark.parametrize("degree", [0, -2])
def test_refuses_a_degree_that_is_no_number_of_ranks(degree: int) -> None:
    with pytest.raises(ValidationError, match=rf"got {degree}; expected a positive number of ranks, or -1"):
        MeshConfig(tensor_parallel=degree)


def test_refuses_an_unknown_degree() -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        MeshConfig.model_validate({"tensor_paralel": 2})
