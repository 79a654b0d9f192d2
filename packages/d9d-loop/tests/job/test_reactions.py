"""Early stopping and plateaus of a job, beside `transformers` and torch, and ends by handlers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from d9d_dist import UserError
from d9d_dist.testing import run_ranks
from d9d_loop import EvaluationDone, Finished, Loss, StepDone, Task, Trainer, TrainerConfig, validate_config
from d9d_loop.engine.job_state import Record
from d9d_loop.job.reactions import react
from d9d_state import CheckpointStore

VALUES = [3.0, 2.0, 2.5, 1.995, 2.1, math.nan, 2.2, 1.0, 1.2, 1.1, 0.999, 1.3, 1.2, 1.4, 5.0, 1.1]


class _Fit(Task):
    def inputs(self, batch: torch.Tensor) -> dict[str, Any]:
        return {"input": batch}

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        return Loss.sum(outputs.square(), len(outputs))


def _trainer(folder: Path, **more: Any) -> Trainer:
    values = {
        "steps": 8,
        "batch": {"global_size": 2},
        "run": {"folder": folder},
        "mesh": {"data_parallel_shard": -1},
        "evaluation": {"every": 1},
        "checkpoint": {"every": 3},
        "logging": {"progress": False, "report": False},
        "optimizer": {"kind": "sgd", "learning_rate": 0.01},
        "lr_schedule": {"final_fraction": 1.0},
        "resilience": {"health": {"memory_mib": 1, "message_mib": 1, "matrix_size": 32}},
    }
    data = [torch.full((3,), n / 8) for n in range(8)]
    return Trainer(
        validate_config(TrainerConfig, {**values, **more}),
        model=lambda: nn.Linear(3, 1),
        data=data,
        evaluation_data=data,
        task=_Fit(),
    )


def _records(higher: bool, **sections: Any) -> tuple[list[tuple[float, int]], list[str | None]]:
    """Return the factor of the learning rate and the evaluations that wait, after each value; and why the job ends."""
    sections = {key: {"higher_is_better": higher, **section} for key, section in sections.items()}
    config = validate_config(TrainerConfig, {"steps": 1, "batch": {"global_size": 1}, **sections})
    record, records, ends = Record(), [], []
    for value in VALUES:
        record.evaluation = {"loss": -value if higher else value}
        ends.append(react(record, config))
        records.append((record.rate_factor, record.early_stopping.waited))
    return records, ends


@pytest.mark.parametrize("higher", [False, True])
@pytest.mark.parametrize(("patience", "cooldown", "min_delta"), [(0, 0, 0.0), (1, 2, 0.01), (2, 0, 0.5)])
def test_learning_rates_on_a_plateau_equal_those_of_torch(
    higher: bool, patience: int, cooldown: int, min_delta: float
) -> None:
    options: dict[str, Any] = {"patience": patience, "cooldown": cooldown, "factor": 0.5}
    found, _ = _records(higher, plateau={**options, "min_delta": min_delta, "min_factor": 0.05})
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    mode: Any = "max" if higher else "min"
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode, threshold=min_delta, threshold_mode="abs", min_lr=0.05, eps=0.0, **options
    )
    expected = []
    for value in VALUES:
        schedule.step(-value if higher else value)
        expected.append(optimizer.param_groups[0]["lr"])
    assert [rate for rate, _ in found] == expected
    assert expected[-1] < 1


@pytest.mark.parametrize(("higher", "patience"), [(False, 2), (True, 3)])
def test_early_stopping_equals_that_of_transformers(higher: bool, patience: int) -> None:
    import transformers

    found, ends = _records(higher, early_stopping={"patience": patience})
    theirs = transformers.EarlyStoppingCallback(patience)
    args: Any = transformers.TrainingArguments(
        metric_for_best_model="loss", greater_is_better=higher, eval_strategy="steps", use_cpu=True
    )
    state, counts, stops = transformers.TrainerState(), [], []
    for value in VALUES:
        control = transformers.TrainerControl()
        metric = -value if higher else value
        theirs.on_evaluate(args, state, control, metrics={"eval_loss": metric})
        counts.append(theirs.early_stopping_patience_counter)
        stops.append(control.should_training_stop)
        if state.best_metric is None or (metric > state.best_metric if higher else metric < state.best_metric):
            state.best_metric = metric  # as the Trainer does after its callbacks
    assert [waited for _, waited in found] == counts
    assert [each is not None for each in ends] == stops
    assert any(stops)


def test_a_job_ends_early_and_is_complete(tmp_path: Path) -> None:
    stopping = {"patience": 2, "higher_is_better": True}  # the loss falls
    trainer = _trainer(tmp_path, early_stopping=stopping, export="best", checkpoint={"every": 2, "keep_best": 1})
    result = trainer.train()
    assert result.steps == 3
    assert result.export_dir is not None
    assert [info.step for info in CheckpointStore(tmp_path / "run" / "checkpoints").complete()] == [3, 2]
    steps: list[int] = []
    again = _trainer(tmp_path, early_stopping=stopping)
    again.events.on(StepDone, lambda done: steps.append(done.step))
    assert again.train().steps == 3
    assert not steps
    more = _trainer(tmp_path, early_stopping={**stopping, "patience": 4}, steps=10)
    more.events.on(StepDone, lambda done: steps.append(done.step))
    assert more.train().steps == 5
    assert steps == [4, 5]


def _end(folder: Path, kind: str) -> None:
    """End a job at step 4 by a handler of the last rank."""
    trainer, rates = _trainer(folder, plateau={"patience": 0, "higher_is_better": True, "factor": 0.5}), []

    def end(event: Any) -> None:
        if event.step == 4 and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            event.finish()

    trainer.events.on(EvaluationDone if kind == "evaluation" else StepDone, end)
    trainer.events.on(StepDone, lambda done: rates.append(done.learning_rate))
    finished: list[int] = []
    trainer.events.on(Finished, lambda done: finished.append(done.step))
    steps = trainer.train().steps
    assert finished == [steps]
    assert steps == (4 if kind == "evaluation" else 5)
    assert rates[:4] == [0.01, 0.01, 0.005, 0.0025]


def test_a_handler_of_one_rank_ends_the_job(tmp_path: Path) -> None:
    for kind in ("evaluation", "step"):
        run_ranks(_end, tmp_path / kind, kind, world_size=2)
        assert CheckpointStore(tmp_path / kind / "run" / "checkpoints").complete()[0].step == 4 + (kind == "step")
        assert (tmp_path / kind / "run" / "export").is_dir()


def test_a_plateau_resumes_with_its_state(tmp_path: Path) -> None:
    options = {"plateau": {"patience": 1, "higher_is_better": True, "factor": 0.5}, "checkpoint": {"every": 1}}
    rates: dict[str, list[float]] = {"whole": [], "parts": []}
    for name, steps in (("whole", [8]), ("parts", [3, 8])):
        for last in steps:
            trainer = _trainer(tmp_path / name, steps=last, **options)
            trainer.events.on(StepDone, lambda done, name=name: rates[name].append(done.learning_rate))
            trainer.train()
    assert rates["parts"] == rates["whole"]
    assert len(set(rates["whole"])) == 4


@pytest.mark.parametrize("key", ["early_stopping", "plateau"])
def test_an_unknown_value_is_an_error(key: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{key}.by = 'accuracy', but evaluations measure loss; expected the name of"):
        _trainer(tmp_path, **{key: {"by": "accuracy"}}).train()
