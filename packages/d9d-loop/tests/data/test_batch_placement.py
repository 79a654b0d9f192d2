import pytest
import torch

from d9d_dist import ContextSplit, DistributedContext, MeshConfig, UserError
from d9d_dist.testing import run_ranks
from d9d_loop import Loss, Task
from d9d_loop.data.batch_placement import BatchPlacement, to_device

Batch = dict[str, torch.Tensor]


class _Whole(Task):
    def inputs(self, batch: Batch) -> Batch:
        return batch

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        return Loss(outputs.sum(), weight=1)


class _Split(_Whole):
    def split_sequence(self, batch: Batch, split: ContextSplit) -> Batch:
        return {**split.split(batch), "position_ids": split.positions(batch["ids"].shape[1])}


def _batch() -> Batch:
    return {"ids": torch.arange(100, 108).unsqueeze(0)}


def test_a_single_rank_gets_the_batch_unchanged(ctx: DistributedContext) -> None:
    batch = _batch()
    assert BatchPlacement(_Whole(), ctx)(batch) is batch


def _placed() -> dict[str, list[int]]:
    with MeshConfig(context_parallel_shard=-1).build() as ctx:
        placed = BatchPlacement(_Split(), ctx)(_batch())
        with pytest.raises(UserError, match=r"_Whole cannot split a batch for context parallelism"):
            BatchPlacement(_Whole(), ctx)(_batch())
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
