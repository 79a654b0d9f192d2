"""State of event subscribers over saves, resumes and rollbacks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import MeshConfig, UserError
from d9d_dist.testing import run_ranks
from d9d_loop import EvaluationDone, Events, Loss, StepDone, StepStarted, Task, Trainer, TrainerConfig, on_event
from d9d_loop.engine.job_state import JobState, Record
from d9d_state import CheckpointStore


class Average:
    """Subscriber with a tensor and a number: an average of the losses, and the count of its updates."""

    def __init__(self) -> None:
        self.average, self.count = torch.zeros(2, dtype=torch.bfloat16), 0

    @on_event(StepDone)
    def update(self, event: StepDone) -> None:
        self.average = 0.75 * self.average + event.loss.item()
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, self.count = state["average"], state["count"]


class Other(Average):
    """Subscriber of another class, whose name comes second."""


class Fit(Task):
    def inputs(self, batch: Any) -> Any:
        return {"input": batch["x"]}

    def loss(self, outputs: Tensor, batch: Any) -> Loss:
        return Loss.sum((outputs - batch["x"].sum(1, keepdim=True)).square(), len(outputs))


class Evaluations(Average):
    """Subscriber that counts evaluations, and fails in one of them."""

    def __init__(self, fail_in: int | None = None) -> None:
        super().__init__()
        self.fail_in = fail_in

    @on_event(EvaluationDone)
    def evaluate(self, event: EvaluationDone) -> None:
        if event.step == self.fail_in:
            raise KeyboardInterrupt
        self.count += 10


def _train(folder: Path, *subscribers: object, stop_in: int | None = None, evaluate: bool = False) -> None:
    config = TrainerConfig.model_validate(
        {
            "steps": 5,
            "batch": {"global_size": 2},
            "checkpoint": {"every": 2},
            **({"evaluation": {"every": 2}} if evaluate else {}),
            "run": {"folder": folder},
            "export": False,
            "trackers": (),
            "rehearsal": False,
        }
    )
    data = [{"x": torch.full((3,), float(i))} for i in range(10)]
    held_out = data[:2] if evaluate else None
    trainer = Trainer(config, model=lambda _: nn.Linear(3, 1), data=data, task=Fit(), evaluation_data=held_out)
    trainer.events.subscribe(*subscribers)

    def stop(event: StepStarted) -> None:
        if event.step == stop_in:
            raise KeyboardInterrupt

    trainer.events.on(StepStarted, stop)
    trainer.train()


def test_a_resumed_subscriber_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = [Average(), Average(), Other()]
    _train(tmp_path / "whole", *whole)
    with pytest.raises(KeyboardInterrupt):
        _train(tmp_path / "resumed", Average(), Average(), Other(), stop_in=4)
    resumed = [Average(), Average(), Other()]
    _train(tmp_path / "resumed", *resumed)
    for found, expected in zip(resumed, whole, strict=True):
        assert (found.count, found.average.dtype) == (5, torch.bfloat16)
        assert torch.equal(found.average, expected.average)


@pytest.mark.parametrize(("fail_in", "stop_in"), [(2, None), (None, 3), (5, None)])
def test_an_evaluation_after_the_save_of_its_step_changes_the_saved_state_once(
    tmp_path: Path, fail_in: int | None, stop_in: int | None
) -> None:
    with pytest.raises(KeyboardInterrupt):
        _train(tmp_path, Evaluations(fail_in), stop_in=stop_in, evaluate=True)
    resumed = Evaluations()
    _train(tmp_path, resumed, evaluate=True)
    assert resumed.count == 5 + 3 * 10


class _Unsaveable(Average):
    def state_dict(self) -> dict[str, Any]:
        return {"count": {1, 2}}


def test_a_state_that_cannot_be_saved_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    subscriber = _Unsaveable()
    with pytest.raises(UserError, match=r"subscriber _Unsaveable returned a state that cannot be saved: .*set"):
        _train(tmp_path, subscriber)
    assert subscriber.count == 0


def _resume(folder: Path, values: list[int], mesh: MeshConfig) -> int:
    with mesh.build() as ctx:
        subscriber, events, model = Average(), Events(), nn.Linear(2, 1)
        events.subscribe(subscriber)
        state = JobState(
            CheckpointStore(folder),
            model=model,
            optimizer=torch.optim.SGD(model.parameters()),
            metrics={},
            config={},
            parts={},
            data_identity={},
            seed=0,
            ctx=ctx,
            events=events,
        )
        if not values:
            state.restore()
            return subscriber.count
        subscriber.count = values[ctx.rank]
        state.save(Record(1))
        return subscriber.count


def test_each_rank_loads_its_own_state_and_other_meshes_only_equal_ones(tmp_path: Path) -> None:
    mesh = MeshConfig(data_parallel_replicate=-1)
    run_ranks(_resume, tmp_path / "own", [3, 4], mesh, world_size=2)
    assert run_ranks(_resume, tmp_path / "own", [], mesh, world_size=2) == [3, 4]
    with pytest.raises(Exception, match="state of the subscriber Average differed between the ranks that saved it"):
        run_ranks(_resume, tmp_path / "own", [], mesh, world_size=1)
    run_ranks(_resume, tmp_path / "equal", [5, 5], mesh, world_size=2)
    assert run_ranks(_resume, tmp_path / "equal", [], mesh, world_size=1) == [5]
