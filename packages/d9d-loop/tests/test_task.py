from collections.abc import Mapping
from typing import Any

import pytest
import torch

from d9d_dist import ContextSplit, DistributedContext, MeshConfig, UserError
from d9d_dist.testing import run_ranks
from d9d_loop import Loss, Task
from d9d_loop.task import BatchPlacement, to_device, to_inputs
from d9d_pipeline import Inputs


class _Plain(Task):
    def inputs(self, batch: Any) -> Mapping[str, Any]:
        return {"x": batch}

    def loss(self, outputs: Any, batch: Any) -> Loss:
        return Loss(outputs.sum(), weight=1)


def test_a_task_needs_only_inputs_and_a_loss() -> None:
    task = _Plain()
    assert task.metrics() == {}
    assert task.weight_unit == "items"
    task.update_metrics({}, outputs=None, batch=None, loss=Loss(torch.zeros(()), 1))


def test_a_mapping_is_passed_as_keyword_arguments() -> None:
    inputs = to_inputs(_Plain().inputs(3))
    assert (inputs.first, inputs.shared) == ((), {"x": 3})


def test_inputs_objects_are_returned_unchanged() -> None:
    inputs = Inputs(1, y=2)
    assert to_inputs(inputs) is inputs


@pytest.mark.parametrize("weight", [True, torch.tensor(True)])
def test_a_truth_value_is_no_weight(weight: Any) -> None:
    with pytest.raises(UserError, match=r"got weight = (True|a bool tensor) of a Loss; expected the number of the sum"):
        Loss(torch.ones(()), weight)


class _Split(_Plain):
    def split_sequence(self, batch: dict[str, torch.Tensor], split: ContextSplit) -> dict[str, torch.Tensor]:
        return {**split.split(batch), "position_ids": split.positions(batch["ids"].shape[1])}


def _batch() -> dict[str, torch.Tensor]:
    return {"ids": torch.arange(100, 108).unsqueeze(0)}


def test_a_single_rank_gets_the_batch_unchanged(ctx: DistributedContext) -> None:
    batch = _batch()
    assert BatchPlacement(_Plain(), ctx)(batch) is batch


def _placed() -> dict[str, list[int]]:
    with MeshConfig(context_parallel_shard=-1).build() as ctx:
        placed = BatchPlacement(_Split(), ctx)(_batch())
        with pytest.raises(UserError, match=r"_Plain cannot split a batch for context parallelism"):
            BatchPlacement(_Plain(), ctx)(_batch())
        return {name: tensor[0].tolist() for name, tensor in placed.items()}


def test_the_task_splits_the_batch_for_context_parallel_ranks() -> None:
    first, second = run_ranks(_placed)
    assert first == {"ids": [100, 101, 106, 107], "position_ids": [0, 1, 6, 7]}
    assert second == {"ids": [102, 103, 104, 105], "position_ids": [2, 3, 4, 5]}


def test_tensors_of_a_pytree_are_moved_to_a_device() -> None:
    batch = {"x": torch.ones(2), "rest": [torch.zeros(1), "name", 3]}
    moved = to_device(batch, torch.device("meta"))
    assert (moved["x"].device.type, moved["rest"][0].device.type) == ("meta", "meta")
    assert moved["rest"][1:] == ["name", 3]


def test_moving_a_batch_on_the_cpu_to_the_cpu_returns_it() -> None:
    batch = {"x": torch.ones(2)}
    assert to_device(batch, torch.device("cpu")) is batch
