"""Dry runs of the planner equal real runs: collectives in order with groups and bytes, and bytes of the state."""

import pytest
from planning_layouts import compare

_ROWS = [
    "dense,dp_shard=2",
    "dense,pp=2,microbatch=1",
    "moe,tp=2",
    "dense,tp=2,dp_shard=2",
    "plain,pp=2,cp_shard=2,method=ring,microbatch=1",
    "tied,pp=2,schedule=zbv,microbatch=1",
    "dense,dp_replicate=2,dp_shard=2,checkpointing=full",
    "dense,cp_shard=2,method=all_to_all",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", _ROWS)
@pytest.mark.sample("dense,pp=2,microbatch=1")
def test_dry_run_equals_the_real_run(name: str) -> None:
    assert compare(name) == []
