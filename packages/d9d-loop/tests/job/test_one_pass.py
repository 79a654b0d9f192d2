"""Passes over finite data: the steps of a plain loop, with a smaller last step in each epoch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import UserError, read_launch
from d9d_dist.testing import full_parameters, run_ranks
from d9d_loop import Finished, Loss, StepDone, Task, Trainer, TrainerConfig
from d9d_loop.data import DatasetProvider, IndexedStream

Batch = dict[str, Tensor]
NUM_SAMPLES, GLOBAL_SIZE = 11, 4
RATE = 0.1


class _Squares(Task):
    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        return {"input": batch["x"]}

    def loss(self, outputs: Tensor, batch: Batch) -> Loss:
        return Loss((outputs - batch["y"]).square().sum(), weight=len(outputs))


def _data() -> list[Batch]:
    draws = torch.Generator().manual_seed(0)
    return [
        {name: torch.randn(size, generator=draws, dtype=torch.float64) for name, size in (("x", 3), ("y", 2))}
        for _ in range(NUM_SAMPLES)
    ]


def _model(_stage: Any) -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 2).double()


def _config(folder: str, **settings: Any) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "batch": {"global_size": GLOBAL_SIZE, "microbatch_size": 1},
            "run": {"folder": folder},
            "data": {"shuffle": False},
            "optimizer": {"kind": "sgd", "learning_rate": RATE},
            "logging": {"progress": False},
            "export": False,
            "resilience": {"health": {"enabled": False}},
            **settings,
        }
    )


def _train(folder: str, degree: int) -> tuple[int, dict[str, Tensor]]:
    trained: dict[str, Tensor] = {}
    config = _config(folder, epochs=2, mesh={"data_parallel_shard": degree})
    trainer = Trainer(config, model=_model, data=_data(), task=_Squares(), lr_schedule=lambda step: 1.0)
    trainer.events.on(Finished, lambda event: trained.update(full_parameters(event.model)))
    return trainer.train().steps, trained


@pytest.mark.parametrize("degree", [1, 2])
def test_two_epochs_have_the_steps_of_a_plain_loop(tmp_path: Path, degree: int) -> None:
    model, data = _model(None), _data()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for start in [*range(0, NUM_SAMPLES, GLOBAL_SIZE)] * 2:
        rows = data[start : start + GLOBAL_SIZE]
        x, y = (torch.stack([row[name] for row in rows]) for name in ("x", "y"))
        optimizer.zero_grad()
        ((model(x) - y).square().sum() / len(rows)).backward()
        optimizer.step()
    for steps, trained in run_ranks(_train, str(tmp_path), degree, world_size=degree):
        assert steps == 6
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(trained[name], parameter.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "data", "message"),
    [
        ({}, _data(), "steps is missing, and the training data have no end"),
        ({"steps": 4, "epochs": 1}, _data(), "steps = 4, but the finite training data have samples for 3 steps"),
        ({"epochs": 1}, DatasetProvider(_data()), "epochs = 1, but the data are a DatasetProvider"),
    ],
)
def test_wrong_lengths_are_refused(tmp_path: Path, settings: dict[str, Any], data: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Trainer(_config(str(tmp_path), **settings), model=_model, data=data, task=_Squares()).train()


def test_a_stream_counts_its_samples() -> None:
    assert IndexedStream(_data(), seed=0, epochs=2).count() == 2 * NUM_SAMPLES


def test_a_provider_of_the_configured_epochs_is_accepted(tmp_path: Path) -> None:
    data = DatasetProvider(_data(), epochs=2)
    trainer = Trainer(_config(str(tmp_path), epochs=2), model=_model, data=data, task=_Squares())
    assert trainer.plan_for(read_launch()).steps == 6


class _Numbered(_Squares):
    def __init__(self) -> None:
        self.read: list[int] = []

    def loss(self, outputs: Tensor, batch: Batch) -> Loss:
        self.read += batch["number"].tolist()
        return super().loss(outputs, batch)


class _Cut(Exception):  # noqa: N818 - not an error of the job
    pass


def _resumed(folder: str, size: int, *, cut: int | None = None, **settings: Any) -> tuple[int, list[int]]:
    """Run or resume a job with a global batch of `size`; return its steps and the samples it read."""
    task, rows = _Numbered(), [{**row, "number": torch.tensor(number)} for number, row in enumerate(_data())]
    batch = {"global_size": size, "microbatch_size": 1}
    values = {"batch": batch, "checkpoint": {"every": 1, "background": False}, "rehearsal": False, **settings}
    trainer = Trainer(_config(folder, **values), model=_model, data=rows, task=task)

    def stop(event: StepDone) -> None:
        if event.step == cut:  # the newest checkpoint is that of the step before it
            raise _Cut

    trainer.events.on(StepDone, stop)
    if cut is None:
        return trainer.train().steps, task.read
    with pytest.raises(_Cut):
        trainer.train()
    return cut - 1, task.read[: (cut - 1) * size]


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 8, 11, 30])
@pytest.mark.sample("2-1", "8-2", "30-1")
def test_a_resume_with_another_global_batch_reads_each_remaining_sample_once(
    tmp_path: Path, size: int, epochs: int
) -> None:
    _, before = _resumed(str(tmp_path), 4, cut=3, epochs=epochs)
    steps, after = _resumed(str(tmp_path), size, epochs=epochs)
    assert steps == 2 + -(-3 // size) + (epochs - 1) * -(-NUM_SAMPLES // size)  # no batch has samples of two epochs
    assert before + after == epochs * list(range(NUM_SAMPLES))


def test_messages_about_too_few_samples_after_a_resume_agree(tmp_path: Path) -> None:
    _resumed(str(tmp_path), 4, cut=3, epochs=2)
    with pytest.raises(
        UserError, match=r"steps = 6, .* for 5 steps: the 2 completed steps and 3 of batch.global_size = 8"
    ):
        _resumed(str(tmp_path), 8, epochs=2, steps=6)
    with pytest.raises(
        UserError, match=r"steps = 1, but the run in .* has already completed 2\. Use --steps 2 or more"
    ):
        _resumed(str(tmp_path), 8, epochs=2, steps=1)
    assert _resumed(str(tmp_path), 8, epochs=2, steps=2) == (2, [])
    _, read = _resumed(str(tmp_path), 8, epochs=2, steps=4)
    assert len(read) == 3 + 8
    with pytest.raises(
        UserError, match=r"epochs = 1 has 11 samples, but the run in .* has already read 19; .* Use more"
    ):
        _resumed(str(tmp_path), 8, epochs=1)


def test_data_that_end_before_their_count_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IndexedStream, "num_batches", lambda _self, _size, _state=None: 25)
    trainer = Trainer(_config(str(tmp_path), epochs=1), model=_model, data=_data(), task=_Squares())
    with pytest.raises(
        UserError, match=r"data ended after 11 samples and 3 of 25 steps; .* IndexedStream.num_batches\(\) r"
    ):
        trainer.train()
