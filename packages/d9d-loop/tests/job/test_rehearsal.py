"""Writes to parameters in forward, which sharding would lose, are found by the rehearsal, without a process group."""

import gc
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import ContextSplit, Launch, StageInfo, UserError
from d9d_loop import Loss, Task, Trainer, TrainerConfig
from d9d_loop.job import rehearsal
from d9d_loop.job.rehearsal import rehearse
from d9d_metrics import Accumulator, Metric
from d9d_pipeline import Inputs

REHEARSES = True  # see quick_jobs.py


class _Sum(Task):
    def inputs(self, batch: Tensor) -> dict[str, Tensor]:
        return {"x": batch}

    def loss(self, outputs: Tensor, batch: Tensor) -> Loss:
        return Loss(outputs.sum(), weight=len(batch))


class _Writing(nn.Module):
    """Calls a function of the module under `no_grad` in each forward."""

    def __init__(self, write: Callable[[Any], Any]) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 3, max_norm=1.0)
        self.layer, self.slow = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))
        self.scale = nn.Parameter(torch.ones(()))
        self._write = write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self._write(self)
        return self.scale * (self.layer(x) + self.slow(x)) + self.rows(torch.zeros(len(x), dtype=torch.int64))


def _rehearse(folder: Path, build: Callable[[StageInfo], nn.Module], num_ranks: int) -> None:
    config = TrainerConfig.model_validate(
        {"steps": 1, "batch": {"global_size": 4}, "run": {"folder": folder}, "trackers": (), "export": False}
    )
    trainer = Trainer(config, model=build, data=[torch.ones(3)] * 4, task=_Sum())
    rehearse(trainer.plan_for(Launch(world_size=num_ranks)))


@pytest.mark.parametrize("rank", [0, 1])
def test_old_garbage_is_collected_beside_the_rehearsal(rank: int, tmp_path: Path) -> None:
    config = TrainerConfig.model_validate({"steps": 1, "batch": {"global_size": 4}, "run": {"folder": tmp_path}})
    trainer = Trainer(config, model=lambda stage: _Writing(id), data=[torch.ones(3)] * 4, task=_Sum())
    plan = trainer.plan_for(Launch(rank=rank, world_size=2))
    cycle = _Sum()
    cycle.itself = cycle  # ty: ignore[missing-attribute]
    gc.collect()  # to the oldest generation
    found = weakref.ref(cycle)
    del cycle
    gc.collect(1)
    assert found() is not None
    rehearse(plan)
    assert found() is None


def _replaced(model: Any) -> None:
    model.layer.weight.data = model.layer.weight.data * 2


def _assigned(model: Any) -> None:
    model.layer.bias = nn.Parameter(model.layer.bias * 2)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda model: model.slow.weight.mul_(0.9).add_(model.layer.weight, alpha=0.1), r"slow\.weight"),
        (lambda model: model.layer.weight[0].zero_(), r"layer\.weight"),
        (lambda model: model.layer.weight.data.clamp_(-1, 1), r"layer\.weight"),
        (_replaced, r"layer\.weight"),
        (_assigned, r"layer\.bias"),
    ],
    ids=["average", "row", "data", "replaced", "assigned"],
)
def test_writes_to_parameters_are_refused_before_several_ranks_start(
    tmp_path: Path, write: Callable[[Any], Any], name: str
) -> None:
    with pytest.raises(UserError, match=f"forward replaces or writes to {name}, for example"):
        _rehearse(tmp_path, lambda stage: _Writing(write), num_ranks=2)
    _rehearse(tmp_path, lambda stage: _Writing(write), num_ranks=1)


@pytest.mark.parametrize(
    "write",
    [lambda model: model.seen.add_(1), lambda model: model.scale.mul_(2), lambda model: model.layer.weight * 2],
    ids=["buffer", "replicated", "read"],
)
def test_the_rehearsal_accepts_other_writes(tmp_path: Path, write: Callable[[Any], Any]) -> None:
    _rehearse(tmp_path, lambda stage: _Writing(write), num_ranks=2)


def _require_tie(model: Any) -> None:
    assert model.layer.weight is model.slow.weight


def test_tied_parameters_stay_tied(tmp_path: Path) -> None:
    def build(stage: StageInfo) -> nn.Module:
        model = _Writing(_require_tie)
        model.slow.weight = model.layer.weight
        return model

    _rehearse(tmp_path, build, num_ranks=1)


class _Labeled(Task):
    def inputs(self, batch: Any) -> dict[str, Tensor]:
        return {"input": batch["x"]}

    def loss(self, outputs: Tensor, batch: Any) -> Loss:
        return Loss((outputs - batch["y"]).square().sum(), weight=len(outputs))


def _labeled(
    folder: Path, evaluation: list[dict[str, Tensor]] | None, task: Task | None = None, *, steps: int = 1
) -> Trainer:
    values = {"steps": steps, "batch": {"global_size": 4}, "run": {"folder": folder}, "trackers": (), "export": False}
    config = TrainerConfig.model_validate({**values, "evaluation": {"every": 4}})
    data = [{"x": torch.ones(3), "y": torch.ones(1)}] * 4
    model = lambda stage: nn.Linear(3, 1)  # noqa: E731
    return Trainer(config, model=model, data=data, evaluation_data=evaluation, task=task or _Labeled())


def test_the_first_evaluation_batch_is_rehearsed(tmp_path: Path) -> None:
    rehearse(_labeled(tmp_path, [{"x": torch.ones(3), "y": torch.ones(1)}] * 2).plan_for(Launch()))
    message = (
        r"the first evaluation batch fails in _Labeled.loss: KeyError: 'y'\.(.|\n)*The batch is {x: float32\[2, 3\]}"
    )
    with pytest.raises(UserError, match=message):
        rehearse(_labeled(tmp_path, [{"x": torch.ones(3)}] * 2).plan_for(Launch()))


class _Tokens(Task):
    """Next-token loss that can be split over context-parallel ranks."""

    def inputs(self, batch: Any) -> Inputs:
        return Inputs(batch["ids_BL"])

    def split_sequence(self, batch: Any, split: ContextSplit) -> Any:
        return {**split.split(batch), "positions": split.positions(batch["ids_BL"].shape[1])}

    def loss(self, outputs: Tensor, batch: Any) -> Loss:
        return Loss(outputs.sum() + batch["positions"].sum(), weight=batch["ids_BL"].numel())


class _Halves(nn.Module):
    """Embedding in the first stage, projection in the last one."""

    def __init__(self, stage: StageInfo) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4) if stage.is_first else nn.Identity()
        self.head = nn.Linear(4, 5) if stage.is_last else nn.Identity()

    def forward(self, ids_BL: Tensor) -> Tensor:
        return self.head(self.embed(ids_BL))


class _NoPositions(_Tokens):
    def loss(self, outputs: Tensor, batch: Any) -> Loss:
        return Loss(outputs.sum() + batch["position_ids"].sum(), weight=batch["ids_BL"].numel())


class _SplitTypo(_Tokens):
    def split_sequence(self, batch: Any, split: ContextSplit) -> Any:
        return split.split(batch["tokens"])


class _Sequences(_Tokens):
    def loss(self, outputs: Tensor, batch: Any) -> Loss:
        return Loss(outputs.sum() + batch["labels"].sum(), weight=batch["ids_BL"].numel())


@pytest.mark.parametrize(
    ("mesh", "task", "length", "message"),
    [
        ("context_parallel_shard", _Tokens(), 8, None),
        ("context_parallel_shard", _NoPositions(), 8, r"loss: KeyError: 'position_ids'(.|\n)*ids_BL: int64\[4, 4\]"),
        ("context_parallel_shard", _SplitTypo(), 8, r"the first batch fails in _SplitTypo.split_sequence: KeyError"),
        ("context_parallel_shard", _Tokens(), 6, r"length 6; expected a multiple of 4"),
        ("pipeline_parallel", _Sequences(), 8, r"the first batch fails in _Sequences.loss: KeyError: 'labels'"),
    ],
    ids=["split", "shard lacks a key", "typo", "length", "pipeline"],
)
def test_context_parallelism_and_pipelines_are_rehearsed(
    tmp_path: Path, mesh: str, task: Task, length: int, message: str | None
) -> None:
    values = {"steps": 1, "batch": {"global_size": 4}, "run": {"folder": tmp_path}, "mesh": {mesh: 2}}
    data = [{"ids_BL": torch.zeros(length, dtype=torch.int64)}] * 4
    trainer = Trainer(TrainerConfig.model_validate(values), model=_Halves, data=data, task=task)
    plan = trainer.plan_for(Launch(world_size=2))
    if message is None:
        rehearse(plan)
    else:
        with pytest.raises(UserError, match=message):
            rehearse(plan)


class _WholeMask(_Tokens):
    """Passes masks [B, 1, L, L] of whole rows, as models of `transformers` take them."""

    def inputs(self, batch: Any) -> Inputs:
        return Inputs(batch["ids_BL"], attention_mask=batch["mask"])

    def split_sequence(self, batch: Any, split: ContextSplit) -> Any:
        return {**super().split_sequence({"ids_BL": batch["ids_BL"]}, split), "mask": batch["mask"]}


class _Attention(nn.Module):
    def __init__(self, stage: StageInfo) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)

    def forward(self, ids_BL: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.embed(ids_BL)[:, None]
        return nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=attention_mask)


def test_masks_of_whole_rows_are_rehearsed_under_context_parallelism(tmp_path: Path) -> None:
    values = {
        "steps": 1,
        "batch": {"global_size": 4},
        "run": {"folder": tmp_path},
        "mesh": {"context_parallel_shard": 2},
    }
    sample = {"ids_BL": torch.zeros(8, dtype=torch.int64), "mask": torch.ones(1, 8, 8, dtype=torch.bool).tril()}
    trainer = Trainer(TrainerConfig.model_validate(values), model=_Attention, data=[sample] * 4, task=_WholeMask())
    rehearse(trainer.plan_for(Launch(world_size=2)))


class _Squeezed(_Labeled):
    """`squeeze` also removes the batch dim of one sample."""

    def loss(self, outputs: Tensor, batch: Any) -> Loss:
        return Loss(outputs.squeeze() @ batch["y"][:, 0], weight=len(outputs))


@pytest.mark.parametrize(
    ("num_samples", "num_held_out", "message"),
    [
        (8, 8, None),
        (9, 8, r"the last batch of an epoch, of 1 samples, fails in _Squeezed.loss: "),
        (8, 9, r"the last evaluation batch, of 1 samples, fails in _Squeezed.loss: "),
    ],
)
def test_the_last_batches_are_rehearsed_too(
    tmp_path: Path, num_samples: int, num_held_out: int, message: str | None
) -> None:
    values = {"epochs": 1, "batch": {"global_size": 4}, "run": {"folder": tmp_path}, "trackers": (), "export": False}
    sample = {"x": torch.ones(3), "y": torch.ones(1)}
    trainer = Trainer(
        TrainerConfig.model_validate(values),
        model=lambda stage: nn.Linear(3, 1),
        data=[sample] * num_samples,
        evaluation_data=[sample] * num_held_out,
        task=_Squeezed(),
    )
    if message is None:
        rehearse(trainer.plan_for(Launch()))
    else:
        with pytest.raises(UserError, match=message):
            rehearse(trainer.plan_for(Launch()))


class _Penalty(nn.Sequential):
    """Gradient in forward, with torch's error in a forked process of one that has threads of autograd."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of nn.Sequential
        if os.getpid() != _PID:
            raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")
        return super().forward(input)


_PID = os.getpid()


def test_a_gradient_in_forward_that_the_forked_process_cannot_compute_is_accepted(tmp_path: Path) -> None:
    values = {"steps": 1, "batch": {"global_size": 4}, "run": {"folder": tmp_path}, "trackers": (), "export": False}
    data = [{"x": torch.ones(3), "y": torch.ones(1)}] * 4
    trainer = Trainer(TrainerConfig.model_validate(values), model=_Penalty(nn.Linear(3, 1)), data=data, task=_Labeled())
    rehearse(trainer.plan_for(Launch()))


def test_modules_in_evaluation_mode_are_rehearsed_in_it(tmp_path: Path) -> None:
    values = {"epochs": 1, "batch": {"global_size": 4}, "run": {"folder": tmp_path}, "trackers": (), "export": False}
    for norm, message in (
        (nn.BatchNorm1d(3), "Expected more than 1 value per channel"),
        (nn.BatchNorm1d(3).eval(), None),
    ):
        model = nn.Sequential(nn.Linear(3, 3), norm)
        data = [{"x": torch.ones(3), "y": torch.ones(3)}] * 9
        trainer = Trainer(TrainerConfig.model_validate(values), model=model, data=data, task=_Labeled())
        if message is None:
            rehearse(trainer.plan_for(Launch()))
        else:
            with pytest.raises(UserError, match=message):
                rehearse(trainer.plan_for(Launch()))


@pytest.mark.parametrize(("num_samples", "is_found"), [(8, False), (9, True), (11, False)])
def test_batch_norms_and_an_epoch_that_ends_with_stand_ins_are_an_error(
    tmp_path: Path, num_samples: int, is_found: bool
) -> None:
    """With two ranks and a microbatch of 2, a last step of one sample leaves a rank without samples."""
    values = {"epochs": 1, "batch": {"global_size": 4}, "run": {"folder": tmp_path}, "trackers": (), "export": False}
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    data = [{"x": torch.ones(3), "y": torch.ones(1)}] * num_samples
    trainer = Trainer(TrainerConfig.model_validate(values), model=model, data=data, task=_Labeled())
    if not is_found:
        trainer.plan_for(Launch(world_size=2))
        return
    message = r"the last step of an epoch has 1 samples, too few for all .* of the 2 .* batch norms in training mode"
    for rank in range(2):
        with pytest.raises(UserError, match=message):
            trainer.plan_for(Launch(world_size=2, rank=rank))


class _Count(Metric):
    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self.total, self._compute = Accumulator("sum"), compute

    def compute(self) -> Any:
        return self._compute(self)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (_Count(lambda metric: 0.5), r"compute\(\) of the metric mine returned a float; expected a tensor"),
        (
            _Count(lambda metric: metric.values),
            r"the first batch fails in compute\(\) of the metric mine: AttributeError.*values",
        ),
    ],
)
def test_the_values_of_metrics_are_rehearsed(tmp_path: Path, metric: Metric, message: str) -> None:
    class Measured(_Labeled):
        def metrics(self) -> dict[str, Any]:
            return {"mine": metric}

    trainer = _labeled(tmp_path, [{"x": torch.ones(3), "y": torch.ones(1)}] * 2, Measured())
    with pytest.raises(UserError, match=message):
        rehearse(trainer.plan_for(Launch()))


def test_a_resumed_job_is_rehearsed_unless_it_is_complete(tmp_path: Path) -> None:
    evaluation = [{"x": torch.ones(3), "y": torch.ones(1)}] * 2
    _labeled(tmp_path, evaluation).train()
    rehearse(_labeled(tmp_path, [{"x": torch.ones(3)}] * 2).plan_for(Launch()))
    trainer = _labeled(tmp_path, [{"x": torch.ones(3)}] * 2, steps=2)
    with pytest.raises(UserError, match=r"the first evaluation batch fails in _Labeled.loss: KeyError: 'y'"):
        rehearse(trainer.plan_for(Launch()))


@pytest.mark.parametrize(("seconds", "why"), [(0.0, "took longer than 0 s"), (60.0, "crashed")])
def test_a_rehearsal_without_a_result_says_so(
    tmp_path: Path, seconds: float, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rehearsal, "_SECONDS", seconds)
    plan = _labeled(tmp_path, [{"x": torch.ones(3), "y": torch.ones(1)}] * 2).plan_for(Launch())
    never = (lambda: os._exit(1)) if seconds else Event().wait
    rehearse(replace(plan, first_entries=never))
    assert capsys.readouterr().out.startswith(f"d9d: the rehearsal of the first batches {why}, so mistakes in the code")


def test_an_interval_of_evaluations_needs_evaluation_data(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"evaluation.every = 4, but there are no evaluation data; expected some"):
        _labeled(tmp_path, None).plan_for(Launch())
