"""State that training changes: each call of an engine keeps or restores it. Padding and stand-ins do not count."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from training_state import generated_to_a_stop, problems, reference_of_adapters, sampled, tokens_per_expert, with_bug

from d9d_dist.testing import run_ranks
from d9d_dist.values.buffer_values import BufferValues
from d9d_loop.engine.job_state import JobState
from d9d_loop.engine.pipeline import Pipeline
from d9d_loop.engine.train_step import TrainStep
from d9d_loop.tasks import NextTokenTask

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
@pytest.mark.slow("stages")
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
@pytest.mark.slow("sharded")
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


@pytest.mark.parametrize("mesh", ["stages", "tensor", "context"])
@pytest.mark.sample("stages")
def test_ranks_that_compute_the_same_rows_sample_once(mesh: str) -> None:
    found = run_ranks(sampled, {**LAYOUTS, "context": {"context_parallel_shard": 2}}[mesh], world_size=2)
    (first, second, message), (other_first, other_second, _) = found
    assert torch.equal(first, other_first)
    assert torch.equal(second, other_second)
    assert first.shape != second.shape or not torch.equal(first, second)
    assert message.startswith("input_ids, prompt_mask or row_seeds of generate() differ between ranks that compute the")


@pytest.mark.parametrize(
    "mesh", [{"pipeline_parallel": 2}, {"context_parallel_shard": 2}, {"tensor_parallel": 2}], ids=str
)
@pytest.mark.full
def test_ranks_that_share_parameters_generate_until_the_last_row_has_ended(mesh: dict[str, int]) -> None:
    prompts = torch.tensor([[1, 2], [3, 4]])
    first, second = (run_ranks(generated_to_a_stop, {}, row[None], [], world_size=1)[0] for row in prompts)
    stop = next(token for token in first[2:] if token not in second)
    expected = [first[: first.index(stop, 2) + 1], second]
    assert len(expected[0]) < len(second)
    found = run_ranks(generated_to_a_stop, {**mesh, "data_parallel_shard": 2}, prompts, [stop], world_size=4)
    assert {tuple(each) for each in found} == set(map(tuple, expected))


def _no_buffer_is_restored() -> AbstractContextManager[object]:
    return mock.patch.object(BufferValues, "restore")


def _counters_survive_a_load() -> AbstractContextManager[object]:
    return mock.patch.object(TrainStep, "reset_buffers")


def _learning_rates_survive_a_load() -> AbstractContextManager[object]:
    return mock.patch.object(JobState, "_reset_groups")


STATE_MUTANTS: dict[Callable[[], AbstractContextManager[object]], set[str]] = {
    _no_buffer_is_restored: {"buffers after a skipped step", "scores of the reference", "counters after load()"},
    _counters_survive_a_load: {"counters after load()"},
    _learning_rates_survive_a_load: {"rates after load()"},
}


@pytest.mark.parametrize("bug", STATE_MUTANTS, ids=lambda bug: bug.__name__)
@pytest.mark.full
def test_a_deliberate_bug_of_the_state_is_caught(
    bug: Callable[[], AbstractContextManager[object]], tmp_path: Path
) -> None:
    (found,) = run_ranks(with_bug, bug, problems, {}, tmp_path, world_size=1)
    assert STATE_MUTANTS[bug] & set(found), found


def _a_mask_is_dropped() -> AbstractContextManager[object]:
    return mock.patch.object(NextTokenTask, "token_mask", return_value=None)


def _stand_ins_are_counted() -> AbstractContextManager[object]:
    real = Pipeline.inputs_of

    def counting(self: Pipeline, task: Any, batch: Any, *, is_stand_in: bool = False) -> Any:
        return real(self, task, batch)

    return mock.patch.object(Pipeline, "inputs_of", counting)


@pytest.mark.parametrize("bug", [_a_mask_is_dropped, _stand_ins_are_counted], ids=lambda bug: bug.__name__)
@pytest.mark.full
def test_a_deliberate_bug_of_the_masks_is_caught(bug: Callable[[], AbstractContextManager[object]]) -> None:
    found = run_ranks(with_bug, bug, tokens_per_expert, LAYOUTS["sharded"], SPLITS["sharded"], 8, world_size=2)
    assert any(each.sum() != 2 * 27 for _, counts in found for each in counts.values())
