"""Dry runs of the planner equal real runs: collectives in order with groups and bytes, and bytes of the state."""

import pytest
from planning_layouts import compare

_ROWS = [
    "dense,dp_shard=2",
    "dense,pp=2,microbatch=1",
    "moe,tp=2",
    pytest.param("dense,tp=2,dp_shard=2", marks=pytest.mark.full),
    pytest.param("plain,pp=2,cp_shard=2,method=ring,microbatch=1", marks=pytest.mark.full),
    pytest.param("tied,pp=2,schedule=zbv,microbatch=1", marks=pytest.mark.full),
    pytest.param("dense,dp_replicate=2,dp_shard=2,checkpointing=full", marks=pytest.mark.full),
    pytest.param("dense,cp_shard=2,method=all_to_all", marks=pytest.mark.full),
]


@pytest.mark.parametrize("name", _ROWS)
def test_dry_run_equals_the_real_run(name: str) -> None:
    assert compare(name) == []
