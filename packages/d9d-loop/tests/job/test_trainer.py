import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from d9d_dist import (
    ColumnParallel,
    DistributedContext,
    RowParallel,
    StageInfo,
    UserError,
    parallelize_fsdp,
    parallelize_tensor,
)
from d9d_dist.testing import run_ranks
from d9d_loop import (
    BadStepFound,
    CheckpointSaved,
    ConfigReady,
    DataReady,
    EvaluationDone,
    Failed,
    Finished,
    Loss,
    ModelExported,
    ModelProvider,
    ModelReady,
    StateOffloaded,
    StateOnloaded,
    StepDone,
    StepStarted,
    Task,
    Trainer,
    TrainerConfig,
    TrainResult,
    validate_config,
)
from d9d_loop.events import Event
from d9d_loop.resilience import ExitCode, Stopped, launcher_watch
from d9d_loop.resilience.bad_steps import BadStepError
from d9d_loop.resilience.launcher_watch import LAUNCHER
from d9d_metrics import Metric, Sum, read_metrics
from d9d_state import (
    CheckpointStore,
    ModelFolder,
    StateMapper,
    identity,
    keep,
    load_model_state,
    narrow,
    parallel,
    rename,
    save_model_state,
)

Samples = list[dict[str, torch.Tensor]]
Batch = dict[str, torch.Tensor]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4, dtype=torch.float64), nn.Linear(4, 1, dtype=torch.float64)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(F.relu(self.up(x))))


class _Regression(Task):
    weight_unit = "samples"

    def inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"x": batch["x"]}

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        return Loss(F.mse_loss(outputs, batch["y"], reduction="sum"), weight=len(batch["x"]))

    def metrics(self) -> dict[str, Metric]:
        return {"samples": Sum()}

    def update_metrics(self, metrics: Mapping[str, Metric], *, outputs: Any, batch: Any, loss: Loss) -> None:
        samples = metrics["samples"]
        assert isinstance(samples, Sum)
        samples.update(len(batch["x"]))


class _Provider(ModelProvider):
    """A model whose weights have other names on disk."""

    def build(self, stage: StageInfo) -> nn.Module:
        return _Net()

    def state_mapper(self, model: nn.Module) -> StateMapper:
        return parallel(*(rename(f"model.{name}", name) for name, _ in model.named_parameters()))

    def export_files(self) -> dict[str, Any]:
        return {"config.json": {"hidden": 4}}


def _data(size: int = 20, seed: int = 0) -> Samples:
    x = torch.randn(size, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return [{"x": row, "y": row.sum(0, keepdim=True)} for row in x]


def _config(folder: Path, **sections: Any) -> TrainerConfig:
    values = {
        "steps": 6,
        "batch": {"global_size": 8, "microbatch_size": 4},
        "run": {"folder": folder},
        "checkpoint": {"every": 3},
        "logging": {"every": 4, "progress": False},
        "resilience": {"health": {"memory_mib": 1, "message_mib": 1, "matrix_size": 32}},  # takes milliseconds
        "optimizer": {"learning_rate": 0.01},
    }
    return validate_config(TrainerConfig, {**values, **sections})


def _trainer(folder: Path, *, evaluate: bool = False, **sections: Any) -> Trainer:
    every = {"evaluation": {"every": 2}} if evaluate else {}
    return Trainer(
        _config(folder, **{**every, **sections}),
        model=lambda stage: _Net(),
        data=_data(),
        task=_Regression(),
        evaluation_data=_data(5, seed=1) if evaluate else None,
    )


def _weights(trainer: Trainer) -> tuple[TrainResult, dict[str, torch.Tensor]]:
    """Train; return the result and the trained weights."""
    found: dict[str, torch.Tensor] = {}
    trainer.events.on(Finished, lambda done: found.update(done.model.state_dict()))
    result = trainer.train()
    return result, {name: tensor.clone() for name, tensor in found.items()}


def _assert_same_bits(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_a_run_writes_all_its_files(tmp_path: Path) -> None:
    result, weights = _weights(_trainer(tmp_path, evaluate=True))
    run = tmp_path / "run"
    assert (result.steps, result.run_dir, result.export_dir) == (6, run, run / "export")
    files = [
        "checkpoints",
        "config.json",
        "environment.json",
        "export",
        "journal.jsonl",
        "metrics.jsonl",
        "report.html",
        "status.json",
    ]
    assert sorted(path.name for path in run.iterdir()) == files
    assert [info.step for info in CheckpointStore(run / "checkpoints").complete()] == [6, 3]
    assert TrainerConfig.from_cli(run / "config.json", []) == _config(tmp_path, evaluation={"every": 2})
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 4, 6]
    assert [line["samples"] for line in lines if "loss" in line] == [8, 24, 16]
    assert [line["step"] for line in lines if "evaluation_loss" in line] == [2, 4, 6]
    assert lines[-1]["evaluation_loss"] == result.evaluation["loss"]
    assert result.evaluation["samples"] == 5
    assert result.train_loss == lines[-2]["loss"]
    assert result.weight_per_second > 0
    exported = _Net()
    load_model_state(exported, run / "export")
    _assert_same_bits(exported.state_dict(), weights)
    assert not dist.is_initialized()


def test_training_learns(tmp_path: Path) -> None:
    # Four units with dropout: whether 60 steps are enough depends on the initial values.
    settings: dict[str, Any] = {"evaluate": True, "seed": 1, "optimizer": {"learning_rate": 0.05}}
    trainer = _trainer(tmp_path, steps=60, evaluation={"every": 59}, **settings)
    losses: list[float] = []
    trainer.events.on(EvaluationDone, lambda event: losses.append(event.values["loss"]))
    start = _trainer(tmp_path / "other", steps=1, **settings).train().evaluation["loss"]
    trainer.train()
    assert losses[-1] < 0.3 * start


def test_equal_jobs_give_bitwise_equal_weights_and_another_seed_does_not(tmp_path: Path) -> None:
    runs = [_weights(_trainer(tmp_path / name, seed=seed))[1] for name, seed in [("a", 0), ("b", 0), ("c", 1)]]
    _assert_same_bits(runs[0], runs[1])
    assert not torch.equal(runs[0]["up.weight"], runs[2]["up.weight"])


def test_the_seed_chooses_the_initial_weights(tmp_path: Path) -> None:
    still = {"learning_rate": 1e-300, "weight_decay": 0}
    starts = [_weights(_trainer(tmp_path / str(seed), seed=seed, optimizer=still))[1] for seed in (0, 1)]
    assert not torch.equal(starts[0]["up.weight"], starts[1]["up.weight"])


def test_a_job_trains_on_the_samples_in_the_global_order(tmp_path: Path) -> None:
    seen: list[int] = []

    class Numbered(_Regression):
        def inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
            seen.extend(batch["number"].tolist())
            return super().inputs(batch)

    data = [{**sample, "number": torch.tensor(index)} for index, sample in enumerate(_data())]
    config = _config(tmp_path, steps=5)
    Trainer(config, model=lambda stage: _Net(), data=data, task=Numbered()).train()
    assert sorted(seen[:20]) == sorted(seen[20:]) == list(range(20))
    assert seen[:20] != seen[20:]


def test_evaluations_do_not_change_the_trained_weights(tmp_path: Path) -> None:
    with_evaluation, without = (_weights(_trainer(tmp_path / str(on), evaluate=on))[1] for on in (True, False))
    _assert_same_bits(with_evaluation, without)


@pytest.mark.parametrize("background", [False, True])
def test_events_are_emitted_in_order(tmp_path: Path, background: bool) -> None:
    trainer, seen = _trainer(tmp_path, evaluate=True, steps=4, checkpoint={"every": 3, "background": background}), []
    for kind in (StepDone, EvaluationDone, CheckpointSaved):
        trainer.events.on(kind, lambda event, name=kind.__name__: seen.append((name, event.step)))
    trainer.events.on(ModelExported, lambda event: seen.append(("ModelExported", event.folder.name)))
    trainer.events.on(Finished, lambda event: seen.append(("Finished", event.result.steps)))
    trainer.train()
    assert seen == [
        ("StepDone", 1),
        ("StepDone", 2),
        ("EvaluationDone", 2),
        ("StepDone", 3),
        *([] if background else [("CheckpointSaved", 3)]),
        ("StepDone", 4),
        *([("CheckpointSaved", 3)] if background else []),
        ("CheckpointSaved", 4),
        ("EvaluationDone", 4),
        ("ModelExported", "export"),
        ("Finished", 4),
    ]


def test_a_job_emits_each_of_its_events(tmp_path: Path) -> None:
    checkpoint = {"every": 1, "background": False}
    trainer = _trainer(tmp_path, evaluate=True, steps=1, checkpoint=checkpoint)
    seen: list[tuple[str, int]] = []
    for kind in Event.__subclasses__():
        trainer.events.on(kind, lambda event: seen.append((type(event).__name__, event.step)))
    trainer.train()
    assert seen == [
        *[("ConfigReady", 0), ("ModelReady", 0), ("OptimizerReady", 0), ("DataReady", 0)],
        *[("StepStarted", 1), ("BackwardDone", 1), ("GradientsReady", 1), ("OptimizerDone", 1), ("StepDone", 1)],
        *[("CheckpointStarted", 1), ("CheckpointSaved", 1), ("EvaluationStarted", 1), ("EvaluationDone", 1)],
        *[("ModelExported", 1), ("Finished", 1)],
    ]


def test_a_failure_emits_an_event(tmp_path: Path) -> None:
    trainer, seen = _trainer(tmp_path, steps=3), []

    def stop(event: StepDone) -> None:
        if event.step == 2:
            raise KeyboardInterrupt

    def fail(_event: Failed) -> None:
        raise ValueError("a second one")

    trainer.events.on(StepDone, stop)
    trainer.events.on(Failed, lambda failed: seen.append((failed.step, type(failed.error))))
    trainer.events.on(Failed, fail)
    with pytest.raises(KeyboardInterrupt) as error:
        trainer.train()
    assert seen == [(2, KeyboardInterrupt)]
    assert "a second one" in error.value.__notes__[-1]


def test_offloading_at_every_step_keeps_the_losses_bitwise_equal(tmp_path: Path) -> None:
    curves: list[list[float]] = []
    for sleeps in (False, True):
        trainer = _trainer(tmp_path / str(sleeps), steps=5)
        told: list[str] = []
        models: list[nn.Module] = []
        curves.append([])

        def sleep(done: StepDone, curve: list[float] = curves[-1], models: list[nn.Module] = models) -> None:
            with done.offloaded():
                assert all(parameter.untyped_storage().nbytes() == 0 for parameter in models[0].parameters())
            curve.append(done.loss.item())

        trainer.events.on(ModelReady, lambda event, models=models: models.append(event.model))
        trainer.events.on(StepDone, sleep if sleeps else lambda done, curve=curves[-1]: curve.append(done.loss.item()))
        for kind in (StateOffloaded, StateOnloaded):
            trainer.events.on(kind, lambda event, told=told: told.append(f"{type(event).__name__} {event.step}"))
        trainer.train()
        assert told == [
            f"{what} {step}" for step in range(1, 6) if sleeps for what in ("StateOffloaded", "StateOnloaded")
        ]
    assert curves[0] == curves[1]


def test_events_have_the_values_of_the_job(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, evaluate=True)
    steps: list[StepDone] = []
    finished: list[Finished] = []

    def finish(event: Finished) -> None:
        assert dist.is_initialized()
        finished.append(event)

    trainer.events.on(StepDone, steps.append)
    trainer.events.on(Finished, finish)
    result = trainer.train()
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    for line in lines:
        event = steps[int(line["step"]) - 1]
        assert (event.loss.item(), event.grad_norm.item()) == (line["loss"], line["grad_norm"])
        assert event.learning_rate == line["learning_rate"]
    assert finished[0].result == result
    assert finished[0].ctx.world_size == 1


def test_the_note_of_an_error_names_the_event_handler(tmp_path: Path) -> None:
    def out_of_luck(event: StepDone) -> None:
        raise RuntimeError(f"bad luck at {event.step}")

    trainer = _trainer(tmp_path)
    trainer.events.on(StepDone, out_of_luck)
    with pytest.raises(RuntimeError, match="bad luck at 1") as error:
        trainer.train()
    assert "out_of_luck of StepDone" in error.value.__notes__[0]
    assert not dist.is_initialized()


def test_optimizer_and_lr_schedule_may_be_custom_functions(tmp_path: Path) -> None:
    def frozen_first(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.get_submodule("down").parameters(), lr=0.5)

    trainer = Trainer(
        _config(tmp_path, steps=3),
        model=lambda stage: _Net(),
        data=_data(),
        task=_Regression(),
        optimizer=frozen_first,
        lr_schedule=lambda step: 1 / (step + 1),
    )
    rates: list[float] = []
    trainer.events.on(StepDone, lambda event: rates.append(event.learning_rate))
    _, weights = _weights(trainer)
    assert rates == [0.5, 0.25, 0.5 / 3]
    _, start = _weights(_trainer(tmp_path / "start", steps=1, optimizer={"learning_rate": 1e-300, "weight_decay": 0}))
    assert torch.equal(weights["up.weight"], start["up.weight"])
    assert not torch.equal(weights["down.weight"], start["down.weight"])


def test_a_function_that_builds_no_optimizer_is_an_error(tmp_path: Path) -> None:
    built: Any = lambda _model: None  # noqa: E731 - a return is missing
    trainer = Trainer(_config(tmp_path), model=lambda stage: _Net(), data=_data(), task=_Regression(), optimizer=built)
    with pytest.raises(
        UserError, match=r"builds the optimizer returned a NoneType; expected a torch\.optim\.Optimizer"
    ):
        trainer.train()


def test_samples_may_be_collated_by_a_custom_function(tmp_path: Path) -> None:
    def collate(samples: Samples) -> Batch:
        return {name: torch.stack([sample[name] for sample in samples]) * 0 for name in ("x", "y")}

    trainer = Trainer(
        _config(tmp_path),
        model=lambda stage: nn.Linear(3, 1, bias=False, dtype=torch.float64),
        data=_data(),
        task=_Positional(),
        collate=collate,
    )
    assert trainer.train().train_loss == 0


class _Positional(_Regression):
    def inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"input": batch["x"]}


def test_initial_weights_are_loaded_and_exported_through_the_mapper(tmp_path: Path) -> None:
    source = _Net()
    renamed = _Provider().state_mapper(source).inverse()
    save_model_state(source, tmp_path / "weights", renamed)
    config = _config(
        tmp_path, initial_weights=tmp_path / "weights", optimizer={"learning_rate": 1e-300, "weight_decay": 0}
    )
    result, weights = _weights(Trainer(config, model=_Provider(), data=_data(), task=_Regression()))
    _assert_same_bits(weights, source.state_dict())
    assert result.export_dir is not None
    assert sorted(ModelFolder.open(result.export_dir).tensors) == sorted(f"model.{name}" for name in weights)
    assert (result.export_dir / "config.json").read_text(encoding="utf-8") == '{\n  "hidden": 4\n}\n'


def test_the_export_can_be_disabled(tmp_path: Path) -> None:
    assert _trainer(tmp_path, export=False).train().export_dir is None
    assert not (tmp_path / "run" / "export").exists()


@pytest.mark.parametrize(("keep_last", "steps"), [(1, [6]), (None, [6, 4, 2])])
def test_a_job_keeps_the_configured_number_of_checkpoints(
    tmp_path: Path, keep_last: int | None, steps: list[int]
) -> None:
    _trainer(tmp_path, checkpoint={"every": 2, "keep_last": keep_last}).train()
    assert [info.step for info in CheckpointStore(tmp_path / "run" / "checkpoints").complete()] == steps


def test_a_non_finite_loss_is_saved_in_the_checkpoint(tmp_path: Path) -> None:
    class Diverged(_Regression):
        num_losses = 0

        def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
            self.num_losses += 1
            return Loss(outputs.sum() * (1 if self.num_losses <= 2 else float("inf")), weight=1)

    config = _config(tmp_path, resilience={"bad_steps": {"max_in_a_row": 100}})
    trainers: list[Callable[[], TrainResult]] = [
        Trainer(config, model=lambda stage: _Net(), data=_data(), task=Diverged()).train for _ in range(2)
    ]
    first, again = (train() for train in trainers)
    assert str(first.train_loss) == str(again.train_loss)
    assert first.train_loss != pytest.approx(0, abs=1e300)


def test_only_an_evaluation_needs_evaluation_data(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"evaluation\.only = true, but there are no evaluation data"):
        _trainer(tmp_path, evaluation={"only": True}).train()


def test_a_run_is_evaluated_without_training(tmp_path: Path) -> None:
    only = {"every": 2, "only": True}
    before = _trainer(tmp_path, evaluate=True, evaluation=only).train()
    assert before.steps == 0
    assert math.isnan(before.train_loss)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    trained = _trainer(tmp_path, evaluate=True, evaluation={"every": 2}).train()
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    after = _trainer(tmp_path, evaluate=True, evaluation=only, steps=1).train()
    assert (after.steps, after.evaluation) == (trained.steps, trained.evaluation)
    assert (before.export_dir, after.export_dir) == (None, trained.export_dir)
    assert before.evaluation["loss"] > after.evaluation["loss"]
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics


def test_a_resumed_job_needs_its_initial_weights_no_more(tmp_path: Path) -> None:
    save_model_state(_Net(), tmp_path / "weights")
    _trainer(tmp_path, steps=2, initial_weights=tmp_path / "weights").train()
    shutil.rmtree(tmp_path / "weights")
    assert _trainer(tmp_path, steps=4, initial_weights=tmp_path / "weights").train().steps == 4


class _ForgetsTheHead(ModelProvider):
    def build(self, stage: StageInfo) -> nn.Module:
        return _Net()

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        parallelize_fsdp(model.get_submodule("up"), ctx.mesh_for("flat"))


def _train_without_the_head(folder: str) -> str:
    config = _config(Path(folder), mesh={"data_parallel_shard": 2})
    try:
        Trainer(config, model=_ForgetsTheHead(), data=_data(), task=_Regression()).train()
    except UserError as error:
        return f"{error} {error.__notes__}"
    return "trained"


def test_every_trainable_parameter_must_be_parallelized(tmp_path: Path) -> None:
    for rank, message in enumerate(run_ranks(_train_without_the_head, str(tmp_path))):
        assert "the model provider's parallelize placed down.weight, down.bias on fewer than the 2 ranks" in message
        assert "on every axis with several ranks, from calls on the whole model: parallelize_hsdp(model, de" in message
        assert f"['on rank {rank}']" in message
    assert not (tmp_path / "runs").exists()


def _train_at_different_rates(folder: str) -> str:
    rank = int(os.environ["RANK"])
    config = _config(Path(folder), mesh={"data_parallel_shard": -1}, optimizer={"learning_rate": 0.1 * (rank + 1)})
    try:
        Trainer(config, model=lambda stage: _Net(), data=_data(), task=_Regression()).train()
    except UserError as error:
        return str(error)
    return "trained"


def test_ranks_must_agree_on_the_configuration(tmp_path: Path) -> None:
    messages = run_ranks(_train_at_different_rates, str(tmp_path), world_size=2)
    assert len(set(messages)) == 1
    assert "the configuration" in messages[0]
    assert "rank 1" in messages[0]


class _Whole(ModelProvider):
    def build(self, stage: StageInfo) -> nn.Module:
        return _Net()


def _train_tensor_parallel(folder: str) -> str:
    config = _config(Path(folder), mesh={"tensor_parallel": 2})
    try:
        Trainer(config, model=_Whole(), data=_data(), task=_Regression()).train()
    except UserError as error:
        return str(error)
    return "trained"


def test_a_model_must_use_the_tensor_parallel_axis(tmp_path: Path) -> None:
    for message in run_ranks(_train_tensor_parallel, str(tmp_path)):
        assert "placed up.weight, up.bias, down.weight, down.bias on fewer than the 2 ranks of a stage" in message
        assert (
            'from calls on the whole model: parallelize_tensor(model, dense["tp"], plan), then parallelize_h' in message
        )


class _InHalf(_Whole):
    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        model.to(torch.bfloat16)


def test_parallelize_must_leave_shapes_and_dtypes(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        Trainer(_config(tmp_path), model=_InHalf(), data=_data(), task=_Regression()).train()
    for line in (
        "the model provider's parallelize changed the model, so that its checkpoints could not be resumed:\n",
        "  down.bias: built as [1] float64, now [1] bfloat16\n",
        "pass a Precision to parallelize_hsdp",
    ):
        assert line in str(caught.value)


class _OnlyTensorParallel(_Whole):
    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        parallelize_tensor(model, ctx.mesh_for("dense")["tp"], {"up": ColumnParallel(), "down": RowParallel()})


def _train_without_data_parallelism(folder: str) -> str:
    config = _config(Path(folder), mesh={"tensor_parallel": 2, "data_parallel_replicate": 2}, batch={"global_size": 8})
    try:
        Trainer(config, model=_OnlyTensorParallel(), data=_data(), task=_Regression()).train()
    except UserError as error:
        return str(error)
    return "trained"


def test_parameters_on_fewer_ranks_than_a_stage_has_are_refused(tmp_path: Path) -> None:
    for message in run_ranks(_train_without_data_parallelism, str(tmp_path), world_size=4):
        assert "placed up.weight, up.bias, down.weight, down.bias on fewer than the 4 ranks of a stage" in message


def test_a_mapper_without_an_inverse_is_refused_where_there_will_be_an_export(tmp_path: Path) -> None:
    class OneWay(ModelProvider):
        def build(self, stage: StageInfo) -> nn.Module:
            return _Net()

        def state_mapper(self, model: nn.Module) -> StateMapper:
            return narrow("up.weight", "up.weight", dim=0, start=0, length=4)

    trainer = Trainer(_config(tmp_path), model=OneWay(), data=_data(), task=_Regression())
    with pytest.raises(
        UserError, match=r"^export = true, but the provider's state mapper has no inverse: .*--export f"
    ):
        trainer.train()


def test_an_export_without_trained_parameters_is_refused(tmp_path: Path) -> None:
    class WithAdapter(ModelProvider):
        def build(self, stage: StageInfo) -> nn.Module:
            return _Net()

        def state_mapper(self, model: nn.Module) -> StateMapper:
            names = [name for name, _ in model.named_parameters()]
            return parallel(identity(*names[1:]), keep(names[0]))

    trainer = Trainer(_config(tmp_path), model=WithAdapter(), data=_data(), task=_Regression())
    with pytest.raises(UserError, match=r"^export = true, but the weights on disk omit 1 trained par.*Or"):
        trainer.train()


def test_time_limits_are_configured(tmp_path: Path) -> None:
    timeouts = {"startup_seconds": 77, "step_seconds": 33}
    trainer, found = _trainer(tmp_path, resilience={"timeouts": timeouts}), []
    trainer.events.on(ConfigReady, lambda event: found.append(event.ctx.timeouts))
    trainer.train()
    assert [(each.startup.total_seconds(), each.step.total_seconds()) for each in found] == [(77, 33)]


def test_a_handler_cannot_change_an_evaluation(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, evaluate=True)
    trainer.events.on(EvaluationDone, lambda event: dict(event.values).clear())
    trainer.events.on(EvaluationDone, lambda event: event.values.clear())  # ty: ignore[missing-attribute]
    assert trainer.train().evaluation.keys() == {"loss", "samples"}


class _ExplodesOnce(_Regression):
    """Task that is non-finite on marked samples: on one of two ranks, if there are two."""

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        loss = super().loss(outputs, batch)
        return Loss(loss.total * torch.where(batch["number"].eq(11).any(), float("nan"), 1.0), loss.weight)


def _numbered() -> Samples:
    return [{**sample, "number": torch.tensor(index)} for index, sample in enumerate(_data())]


def _explode(folder: str, ranks: int, policy: str) -> list[tuple[int, str, str]]:
    config = _config(
        Path(folder),
        steps=3,
        data={"shuffle": False},
        mesh={"data_parallel_shard": ranks},
        checkpoint={"every": 1, "background": False},
        resilience={"bad_steps": {"non_finite": policy}},
    )
    trainer = Trainer(config, model=lambda stage: _Net(), data=_numbered(), task=_ExplodesOnce())
    found: list[tuple[int, str, str]] = []
    trainer.events.on(BadStepFound, lambda event: found.append((event.step, event.decision, event.why)))
    try:
        trainer.train()
    except BadStepError as error:
        found.append((0, "raised", str(error)))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_non_finite_step_is_skipped(tmp_path: Path, ranks: int) -> None:
    everyones = run_ranks(_explode, str(tmp_path), ranks, "skip", world_size=ranks)
    assert all(found == everyones[0] for found in everyones)
    ((step, decision, why),) = everyones[0]
    assert (step, decision) == (2, "skip")
    assert "its update was skipped. the first tensor that is not finite is the loss, in the forward pass of rank" in why
    model = _Net()
    load_model_state(model, tmp_path / "run" / "export")
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_bad_step_stops_or_rolls_back_the_job_as_configured(tmp_path: Path) -> None:
    stop = _explode(str(tmp_path / "stop"), 1, "stop")
    assert [(step, decision) for step, decision, _ in stop] == [(2, "stop"), (0, "raised")]
    assert "the policy is stop." in stop[1][2]
    back = _explode(str(tmp_path / "back"), 1, "roll_back")
    assert [(step, decision) for step, decision, _ in back] == [(2, "roll_back"), (2, "stop"), (0, "raised")]
    assert "it is bad again after a rollback" in back[2][2]


class _ExplodesFirst(_Regression):
    """Task that is non-finite on a sample the first time, and when that step is replayed for diagnosis."""

    def __init__(self, times: int) -> None:
        self.times = times

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        loss = super().loss(outputs, batch)
        if not batch["number"].eq(11).any() or not self.times:
            return loss
        self.times -= 1
        return Loss(loss.total * float("nan"), loss.weight)


def test_a_rollback_does_not_change_the_following_steps(tmp_path: Path) -> None:
    weights = []
    for name, times in (("calm", 0), ("rewound", 2)):
        config = _config(
            tmp_path / name,
            steps=5,
            data={"shuffle": False},
            checkpoint={"every": 1},
            resilience={"bad_steps": {"non_finite": "roll_back"}},
            logging={"every": 1, "progress": False},
        )
        task = _ExplodesFirst(times)
        weights.append(_weights(Trainer(config, model=lambda stage: _Net(), data=_numbered(), task=task))[1])
        assert task.times == 0
        steps = [line["step"] for line in read_metrics(tmp_path / name / "run" / "metrics.jsonl") if "loss" in line]
        assert steps == [1, 2, 3, 4, 5]
    _assert_same_bits(*weights)


def test_failure_after_a_rollback_is_at_the_step_of_the_checkpoint(tmp_path: Path) -> None:
    config = _config(
        tmp_path,
        steps=5,
        data={"shuffle": False},
        checkpoint={"every": 1},
        resilience={"bad_steps": {"non_finite": "roll_back"}},
    )
    trainer = Trainer(config, model=lambda stage: _Net(), data=_numbered(), task=_ExplodesFirst(2))
    started: list[int] = []
    failed: list[int] = []

    def stop_at_repetition(event: StepStarted) -> None:
        if event.step in started:
            raise KeyboardInterrupt
        started.append(event.step)

    trainer.events.on(StepStarted, stop_at_repetition)
    trainer.events.on(Failed, lambda event: failed.append(event.step))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert started == [1, 2]
    assert failed == [1]


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Restore signal handlers: a stopped job ignores signals until its process exits."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize("every", [100, 3, 1])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.sample("False-100", "True-1", "True-3")
def test_a_stop_signal_saves_a_checkpoint_and_ends_the_job(tmp_path: Path, every: int, background: bool) -> None:
    checkpoint = {"every": every, "background": background}
    trainer = _trainer(tmp_path, steps=6, checkpoint=checkpoint)
    trainer.events.on(StepDone, lambda done: os.kill(os.getpid(), signal.SIGTERM) if done.step == 3 else None)
    with pytest.raises(Stopped, match="stopped by SIGTERM after step 3") as stopped:
        trainer.train()
    assert stopped.value.code == 75
    os.kill(os.getpid(), signal.SIGTERM)  # ignored, so that the exit code does not change
    assert not dist.is_initialized()
    assert CheckpointStore(tmp_path / "run" / "checkpoints").complete()[0].step == 3
    _, weights = _weights(_trainer(tmp_path, steps=6, checkpoint=checkpoint))
    _, whole = _weights(_trainer(tmp_path / "whole", steps=6, checkpoint=checkpoint))
    _assert_same_bits(weights, whole)


def test_a_launcher_that_is_lost_before_the_first_step_ends_the_job_without_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end() -> None:  # in place of os._exit
        if threading.current_thread() is threading.main_thread():
            raise SystemExit(ExitCode.PEER_LOST)

    launcher = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv(LAUNCHER, str(launcher.pid))
    monkeypatch.setattr(launcher_watch, "end_orphan", end)
    trainer = _trainer(tmp_path, steps=6)
    trainer.events.on(DataReady, lambda _: (launcher.kill(), launcher.wait()))
    steps: list[int] = []
    trainer.events.on(StepStarted, lambda started: steps.append(started.step))
    with pytest.raises(SystemExit, match="125"):
        trainer.train()
    assert steps == []
