import re
from math import prod
from typing import Any, cast

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from d9d_dist import MeshConfig, UserError
from d9d_dist.testing import run_ranks


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
    domains = MeshConfig().resolve(1).domains()
    assert list(domains["regular"]) == ["pp", "dp_replicate", "dp_shard", "cp_shard", "cp_replicate", "tp"]
    assert list(domains["dense"]) == ["pp", "dp_replicate", "dp_cp_shard", "cp_replicate", "tp"]
    assert list(domains["expert"]) == ["pp", "ep_replicate", "ep_shard"]
    assert list(domains["batch"]) == ["pp", "dp", "cp", "tp"]
    assert list(domains["flat"]) == ["world"]


# Invalid configurations, each with its full error message.
REFUSED = {
    "a product that is not the world": (
        {"data_parallel_replicate": 2, "data_parallel_shard": 2},
        "mesh: data_parallel_replicate 2 x data_parallel_shard 2 make 4 ranks, but the job has 2. Start 4 ranks "
        "(on one machine: torchrun --nproc-per-node 4), or set mesh.data_parallel_shard = -1, which then takes the "
        "remaining ranks: 1.",
    ),
    "a product that no rest can mend": (
        {"data_parallel_shard": 1, "tensor_parallel": 3},
        "mesh: tensor_parallel 3 make 3 ranks, but the job has 2. Start 3 ranks (on one machine: torchrun "
        "--nproc-per-node 3), or choose degrees whose product is 2.",
    ),
    "one rank on several": (
        {"data_parallel_shard": 1},
        "mesh: all degrees 1 make 1 rank, but the job has 2. Start 1 rank (on one machine: torchrun --nproc-per-node "
        "1), or set mesh.data_parallel_shard = -1, which then takes the remaining ranks: 2.",
    ),
    "a rest that does not divide": (
        {"data_parallel_shard": -1, "tensor_parallel": 3},
        "mesh: data_parallel_shard -1 x tensor_parallel 3 on 2 ranks; expected the product of the given degrees, 3, to "
        "divide 2. Start a multiple of 3 ranks, or choose degrees whose product divides 2.",
    ),
    "two rests": (
        {"data_parallel_replicate": -1, "data_parallel_shard": -1},
        "mesh.data_parallel_replicate and mesh.data_parallel_shard are -1; expected at most one, which takes the "
        "remaining ranks. Set a number for the others.",
    ),
    "experts that do not divide a stage": (
        {"data_parallel_shard": 2, "expert_parallel": 3},
        "mesh.expert_parallel = 3; expected a divisor of the 2 ranks of a pipeline stage (data x context x tensor "
        "parallel degrees), which expert parallelism reuses. Use one of 1, 2, or -1 for all of them.",
    ),
}


@pytest.mark.parametrize(("degrees", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses_impossible_degrees(degrees: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        MeshConfig(**degrees).resolve(2)


def _refusals(configs: list[dict[str, int]]) -> list[str]:
    messages = []
    for degrees in configs:
        with pytest.raises(UserError) as caught:
            MeshConfig(**degrees).build()
        messages.append(str(caught.value))
        assert not dist.is_initialized()
    return messages


def test_all_ranks_raise_the_same_error_before_any_collective() -> None:
    configs = [degrees for degrees, _ in REFUSED.values()]
    assert run_ranks(_refusals, configs) == [[message for _, message in REFUSED.values()]] * 2


def test_long_lists_of_divisors_are_shortened() -> None:
    with pytest.raises(UserError, match=r"Use one of 1, 2, 3, 4, 5, \.\.\., 30, 40, 60, 120, or -1") as caught:
        MeshConfig(data_parallel_shard=-1, expert_parallel=7).resolve(120)
    assert ", 6," not in str(caught.value)


@pytest.mark.parametrize(
    ("degrees", "shard"), [({}, 8), ({"tensor_parallel": 2}, 4), ({"data_parallel_replicate": -1}, 1)]
)
def test_by_default_the_parameters_are_sharded_over_the_remaining_ranks(degrees: dict[str, int], shard: int) -> None:
    assert MeshConfig(**degrees).resolve(8).data_parallel_shard == shard


def test_experts_may_take_all_ranks_of_a_stage() -> None:
    config = MeshConfig(pipeline_parallel=2, data_parallel_shard=4, expert_parallel=-1).resolve(8)
    assert config.domains()["expert"] == {"pp": 2, "ep_replicate": 1, "ep_shard": 4}


@pytest.mark.parametrize("degree", [0, -2])
def test_refuses_an_invalid_degree(degree: int) -> None:
    with pytest.raises(ValidationError, match=rf"got {degree}; expected a positive number of ranks, or -1"):
        MeshConfig(tensor_parallel=degree)


def test_refuses_an_unknown_degree() -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        MeshConfig.model_validate({"tensor_paralel": 2})


def test_an_unknown_precision_is_an_error() -> None:
    with pytest.raises(UserError, match="precision = 'float32'; expected one of auto, parameters, bfloat16"):
        MeshConfig().build(precision=cast(Any, "float32"))
