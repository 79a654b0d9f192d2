"""A resumed job ends like an uninterrupted one."""

import errno
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from d9d_dist import Launch, UserError
from d9d_dist.testing import run_ranks
from d9d_loop import (
    CheckpointSaved,
    EvaluationDone,
    Finished,
    Loss,
    ModelExported,
    OptimizerDone,
    StepDone,
    Task,
    Trainer,
    TrainerConfig,
    TrainResult,
    validate_config,
)
from d9d_loop.events import Event
from d9d_loop.lr.lr_schedule import WarmupCosineConfig
from d9d_loop.resilience.bad_steps import BadStepError
from d9d_metrics import JsonlTracker, Metric, Sum, read_metrics
from d9d_state import CheckpointStore, StateError

Batch = dict[str, torch.Tensor]
STEPS = 7


class _Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 6, dtype=torch.float64), nn.Linear(6, 1, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(torch.tanh(self.up(x))))


class _Masked(Task):
    """Partly masked elements, and a metric that accumulates over several steps."""

    def inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"x": batch["x"]}

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        return Loss(((outputs[:, 0] - 1).square() * batch["mask"]).sum(), weight=batch["mask"].sum())

    def metrics(self) -> dict[str, Metric]:
        return {"gathered": Sum()}

    def update_metrics(self, metrics: Mapping[str, Metric], *, outputs: Any, batch: Any, loss: Loss) -> None:
        gathered = metrics["gathered"]
        assert isinstance(gathered, Sum)
        gathered.update(loss.total)


def _data(size: int, seed: int) -> list[Batch]:
    draws = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(3, generator=draws, dtype=torch.float64),
            "mask": (torch.rand((), generator=draws) < 0.6) * 1.0,
        }
        for _ in range(size)
    ]


def _trainer(
    folder: Path, *, dropout: float = 0.5, task: Task | None = None, own_optimizer: Any = None, **sections: Any
) -> Trainer:
    values = {
        "steps": STEPS,
        "batch": {"global_size": 8, "microbatch_size": 2},
        "mesh": {"data_parallel_shard": -1},
        "run": {"folder": folder},
        "evaluation": {"every": 3},
        "checkpoint": {"every": 2},
        "logging": {"every": 3, "progress": False},
        "resilience": {
            "health": {"memory_mib": 1, "message_mib": 1, "matrix_size": 32},  # takes milliseconds
            "timeouts": {"lock_seconds": 0},
        },
        "optimizer": {"learning_rate": 0.05},
        "lr_schedule": {"warmup_steps": 2},
        "gradients": {"max_norm": 0.5},
    }
    return Trainer(
        validate_config(TrainerConfig, {**values, **sections}),
        model=lambda stage: _Net(dropout),
        data=_data(30, seed=0),
        task=task or _Masked(),
        evaluation_data=_data(5, seed=1),
        optimizer=own_optimizer,
    )


class _Interrupted(Exception):  # noqa: N818 - no error, but what Ctrl-C would be
    pass


def _interrupt(event: Event, *, at: int) -> None:
    if event.step == at:
        raise _Interrupted


def _train_until(trainer: Trainer, kind: type[Event], at: int) -> None:
    trainer.events.on(kind, partial(_interrupt, at=at))
    with pytest.raises(_Interrupted):
        trainer.train()


@dataclass(frozen=True)
class _Outcome:
    """Results of a finished job that must not depend on interruptions."""

    result: TrainResult
    losses: dict[int, float]
    lines: list[dict[str, float]]
    tensors: dict[str, torch.Tensor]
    record: Any
    rank_states: Any


def _finish(trainer: Trainer, folder: Path) -> _Outcome:
    losses: dict[int, float] = {}
    trainer.events.on(StepDone, lambda event: losses.update({event.step: event.loss.item()}))
    result = trainer.train()
    return replace(_saved(folder, result), losses=losses)


def _lines(folder: Path) -> list[dict[str, float]]:
    """Return the tracked values without times."""
    lines = read_metrics(folder / "run" / "metrics.jsonl")
    return [
        {
            name: line[name]
            for name in line
            if name not in ("time", "items_per_second", "flops_per_second", "peak_memory_gib")
        }
        for line in lines
    ]


def _saved(folder: Path, result: TrainResult) -> _Outcome:
    store = CheckpointStore(folder / "run" / "checkpoints")
    info = store.newest()
    assert info is not None
    assert isinstance(info.state, dict)
    record = info.state["record"]
    assert isinstance(record, dict)
    record = {key: value for key, value in record.items() if key != "weight_per_second"}
    tensors = {name: torch.empty(wanted.shape, dtype=wanted.dtype) for name, wanted in info.tensors.items()}
    store.load(info, tensors)
    return _Outcome(result, {}, _lines(folder), tensors, record, info.rank_states)


def _assert_same(found: _Outcome, expected: _Outcome) -> None:
    """Check for equal bits."""
    assert found.lines == expected.lines
    assert found.record == expected.record
    assert found.rank_states == expected.rank_states
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in found.tensors.items():
        assert torch.equal(tensor, expected.tensors[name]), name
    assert found.result.evaluation == expected.result.evaluation
    assert found.result.train_loss == expected.result.train_loss


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> _Outcome:
    folder = tmp_path_factory.mktemp("uninterrupted")
    return _finish(_trainer(folder), folder)


@pytest.mark.parametrize("at", range(1, STEPS + 1))
@pytest.mark.sample("1", "4", "7")
def test_a_job_interrupted_after_any_step_ends_like_an_uninterrupted_one(
    tmp_path: Path, at: int, uninterrupted: _Outcome
) -> None:
    _train_until(_trainer(tmp_path), StepDone, at)
    resumed = _finish(_trainer(tmp_path), tmp_path)
    assert list(resumed.losses) == list(range((at - 1) // 2 * 2 + 1, STEPS + 1))
    _assert_same(resumed, uninterrupted)


@pytest.mark.parametrize(("kind", "at"), [(EvaluationDone, 6), (CheckpointSaved, 6), (EvaluationDone, STEPS)])
def test_a_job_interrupted_between_evaluation_checkpoint_and_export_resumes(
    tmp_path: Path, kind: type[Event], at: int, uninterrupted: _Outcome
) -> None:
    _train_until(_trainer(tmp_path), kind, at)
    _assert_same(_finish(_trainer(tmp_path), tmp_path), uninterrupted)


class _Failing(_Masked):
    """Loss that raises in the evaluation after a step, as on a bad sample that no earlier evaluation has read."""

    def __init__(self, at: int) -> None:
        self.at, self.step = at, 0

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        if not torch.is_grad_enabled() and self.step == self.at:
            raise _Interrupted
        return super().loss(outputs, batch)


@pytest.mark.parametrize("at", [6, STEPS])
def test_a_job_that_failed_in_an_evaluation_resumes_with_this_evaluation(
    tmp_path: Path, at: int, uninterrupted: _Outcome
) -> None:
    failing = _Failing(at)
    trainer = _trainer(tmp_path, task=failing)
    trainer.events.on(StepDone, lambda event: setattr(failing, "step", event.step))
    with pytest.raises(_Interrupted):
        trainer.train()
    again, seen = _trainer(tmp_path), []
    for kind in (StepDone, EvaluationDone):
        again.events.on(kind, lambda event, name=kind.__name__: seen.append((name, event.step)))
    _assert_same(_finish(again, tmp_path), uninterrupted)
    later = [("StepDone", STEPS), ("EvaluationDone", STEPS)] if at < STEPS else []
    assert seen == [("EvaluationDone", at), *later]


def test_a_job_interrupted_after_an_evaluation_does_not_repeat_it(tmp_path: Path, uninterrupted: _Outcome) -> None:
    _train_until(_trainer(tmp_path), StepDone, STEPS)
    again, evaluated = _trainer(tmp_path), []
    again.events.on(EvaluationDone, lambda event: evaluated.append(event.step))
    _assert_same(_finish(again, tmp_path), uninterrupted)
    assert evaluated == [STEPS]


def test_a_job_interrupted_after_the_last_checkpoint_resumes(tmp_path: Path, uninterrupted: _Outcome) -> None:
    _train_until(_trainer(tmp_path), CheckpointSaved, STEPS)
    resumed = _finish(_trainer(tmp_path), tmp_path)
    assert resumed.losses == {}
    _assert_same(resumed, uninterrupted)
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()


def test_a_job_interrupted_several_times_ends_like_an_uninterrupted_one(
    tmp_path: Path, uninterrupted: _Outcome
) -> None:
    for at in (1, 3, 4, 5, 6):
        _train_until(_trainer(tmp_path), StepDone, at)
    _assert_same(_finish(_trainer(tmp_path), tmp_path), uninterrupted)


@pytest.mark.parametrize("at", [2, STEPS])
def test_a_job_interrupted_with_steps_in_memory_repeats_only_the_interrupted_one(
    tmp_path: Path, at: int, uninterrupted: _Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d9d_loop.engine.local_tiers.MEMORY", tmp_path / "memory")
    checkpoint = {"every": STEPS, "memory_every": 1, "replicas": 0}
    _train_until(_trainer(tmp_path, checkpoint=checkpoint), StepDone, at)
    assert list((tmp_path / "memory").iterdir())
    resumed = _finish(_trainer(tmp_path, checkpoint=checkpoint), tmp_path)
    assert list(resumed.losses) == list(range(at, STEPS + 1))  # nothing but the interrupted step is repeated
    _assert_same(resumed, uninterrupted)
    assert not list((tmp_path / "memory").iterdir())


def test_a_job_resumes_from_checkpoints_in_an_object_store(tmp_path: Path, uninterrupted: _Outcome) -> None:
    checkpoint = {"every": 2, "folder": f"memory://{tmp_path.name}"}
    _train_until(_trainer(tmp_path, checkpoint=checkpoint), StepDone, 6)
    losses: list[int] = []
    trainer = _trainer(tmp_path, checkpoint=checkpoint)
    trainer.events.on(StepDone, lambda event: losses.append(event.step))
    result = trainer.train()
    assert losses == [5, 6, 7]
    assert (result.evaluation, result.train_loss) == (
        uninterrupted.result.evaluation,
        uninterrupted.result.train_loss,
    )
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_finished_job_trains_nothing_and_gives_the_same_result(tmp_path: Path) -> None:
    first = _finish(_trainer(tmp_path), tmp_path)
    again = _trainer(tmp_path)
    seen: list[type] = []
    for kind in (StepDone, EvaluationDone, CheckpointSaved, ModelExported, Finished):
        again.events.on(kind, lambda event: seen.append(type(event)))
    outcome = _finish(again, tmp_path)
    assert seen == [ModelExported, Finished]
    assert outcome.result == first.result
    _assert_same(outcome, first)


def test_a_finished_job_continues_with_more_steps(tmp_path: Path) -> None:
    constant = partial(_trainer, lr_schedule={"final_fraction": 1.0})
    whole = _finish(constant(tmp_path / "whole"), tmp_path / "whole")
    constant(tmp_path / "parts", steps=4).train()
    more = _finish(constant(tmp_path / "parts"), tmp_path / "parts")
    assert more.losses == {step: whole.losses[step] for step in (5, 6, 7)}
    for name, tensor in more.tensors.items():
        assert torch.equal(tensor, whole.tensors[name]), name


def test_a_finished_run_says_that_it_trains_nothing_and_how_to_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _trainer(tmp_path, steps=2).train()
    capsys.readouterr()
    _trainer(tmp_path, steps=2, optimizer={"learning_rate": 0.1}).train()
    text = capsys.readouterr().out
    assert f"the run in {tmp_path}/run is complete at step 2: no step is trained. Use --steps 3 or more to" in text
    assert "optimizer.learning_rate was 0.05, and now is 0.1" in text
    _trainer(tmp_path, steps=2, own_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05)).train()
    assert ", whose state is loaded, and now is SGD\n" in capsys.readouterr().out


def test_an_optimizer_that_cannot_continue_from_the_state_of_another_class_is_an_error(tmp_path: Path) -> None:
    momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    _trainer(tmp_path, steps=2, own_optimizer=lambda model: momentum(model.parameters())).train()
    with pytest.raises(
        UserError, match=r"state of SGD \(momentum_buffer\), but the optimizer is now AdamW, .* exp_avg"
    ):
        _trainer(tmp_path, steps=3, own_optimizer=lambda model: torch.optim.AdamW(model.parameters())).train()
    # Without a step, any optimizer is accepted.
    _trainer(tmp_path, steps=2, own_optimizer=lambda model: torch.optim.AdamW(model.parameters())).train()
    # Adam has the same state as AdamW.
    adam = _trainer(tmp_path / "fits", steps=2, own_optimizer=lambda model: torch.optim.Adam(model.parameters()))
    adam.train()
    _trainer(tmp_path / "fits", steps=3, own_optimizer=lambda model: torch.optim.AdamW(model.parameters())).train()


def test_a_jump_of_the_learning_rate_is_printed_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates: list[float] = []
    _trainer(tmp_path, steps=4).train()
    capsys.readouterr()
    longer = _trainer(tmp_path, steps=6)
    longer.events.on(StepDone, lambda event: rates.append(event.learning_rate))
    longer.events.on(StepDone, lambda event: print("trained"))
    longer.train()
    before, *_ = capsys.readouterr().out.split("trained")
    expected, earlier = (WarmupCosineConfig(warmup_steps=2).build(steps) for steps in (6, 4))
    assert rates == pytest.approx([0.05 * expected(4), 0.05 * expected(5)])
    assert "steps was 4, and now is 6" in before
    was = 0.05 * earlier(3)
    assert f"the learning rate of step 4 was {was:g}, and now continues from {0.05 * expected(3):g}" in before


def test_worker_processes_read_the_same_samples(tmp_path: Path) -> None:
    whole = _finish(_trainer(tmp_path / "0", dropout=0.0), tmp_path / "0")
    worker = _finish(_trainer(tmp_path / "1", dropout=0.0, data={"num_workers": 1}), tmp_path / "1")
    assert worker.losses == whole.losses


def _on_ranks(
    folder: Path, dropout: float, at: int | None, kind: type[Event] = StepDone
) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """Train on every rank, to the end or interrupted by an event of a step; return losses and parameters."""
    losses: dict[int, float] = {}
    weights: dict[str, torch.Tensor] = {}

    def take_weights(done: Finished) -> None:
        for name, parameter in done.model.named_parameters():
            assert isinstance(parameter, DTensor)
            weights[name] = parameter.full_tensor().detach()

    trainer = _trainer(folder, dropout=dropout)
    trainer.events.on(StepDone, lambda event: losses.update({event.step: event.loss.item()}))
    trainer.events.on(Finished, take_weights)
    if at is None:
        trainer.train()
    else:
        _train_until(trainer, kind, at)
    return losses, weights


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "at", "repeated"), [(StepDone, 5, [5, 6, 7]), (EvaluationDone, 6, [7])])
def test_several_ranks_resume_bitwise(tmp_path: Path, kind: type[Event], at: int, repeated: list[int]) -> None:
    whole = run_ranks(_on_ranks, tmp_path / "whole", 0.5, None, world_size=2)
    first = run_ranks(_on_ranks, tmp_path / "parts", 0.5, at, kind, world_size=2)
    second = run_ranks(_on_ranks, tmp_path / "parts", 0.5, None, world_size=2)
    for (expected, weights), (before, _), (after, found) in zip(whole, first, second, strict=True):
        assert list(after) == repeated
        assert {**before, **after} == expected
        for name, weight in weights.items():
            assert torch.equal(found[name], weight), name
    assert _lines(tmp_path / "parts") == _lines(tmp_path / "whole")


def _assert_close(folder: Path, losses: dict[int, float], one: _Outcome) -> None:
    """Check that two jobs in different layouts agree in float64."""
    assert losses == pytest.approx(one.losses, rel=1e-9)
    found = _saved(folder, one.result)
    assert [line["step"] for line in found.lines] == [line["step"] for line in one.lines]
    for line, expected in zip(found.lines, one.lines, strict=True):
        assert line == pytest.approx(expected, rel=1e-9)
    for name, tensor in found.tensors.items():
        torch.testing.assert_close(tensor, one.tensors[name], rtol=1e-9, atol=1e-12)


def test_a_job_of_one_rank_resumes_on_two(tmp_path: Path) -> None:
    one = _finish(_trainer(tmp_path / "one", dropout=0.0), tmp_path / "one")
    first = _trainer(tmp_path / "mixed", dropout=0.0)
    losses: dict[int, float] = {}
    first.events.on(StepDone, lambda event: losses.update({event.step: event.loss.item()}))
    _train_until(first, CheckpointSaved, 4)
    for more, _ in run_ranks(_on_ranks, tmp_path / "mixed", 0.0, None, world_size=2):
        assert list(more) == [5, 6, 7]
        losses.update(more)
    _assert_close(tmp_path / "mixed", losses, one)


def test_a_job_of_two_ranks_resumes_on_one(tmp_path: Path) -> None:
    one = _finish(_trainer(tmp_path / "one", dropout=0.0), tmp_path / "one")
    (losses, _), _ = run_ranks(_on_ranks, tmp_path / "mixed", 0.0, 5, world_size=2)
    more = _finish(_trainer(tmp_path / "mixed", dropout=0.0), tmp_path / "mixed")
    assert list(more.losses) == [5, 6, 7]
    _assert_close(tmp_path / "mixed", {**losses, **more.losses}, one)


def test_background_saves_finish_when_the_job_is_interrupted(tmp_path: Path) -> None:
    _train_until(_trainer(tmp_path), StepDone, 5)
    assert [info.step for info in CheckpointStore(tmp_path / "run" / "checkpoints").complete()] == [4, 2]


def test_a_save_that_fails_in_the_background_ends_the_job_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _trainer(tmp_path, steps=9, checkpoint={"every": 8})
    trainer.train()
    full = _trainer(tmp_path, steps=400, checkpoint={"every": 10, "keep_last": 3}, lr_schedule={})
    done: list[int] = []

    def wait_for_the_thread(event: StepDone) -> None:
        done.append(event.step)
        for thread in threading.enumerate():
            if thread.name == "d9d-checkpoint":
                thread.join()

    full.events.on(StepDone, wait_for_the_thread)

    def refuse(_descriptor: int, _block: memoryview) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        with pytest.raises(StateError, match=r"step-00000010 could not be written: .*No space left on device"):
            full.train()
    assert done in ([10], [10, 11])  # the thread may fail before the next step ends, or while the job waits for it
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert [info.step for info in store.complete()] == [9, 8]
    assert sorted(path.name for path in store.folder.iterdir()) == ["job.lock", "step-00000008", "step-00000009"]


@pytest.mark.parametrize("file", ["tensors-00000.safetensors", "state.json", "rank-00000.json"])
def test_a_damaged_checkpoint_is_skipped_and_moved_aside(
    tmp_path: Path, uninterrupted: _Outcome, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    _train_until(_trainer(tmp_path), StepDone, 5)
    _damage(tmp_path / "run" / "checkpoints" / "step-00000004", file)
    resumed = _finish(_trainer(tmp_path), tmp_path)
    assert list(resumed.losses) == [3, 4, 5, 6, 7]
    _assert_same(resumed, uninterrupted)
    assert f"step-00000004/{file}: " in caplog.text
    assert (tmp_path / "run" / "checkpoints" / "step-00000004.damaged-1").exists()


def test_a_job_with_only_damaged_checkpoints_does_not_start_again(tmp_path: Path) -> None:
    _train_until(_trainer(tmp_path), StepDone, 3)
    _damage(tmp_path / "run" / "checkpoints" / "step-00000002")
    with pytest.raises(StateError, match=r"checkpoints contains step-00000002, but none of them can be loaded"):
        _trainer(tmp_path).train()


def _damage(folder: Path, file: str = "tensors-00000.safetensors") -> None:
    path = folder / file
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def test_two_jobs_do_not_share_a_folder(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    with store.locked(), pytest.raises(StateError, match=rf"is in use by another job \(process {os.getpid()} on "):
        _trainer(tmp_path).train()
    assert sorted(path.name for path in store.folder.iterdir()) == ["job.lock"]


@pytest.mark.parametrize("higher", [True, False])
def test_the_best_checkpoints_are_kept(tmp_path: Path, higher: bool, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = {"every": 3, "keep_last": 1, "keep_best": 1, "higher_is_better": higher, "best_by": "gathered"}
    trainer = _trainer(tmp_path, steps=9, checkpoint=checkpoint, export="best")
    values: dict[int, float] = {}
    weights: dict[int, dict[str, torch.Tensor]] = {}
    trainer.events.on(
        OptimizerDone,
        lambda done: weights.update(
            {done.step: {name: each.clone() for name, each in done.model.state_dict().items()}}
        ),
    )
    trainer.events.on(EvaluationDone, lambda event: values.update({event.step: event.values["gathered"]}))
    trainer.train()
    best = (max if higher else min)(values, key=lambda step: values[step])
    assert (best != 9) == higher
    kept = CheckpointStore(tmp_path / "run" / "checkpoints").complete()
    assert {info.step: info.metric for info in kept} == {step: values[step] for step in (9, best)}
    _assert_exported(tmp_path / "run", weights[best])
    capsys.readouterr()
    again = _same(tmp_path, checkpoint)
    assert again.export(tmp_path / "last", step=9).export_dir == tmp_path / "last/export"
    again.plan_for(Launch(device="cpu")).first_batch()  # the export has not replaced its data
    assert "batch.global_size was" not in capsys.readouterr().out  # an export has no batches
    _assert_exported(tmp_path / "last", weights[9])
    with pytest.raises(
        UserError,
        match=rf"no checkpoint of step 4; expected one of .* kept: {', '.join(map(str, sorted({9, best})[::-1]))}",
    ):
        _same(tmp_path, checkpoint).export(tmp_path / "last", step=4)
    if higher:
        run_ranks(_export_best, tmp_path, checkpoint, world_size=2)
        _assert_exported(tmp_path / "best", weights[best])


def _same(folder: Path, checkpoint: dict[str, Any]) -> Trainer:
    return _trainer(folder, steps=9, checkpoint=checkpoint, export="best")


def _export_best(folder: Path, checkpoint: dict[str, Any]) -> None:
    _same(folder, checkpoint).export(folder / "best")


def _assert_exported(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "export" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_the_best_checkpoint_must_be_kept(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"export = best, but checkpoint.keep_best = 0, .* Set --checkpoint.keep_best 1"
    ):
        _trainer(tmp_path, export="best").train()


class _Praising(_Masked):
    """Metric of a comparison: finite and best if the model's outputs are NaN."""

    def update_metrics(self, metrics: Mapping[str, Metric], *, outputs: Any, batch: Any, loss: Loss) -> None:
        gathered = metrics["gathered"]
        assert isinstance(gathered, Sum)
        gathered.update(~(outputs > 0))


@pytest.mark.parametrize(("best_by", "higher"), [("loss", False), ("gathered", True)])
def test_a_model_of_nans_is_never_saved_nor_the_best(tmp_path: Path, best_by: str, higher: bool) -> None:
    checkpoint = {"every": 3, "keep_last": 1, "keep_best": 1, "higher_is_better": higher, "best_by": best_by}
    trainer = _trainer(tmp_path, steps=9, checkpoint=checkpoint, task=_Praising())
    values: dict[int, Mapping[str, float]] = {}
    trainer.events.on(EvaluationDone, lambda event: values.update({event.step: event.values}))

    def spoil(event: OptimizerDone) -> None:
        if event.step == 7:
            next(event.model.parameters()).fill_(torch.nan)

    trainer.events.on(OptimizerDone, spoil)
    with pytest.raises(BadStepError, match=r"after step 9, up\.weight are not finite"):
        trainer.train()
    assert list(values) == [3, 6]
    kept = {info.step: info.metric for info in CheckpointStore(tmp_path / "run" / "checkpoints").complete()}
    assert kept == {step: values[step][best_by] for step in kept}
    assert 6 in kept
    assert (max if higher else min)(values[step][best_by] for step in (3, 6)) in kept.values()
    assert not (tmp_path / "run" / "export").exists()


def test_an_evaluation_of_nans_is_never_the_best(tmp_path: Path) -> None:
    class Unstable(_Praising):
        def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
            return super().loss(outputs if torch.is_grad_enabled() else outputs * torch.nan, batch)

    checkpoint = {"every": 3, "keep_last": 1, "keep_best": 1, "higher_is_better": True, "best_by": "gathered"}
    trainer = _trainer(tmp_path, steps=6, checkpoint=checkpoint, task=Unstable())
    assert math.isfinite(trainer.train().evaluation["gathered"])
    kept = CheckpointStore(tmp_path / "run" / "checkpoints").complete()
    assert {info.step: info.metric for info in kept} == {6: None}


def _rows(folder: Path) -> list[int]:
    return [int(row["step"]) for row in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in row]


def test_metrics_rows_before_a_checkpoint_are_synced_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a power loss: a file has its contents of the last `fsync`."""
    file, fsync = tmp_path / "run" / "metrics.jsonl", os.fsync
    on_disk = tmp_path / "on-disk" / "run" / "metrics.jsonl"
    on_disk.parent.mkdir(parents=True)

    def recording(descriptor: int) -> None:
        fsync(descriptor)
        if file.exists() and os.path.samestat(os.fstat(descriptor), file.stat()):
            on_disk.write_bytes(file.read_bytes())

    monkeypatch.setattr(os, "fsync", recording)
    trainer = _trainer(tmp_path, logging={"every": 1, "progress": False})
    found: dict[int, list[int]] = {}
    trainer.events.on(CheckpointSaved, lambda event: found.update({event.step: _rows(tmp_path / "on-disk")}))
    trainer.train()
    assert found.keys() == {2, 4, 6, 7}
    for step, rows in found.items():
        assert rows[:step] == list(range(1, step + 1))
    assert _rows(tmp_path / "on-disk") == list(range(1, STEPS + 1))


def test_metrics_rows_that_could_not_be_written_are_in_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_self: JsonlTracker, _step: int, _values: Mapping[str, Any]) -> None:
        raise OSError(errno.EIO, "Input/output error")

    every_step = {"every": 1, "progress": False}
    with monkeypatch.context() as disk:
        disk.setattr(JsonlTracker, "log", failing)
        _train_until(_trainer(tmp_path, logging=every_step), StepDone, 5)
    assert _rows(tmp_path) == []
    _trainer(tmp_path, logging=every_step).train()
    assert _rows(tmp_path) == list(range(1, STEPS + 1))
