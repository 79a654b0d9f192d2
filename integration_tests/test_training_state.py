"""State that training changes: each call of an engine keeps or restores all of it; padding and stand-ins do not count."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from training_state import problems, reference_of_adapters, tokens_per_expert

from d9d_dist.testing import run_ranks

LAYOUTS: dict[str, dict[str, int]] = {
    "one process": {},
    "replicated": {"data_parallel_replicate": 2, "data_parallel_shard": 1},
    "sharded": {"data_parallel_shard": 2},
    "tensor": {"tensor_parallel": 2},
    "stages": {"pipeline_parallel": 2},
    "experts": {"data_parallel_shard": 2, "expert_parallel": 2},
}


def _size(mesh: dict[str, int]) -> int:
    return prod(degree for name, degree in mesh.items() if name != "expert_parallel")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sample("one process", "stages")
def test_each_call_keeps_or_restores_each_kind_of_state(layout: str, tmp_path: Path) -> None:
    for found in run_ranks(problems, LAYOUTS[layout], tmp_path, world_size=_size(LAYOUTS[layout])):
        assert found == []


SPLITS: dict[str, list[list[list[int]]]] = {
    "one process": [[[0, 1, 2, 3, 4, 5]]],
    "sharded": [[[0, 1], [2], [3]], [[4, 5]]],
    "experts": [[[0, 1], [2], [3]], [[4, 5]]],
    "tensor": [[[0, 1, 2], [3, 4, 5]]],
    "stages": [[[0, 1, 2], [3, 4], [5]]],
    "context": [[[0, 1, 2], [3, 4, 5]]],
}


@pytest.mark.parametrize("layout", SPLITS)
@pytest.mark.sample("one process", "sharded", "stages")
def test_padding_and_stand_ins_change_neither_losses_nor_tokens_per_expert(layout: str) -> None:
    ((loss, counts),) = run_ranks(tokens_per_expert, {}, [[[0], [1], [2], [3], [4], [5]]], 8, world_size=1)
    assert all(each.sum() == 2 * 27 for each in counts.values()), "27 tokens, two experts each"
    mesh = {**LAYOUTS, "context": {"context_parallel_shard": 2}}[layout]
    for padded in (8, 16):
        found: list[tuple[float, Any]] = run_ranks(
            tokens_per_expert, mesh, SPLITS[layout], padded, world_size=_size(mesh)
        )
        for other, more in found:
            assert other == pytest.approx(loss, rel=1e-9)
            assert all(torch.equal(more[name], counts[name]) for name in more)


@pytest.mark.parametrize("layout", ["one process", "stages"])
@pytest.mark.sample("one process")
def test_a_reference_without_adapters_has_the_initial_buffers(layout: str) -> None:
    assert all(run_ranks(reference_of_adapters, LAYOUTS[layout], world_size=_size(LAYOUTS[layout])))
