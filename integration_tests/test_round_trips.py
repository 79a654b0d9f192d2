"""Number of collectives of a step and of a save: each costs at least the latency of the slowest link between hosts."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_dist.testing import run_ranks
from d9d_loop import CheckpointSaved, CheckpointStarted, Loss, StepDone, Task, Trainer, TrainerConfig
from d9d_loop.events import Event

COUNTED_STEP, SAVED_STEP = 4, 5


class _Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class _Regression(Task):
    def inputs(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"input": batch["x"]}

    def loss(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> Loss:
        return Loss(F.mse_loss(outputs, batch["y"], reduction="sum"), weight=batch["y"].numel())


def _count(folder: Path, mesh: dict[str, int]) -> tuple[Counter[str], Counter[str]]:
    """Return the collectives of a step and of a save on this rank."""
    config = {
        "steps": SAVED_STEP + 1,
        "batch": {"global_size": 4},
        "mesh": mesh,
        "run": {"folder": folder},
        "checkpoint": {"every": SAVED_STEP, "background": False},
        "logging": {"every": 100},
        "resilience": {"health": {"enabled": False}},
        "export": False,
    }
    samples = [{"x": torch.full((8,), 0.1 * index), "y": torch.ones(1)} for index in range(8)]
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 1))
    trainer = Trainer(TrainerConfig.model_validate(config), model=model, data=samples, task=_Regression())
    step, save = _Collectives(), _Collectives()

    def on_event(event: Event) -> None:
        match event:
            case StepDone(step=number) if number == COUNTED_STEP - 1:
                step.__enter__()
            case StepDone(step=number) if number == COUNTED_STEP:
                step.__exit__(None, None, None)
            case CheckpointStarted(step=number) if number == SAVED_STEP:
                save.__enter__()
            case CheckpointSaved(step=number) if number == SAVED_STEP:
                save.__exit__(None, None, None)

    for kind in (StepDone, CheckpointStarted, CheckpointSaved):
        trainer.events.on(kind, on_event)
    trainer.train()
    return step.counts, save.counts


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        # Gradients; which parameters were used; loss and weight; the decision on a bad step; stop signals.
        ({"data_parallel_replicate": 2, "data_parallel_shard": 1}, {"allreduce_": 5}),
        # Besides, a gather of the weights in forward and backward; the gradient norm is an all-reduce, too.
        ({"data_parallel_shard": 2}, {"_allgather_base_": 2, "_reduce_scatter_base_": 1, "allreduce_": 5}),
    ],
    ids=["replicate", "shard"],
)
def test_a_step_and_a_save_have_no_more_collectives_than_they_need(
    mesh: dict[str, int], expected: dict[str, int], tmp_path: Path
) -> None:
    for step, save in run_ranks(_count, tmp_path, mesh):
        assert step == expected
        assert save.total() <= 15, save
