import math
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.testing._internal.two_tensor import TwoTensor

from d9d_dist import DistributedContext, MeshConfig, UserError
from d9d_dist.testing import run_ranks
from d9d_loop import CheckpointSaved, Events
from d9d_loop.engine.job_state import JobState, Record
from d9d_metrics import Max, Metric, WeightedMean
from d9d_state import CheckpointStore, StateError


class _Job:
    """All saved objects, in their initial state."""

    def __init__(
        self,
        folder: Path,
        ctx: DistributedContext,
        *,
        events: Events | None = None,
        trainable_only: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer: Optimizer = torch.optim.AdamW(self.model.parameters())
        self.mean, self.largest, self.empty = WeightedMean(), Max(), Max()
        metrics: dict[str, Metric] = {"mean": self.mean, "largest": self.largest, "empty": self.empty}
        self.state = JobState(
            CheckpointStore(folder),
            model=self.model,
            optimizer=self.optimizer,
            metrics=metrics,
            config={"steps": 3},
            parts={},
            data_identity={"samples": 8},
            seed=5,
            ctx=ctx,
            events=events or Events(),
            trainable_only=trainable_only,
        )

    def work(self, rank: int = 0) -> None:
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()
        self.mean.update(0.1 + rank, 3)
        self.largest.update(float(rank))


def test_optimizer_state_without_memory_of_its_own_is_an_error(tmp_path: Path, ctx: DistributedContext) -> None:
    job = _Job(tmp_path, ctx)
    job.work()
    job.state.check_tensors()
    average = job.optimizer.state[job.model.weight]["exp_avg"]
    job.optimizer.state[job.model.weight]["exp_avg"] = TwoTensor(average, average)
    message = r"optimizer\.weight\.exp_avg is a TwoTensor, .* cannot be saved; .* use another optimizer"
    with pytest.raises(UserError, match=message):
        job.state.check_tensors()
    with pytest.raises(ValueError, match=message):
        job.state.save(Record(1))
    assert not list(tmp_path.glob("step-*"))


def test_a_new_job_starts_at_step_zero(tmp_path: Path, ctx: DistributedContext) -> None:
    assert _Job(tmp_path / "new", ctx).state.restore() == Record(0, None, {}, None)
    assert not (tmp_path / "new").exists()


def test_the_whole_state_is_restored(tmp_path: Path, ctx: DistributedContext) -> None:
    job = _Job(tmp_path, ctx)
    job.work()
    record = Record(7, 0.1, {"loss": 1 / 3}, 12.5)
    job.state.save(record)
    expected = torch.rand(3), random.random()  # noqa: S311 - what comes next is compared
    other = _Job(tmp_path, ctx)
    assert other.state.restore() == record
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]  # noqa: S311
    for name, parameter in job.model.named_parameters():
        twin = other.model.get_parameter(name)
        assert torch.equal(twin, parameter)
        for key, value in job.optimizer.state[parameter].items():
            assert torch.equal(other.optimizer.state[twin][key], value), (name, key)
    for name in ("mean", "largest", "empty"):
        for key, value in vars(job)[name].state_dict().items():
            assert torch.equal(vars(other)[name].state_dict()[key], value), (name, key)


def test_non_finite_losses_are_saved_and_restored(tmp_path: Path, ctx: DistributedContext) -> None:
    _Job(tmp_path, ctx).state.save(Record(1, math.nan, {"perplexity": math.inf, "x": -math.inf}, 1.0))
    record = _Job(tmp_path, ctx).state.restore()
    assert record.train_loss is not None
    assert math.isnan(record.train_loss)
    assert record.evaluation == {"perplexity": math.inf, "x": -math.inf}


def test_a_checkpoint_contains_record_and_configuration_as_json(tmp_path: Path, ctx: DistributedContext) -> None:
    _Job(tmp_path, ctx).state.save(Record(2, 0.5, {"loss": 0.25}, 3.0))
    info = CheckpointStore(tmp_path).newest()
    assert info is not None
    assert info.state == {
        "record": {
            "step": 2,
            "train_loss": 0.5,
            "evaluation": {"loss": 0.25},
            "weight_per_second": 3.0,
            "tracker": {},
            "learning_rate": None,
            "evaluated": 0,
            "early_stopping": {"best": None, "waited": 0, "cooldown": 0},
            "plateau": {"best": None, "waited": 0, "cooldown": 0},
            "rate_factor": 1.0,
            "ended": None,
        },
        "config": {"steps": 3},
        "data_identity": {"samples": 8},
        "code": None,
        "optimizer_class": "AdamW",
        "average": None,
        "parts": {},
    }


def test_metrics_without_saved_state_start_empty(tmp_path: Path, ctx: DistributedContext) -> None:
    job = _Job(tmp_path, ctx)
    job.work()
    job.state.save(Record(1))
    added = WeightedMean()
    other = JobState(
        CheckpointStore(tmp_path),
        model=job.model,
        optimizer=job.optimizer,
        metrics={"added": added},
        config={},
        parts={},
        data_identity={"samples": 8},
        seed=5,
        ctx=ctx,
        events=Events(),
    )
    other.restore()
    assert added.compute() == 0


def test_parameter_group_changes_are_restored(tmp_path: Path, ctx: DistributedContext) -> None:
    job = _Job(tmp_path, ctx)
    job.work()
    job.optimizer.param_groups[0].update(lr=5.0, betas=(0.5, 0.6))
    job.state.save(Record(1))
    other = _Job(tmp_path, ctx)
    other.optimizer.param_groups[0]["weight_decay"] = 0.25  # the configuration of the job may change
    other.state.restore()
    group = other.optimizer.param_groups[0]
    assert (group["betas"], group["weight_decay"]) == ((0.5, 0.6), 0.25)
    assert group["lr"] == 1e-3  # set by the schedule


def test_a_background_save_is_reported_when_complete(tmp_path: Path, ctx: DistributedContext) -> None:
    told: list[int] = []
    events = Events()
    events.on(CheckpointSaved, lambda event: told.append(event.step))
    job = _Job(tmp_path, ctx, events=events)
    job.work()
    job.state.prepare()
    for step, background, expected in ((1, True, []), (2, True, [1]), (3, False, [1, 2, 3])):
        job.state.save(Record(step), background=background)
        assert told == expected
    job.state.store.raise_if_failed()
    assert [info.step for info in CheckpointStore(tmp_path).complete()] == [3, 2, 1]


def test_a_job_with_only_damaged_checkpoints_does_not_restart(tmp_path: Path, ctx: DistributedContext) -> None:
    _Job(tmp_path, ctx).state.save(Record(1))
    (tmp_path / "step-00000001" / "state.json").unlink()
    with pytest.raises(StateError, match=r"contains step-00000001, but none of them can be loaded; the log says why"):
        _Job(tmp_path, ctx).state.restore()


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path, ctx: DistributedContext) -> None:
    (tmp_path / "step-00000004.partial").mkdir()
    assert _Job(tmp_path, ctx).state.restore().step == 0
    assert list(tmp_path.iterdir()) == []


class _Frozen(_Job):
    """A job that trains only the bias."""

    def __init__(self, folder: Path, ctx: DistributedContext, *, trainable_only: bool = True) -> None:
        super().__init__(folder, ctx, trainable_only=trainable_only)
        self.model.weight.requires_grad_(False)
        self.initial = self.model.weight.detach().clone()
        nn.init.zeros_(self.model.weight)

    def restore(self) -> Record:
        self.model.weight.data.copy_(self.initial)
        return self.state.restore()


def _saved_names(folder: Path) -> set[str]:
    info = CheckpointStore(folder).newest()
    assert info is not None
    return {name for name in info.tensors if name.startswith("model.")}


def test_frozen_parameters_may_be_omitted(tmp_path: Path, ctx: DistributedContext) -> None:
    job = _Frozen(tmp_path, ctx)
    assert job.restore().step == 0
    job.work()
    job.state.save(Record(1))
    assert _saved_names(tmp_path) == {"model.bias"}
    other = _Frozen(tmp_path, ctx)
    assert other.restore().step == 1
    assert torch.equal(other.model.weight, job.initial)
    assert torch.equal(other.model.bias, job.model.bias)
    assert torch.equal(
        other.optimizer.state[other.model.bias]["exp_avg"], job.optimizer.state[job.model.bias]["exp_avg"]
    )
    other.work()
    assert other.state.roll_back().step == 1
    assert torch.equal(other.model.bias, job.model.bias)


def test_other_initial_weights_are_refused(tmp_path: Path, ctx: DistributedContext) -> None:
    job = _Frozen(tmp_path, ctx)
    job.restore()
    job.state.save(Record(1))
    other = _Frozen(tmp_path, ctx)
    other.initial += 1e-3
    with pytest.raises(
        UserError,
        match=r"the frozen parameters of this job, .* since .*step-00000001 was saved.* original initial_weights",
    ):
        other.restore()


def test_changed_frozen_parameters_are_refused(tmp_path: Path, ctx: DistributedContext) -> None:
    job = _Frozen(tmp_path, ctx)
    job.restore()
    job.model.weight.data += 1
    for save in (job.state.prepare, lambda: job.state.save(Record(1))):
        with pytest.raises(
            UserError, match=r"checkpoint.trainable_only = true, but .* do not have their initial values"
        ):
            save()
    assert not list(tmp_path.glob("step-*"))


def test_trainable_only_may_change_between_resumes(tmp_path: Path, ctx: DistributedContext) -> None:
    job = _Frozen(tmp_path, ctx, trainable_only=False)
    job.restore()
    job.state.save(Record(1))
    assert _saved_names(tmp_path) == {"model.bias", "model.weight"}
    other = _Frozen(tmp_path, ctx)
    other.initial += 1
    with pytest.raises(UserError, match="no checkpoint could restore them"):
        other.restore()
    less = _Frozen(tmp_path, ctx)
    assert less.restore().step == 1
    less.state.save(Record(2))
    assert _saved_names(tmp_path) == {"model.bias"}
    more = _Frozen(tmp_path, ctx, trainable_only=False)
    assert more.restore().step == 2
    more.state.save(Record(3))
    assert _saved_names(tmp_path) == {"model.bias", "model.weight"}


Seen = tuple[int, list[float], float, list[float]]
"""Step, sum and weight of the mean, the maximum, and the next random numbers."""


def _restore(folder: Path) -> Seen:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        job = _Job(folder, ctx)
        record = job.state.restore()
        totals = [tensor.item() for tensor in job.mean.state_dict().values()]
        return record.step, totals, job.largest.compute().item(), torch.rand(2).tolist()


def _save(folder: Path) -> list[float]:
    """Return the next random numbers."""
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        job = _Job(folder, ctx)
        job.work(rank=ctx.rank)
        torch.manual_seed(ctx.rank)
        job.state.save(Record(3))
        return torch.rand(2).tolist()


def test_every_rank_restores_its_own_state(tmp_path: Path) -> None:
    numbers = run_ranks(_save, tmp_path, world_size=2)
    assert run_ranks(_restore, tmp_path, world_size=2) == [
        (3, [0.1, 3.0], 0.0, numbers[0]),
        (3, [1.1, 3.0], 1.0, numbers[1]),
    ]


def test_metrics_are_redistributed_to_another_number_of_ranks(tmp_path: Path) -> None:
    numbers = run_ranks(_save, tmp_path, world_size=4)
    found: list[Seen] = [_restore(tmp_path), *run_ranks(_restore, tmp_path, world_size=2)]
    assert [totals for _, totals, _, _ in found] == [
        pytest.approx([6.4, 12.0]),
        pytest.approx([2.2, 6.0]),
        pytest.approx([4.2, 6.0]),
    ]
    assert [largest for _, _, largest, _ in found] == [3.0, 2.0, 3.0]
    seen = [tuple(drawn) for _, _, _, drawn in found] + [tuple(drawn) for drawn in numbers]
    # The seed depends only on rank and step: rank 0 of one layout has that of rank 0 of the other.
    assert len(set(seen)) == len(seen) - 1
