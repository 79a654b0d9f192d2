import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from d9d_dist import Launch, StageInfo, UserError
from d9d_loop import FunctionProvider, Loss, ModelProvider, Task, Trainer, TrainerConfig, validate_config
from d9d_loop.data import DatasetProvider, IndexedStream
from d9d_loop.job.job_check import export_mapper_of
from d9d_loop.job.plan import plan_job
from d9d_loop.model.model_provider import model_provider
from d9d_loop.writable import check_writable
from d9d_metrics import Compose, Metric, Sum
from d9d_state import (
    CheckpointStore,
    JsonValue,
    Retention,
    StateError,
    StateMapper,
    model_tensors,
    rename,
    save_model_state,
)

DATA = [torch.zeros(3)] * 8
IDENTITY: JsonValue = IndexedStream(DATA, seed=0).identity()


class _Nothing(Task):
    def inputs(self, batch: Any) -> dict[str, Any]:
        raise AssertionError("no step may be taken")

    def loss(self, outputs: Any, batch: Any) -> Loss:
        raise AssertionError("no step may be taken")


class _Renamed(ModelProvider):
    def build(self, stage: StageInfo) -> nn.Module:
        return nn.Linear(3, 2, bias=False)

    def state_mapper(self, model: nn.Module) -> StateMapper:
        return rename("w", "weight")


def _linear(stage: StageInfo) -> nn.Module:
    return nn.Linear(3, 2)


def _config(folder: Path, **sections: Any) -> TrainerConfig:
    values = {"steps": 3, "batch": {"global_size": 8}, "run": {"folder": folder / "runs"}}
    quick = {"resilience": {"health": {"memory_mib": 1, "message_mib": 1, "matrix_size": 32}}}
    return validate_config(TrainerConfig, {**values, **quick, **sections})


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def start(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a process group was started")

    monkeypatch.setattr(dist, "init_process_group", start)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert not dist.is_initialized()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def of(size: int) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(size))

    return of


def _refused(folder: Path, message: str, *, data: Any = DATA, model: Any = _linear, **more: Any) -> None:
    """Check that the Trainer refuses the job with one message, and writes no files."""
    evaluation_data = more.pop("evaluation_data", None)
    before = _files(folder)
    trainer = Trainer(_config(folder, **more), model=model, data=data, evaluation_data=evaluation_data, task=_Nothing())
    with pytest.raises(UserError, match=f"^{message}$"):
        trainer.train()
    assert _files(folder) == before


def test_a_valid_job_is_planned(tmp_path: Path, world: Callable[[int], None]) -> None:
    world(4)
    config = _config(
        tmp_path,
        batch={"global_size": 24, "microbatch_size": 2},
        mesh={"data_parallel_replicate": 2, "data_parallel_shard": -1},
    )
    plan = plan_job(config, model=FunctionProvider(_linear), task=_Nothing(), data=DatasetProvider(DATA * 3))
    assert (plan.microbatch_size, plan.num_microbatches) == (2, 3)
    assert (plan.model.mesh.data_parallel_replicate, plan.model.mesh.data_parallel_shard) == (2, 2)
    assert plan.model.launch == Launch(0, 4, 0, 4, 0, has_launcher=True)
    assert _files(tmp_path) == []


def test_all_samples_of_a_rank_are_a_microbatch_by_default(tmp_path: Path) -> None:
    plan = plan_job(
        _config(tmp_path),
        model=FunctionProvider(_linear),
        task=_Nothing(),
        data=DatasetProvider(DATA, evaluation=DATA),
    )
    assert (plan.model.launch, plan.microbatch_size, plan.num_microbatches) == (Launch(), 8, 1)


def test_the_first_microbatch_is_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cursors: list[object] = []
    cursor = IndexedStream.cursor
    monkeypatch.setattr(IndexedStream, "cursor", lambda *args: cursors.append(args) or cursor(*args))
    config = _config(tmp_path, batch={"global_size": 8, "microbatch_size": 2})
    data = [torch.full((3,), value) for value in range(8)]
    plan = plan_job(config, model=FunctionProvider(_linear), task=_Nothing(), data=DatasetProvider(data, shuffle=False))
    assert plan.first_batch().tolist() == [[0] * 3, [1] * 3]
    assert plan.first_batch(1).tolist() == [[0] * 3]
    assert len(cursors) == 1


def test_a_mesh_of_another_size_than_the_world_is_refused(tmp_path: Path, world: Callable[[int], None]) -> None:
    world(3)
    message = r"mesh: data_parallel_shard 2 make 2 ranks, but the job has 3\. Start 2 ranks .*"
    _refused(tmp_path, message, mesh={"data_parallel_shard": 2})


def test_a_schedule_has_to_exist_for_the_microbatches(tmp_path: Path, world: Callable[[int], None]) -> None:
    world(2)
    message = (
        r"pipeline\.schedule: (.|\n)*microbatches(.|\n)* A step has 1 microbatches per data-parallel rank "
        r"\(batch\.global_size / data-parallel ranks / batch\.microbatch_size\) and mesh\.pipeline_parallel = 2\."
    )
    _refused(tmp_path, message, mesh={"pipeline_parallel": 2}, pipeline={"schedule": "dualpipev"})


def test_a_provider_that_builds_the_whole_model_for_each_stage_is_refused(
    tmp_path: Path, world: Callable[[int], None]
) -> None:
    world(2)
    message = (
        r"the 2 stages that the model provider builds do not match its whole model:\n"
        r"  weight is on the stages 0, 1, although the model does not tie it\n(.|\n)*"
        r"build\(stage\) must build only the layers of its stage (.|\n)*"
    )
    _refused(tmp_path, message, mesh={"pipeline_parallel": 2})


@pytest.mark.parametrize("degree", ["context_parallel_shard", "context_parallel_replicate"])
def test_context_parallelism_needs_a_task_with_split_sequence(
    tmp_path: Path, degree: str, world: Callable[[int], None]
) -> None:
    world(2)
    message = (
        r"the mesh has context-parallel ranks, but _Nothing cannot split a batch over them; expected a "
        r"method _Nothing\.split_sequence\(batch, split\)\. Implement it, or set the context-parallel degrees to 1\."
    )
    _refused(tmp_path, message, mesh={degree: 2})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"global_size": 6},
            r"batch\.global_size = 6 cannot be divided evenly over 4 data-parallel ranks; expected a "
            r"multiple of 4\. Use 4 or 8, or change the degrees\.",
        ),
        ({"global_size": 3}, r"batch\.global_size = 3 .*; expected a multiple of 4\. Use 4, or change the degrees\."),
        (
            {"global_size": 20, "microbatch_size": 3},
            r"batch\.global_size = 20 cannot be divided evenly over 4 data-parallel ranks x batch\.microbatch_size "
            r"= 3; expected a multiple of 12\. Use 12 or 24, or change the degrees\.",
        ),
    ],
)
def test_a_batch_size_that_ranks_and_microbatches_do_not_divide_is_refused(
    tmp_path: Path, batch: dict[str, int], message: str, world: Callable[[int], None]
) -> None:
    world(4)
    _refused(tmp_path, message, batch=batch, mesh={"data_parallel_shard": 4})


def test_data_must_not_be_empty(tmp_path: Path) -> None:
    message = r"the {} are empty; expected at least one sample\. Check the path of the data\."
    _refused(tmp_path, message.format("training data"), data=[])
    _refused(tmp_path, message.format("evaluation data"), evaluation_data=[])


def test_evaluation_data_must_end(tmp_path: Path) -> None:
    endless = IndexedStream(DATA, seed=0)
    message = r"the evaluation data are an endless stream; expected a finite one, .* Pass epochs=1 .*num_samples\."
    _refused(tmp_path, message, evaluation_data=endless)
    for data, sections in ((endless, {"num_samples": 2}), (IndexedStream(DATA, seed=0, epochs=1), {})):
        provider, config = DatasetProvider(DATA, evaluation=data), _config(tmp_path, evaluation=sections)
        assert plan_job(config, model=FunctionProvider(_linear), task=_Nothing(), data=provider).evaluation_data is data


def test_the_run_folder_may_not_be_under_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file", encoding="utf-8")
    where = re.escape(str(tmp_path / "runs"))
    _refused(
        tmp_path,
        rf"run folder {where}/run: {where} is a file, not a folder\. Choose another folder with --run\.folder, or "
        r"change permissions\.",
    )


def test_the_run_folder_must_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.F_OK and Path(path).exists())
    where = re.escape(str(tmp_path))
    _refused(tmp_path, rf"run folder {where}/runs/run: {where} is not writable\. Choose another folder .*")


def test_a_folder_without_search_permission_counts_as_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a user without permission to search a parent of the run folder."""

    def exists(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    inside = tmp_path / "locked" / "runs"
    monkeypatch.setattr(Path, "exists", exists)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) == tmp_path and mode == os.F_OK)
    trainer = Trainer(_config(tmp_path / "locked"), model=_linear, data=DATA, task=_Nothing())
    with pytest.raises(UserError, match=rf"^run folder {inside}/run: {tmp_path} is not writable\."):
        trainer.train()


def _save_checkpoint(folder: Path, step: int) -> None:
    state: JsonValue = {
        "config": _config(folder).model_dump(mode="json"),
        "data_identity": IDENTITY,
        "code": {},
        "parts": {"data": {"position": 8 * step, "stream": {"position": 8 * step}}},
    }
    CheckpointStore(folder / "runs" / "run" / "checkpoints").save(step, model_tensors(nn.Linear(3, 2)), state=state)


def test_a_checkpoint_must_be_of_the_same_model(tmp_path: Path) -> None:
    _save_checkpoint(tmp_path, 2)
    message = (
        r".*step-00000002 is a checkpoint of a different model:\n.*weight is .*\[2, 3\].* in the checkpoint, "
        r".*\[4, 3\].* in the model\n(.*\n)*Use the configuration of the run that saved it, or another run folder\."
    )
    _refused(tmp_path, message, model=lambda stage: nn.Linear(3, 4))


def test_a_run_that_completed_more_steps_is_refused(tmp_path: Path) -> None:
    _save_checkpoint(tmp_path, 5)
    where = re.escape(str(tmp_path / "runs" / "run"))
    _refused(
        tmp_path,
        rf"steps = 3, but the run in {where} has already completed 5\. Use --steps 5 or more to continue it, or "
        r"--run\.name for a new run\.",
    )


def test_a_run_that_completed_all_steps_is_accepted(tmp_path: Path) -> None:
    _save_checkpoint(tmp_path, 3)
    plan_job(_config(tmp_path), model=FunctionProvider(_linear), task=_Nothing(), data=DatasetProvider(DATA))


@pytest.mark.parametrize(
    ("change", "shuffle", "message"),
    [
        (
            {"seed": 5},
            True,
            r"data\.indexed\.seed was 0, and now is 5\n.* --run\.name for a new run, or --run\.adopt true to ",
        ),
        ({}, False, r"data\.indexed\.shuffle was true, and now is false\n"),
    ],
)
def test_a_run_keeps_the_order_of_its_samples(
    tmp_path: Path, change: dict[str, Any], shuffle: bool, message: str
) -> None:
    _save_checkpoint(tmp_path, 2)
    with pytest.raises(UserError, match=message):
        plan_job(
            _config(tmp_path, **change),
            model=FunctionProvider(_linear),
            task=_Nothing(),
            data=DatasetProvider(DATA, shuffle=shuffle),
        )


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ([*DATA, DATA[0]], r"data\.indexed\.samples was 8, and now is 9"),
        ([*DATA[1:], torch.ones(3)], r"data\.indexed\.contents was \"\w+\", and now is \"\w+\""),
    ],
)
def test_a_run_keeps_its_data(data: list[Tensor], line: str, tmp_path: Path) -> None:
    _save_checkpoint(tmp_path, 2)
    message = (
        rf"the run in .* was started with other training data, or with another order of the data:\n(.*\n)?  {line}\n"
    )
    with pytest.raises(UserError, match=message):
        plan_job(_config(tmp_path), model=FunctionProvider(_linear), task=_Nothing(), data=DatasetProvider(data))
    adopting = _config(tmp_path, run={"folder": tmp_path / "runs", "adopt": True})
    plan_job(adopting, model=FunctionProvider(_linear), task=_Nothing(), data=DatasetProvider(data))


class _TakesNames(_Nothing):
    def metrics(self) -> dict[str, Metric]:
        return {"loss": Sum(), "mine": Sum(), "step": Sum()}


def test_metrics_may_not_take_the_names_of_the_trainer(tmp_path: Path) -> None:
    trainer = Trainer(_config(tmp_path), model=_linear, data=DATA, task=_TakesNames())
    with pytest.raises(
        UserError, match=r"the task's metrics include loss, step, which the Trainer reports itself; rename"
    ):
        trainer.train()
    assert not _files(tmp_path)


def test_a_folder_without_initial_weights_is_refused(tmp_path: Path) -> None:
    where = re.escape(str(tmp_path / "absent"))
    message = rf"initial_weights = {where}: {where} contains no model; expected model\.safetensors or .* in it\."
    _refused(tmp_path, message, initial_weights=tmp_path / "absent")


def test_initial_weights_of_other_shapes_are_refused(tmp_path: Path) -> None:
    save_model_state(nn.Linear(5, 2, bias=False), tmp_path / "weights")
    where = re.escape(str(tmp_path / "weights"))
    message = (
        rf"initial_weights = {where}: the checkpoint, the mapper and the model do not match:\n"
        r"(.*\n)*.*bias\n(.*\n)*.*weight: got \[2, 5\] .*; expected \[2, 3\] .*"
    )
    _refused(tmp_path, message, initial_weights=tmp_path / "weights")


def test_initial_weights_are_checked_through_the_mapper(tmp_path: Path) -> None:
    save_model_state(nn.Linear(3, 2, bias=False), tmp_path / "weights", rename("weight", "w"))
    config = _config(tmp_path, initial_weights=tmp_path / "weights")
    plan_job(config, model=_Renamed(), task=_Nothing(), data=DatasetProvider(DATA))
    with pytest.raises(UserError, match=r"(?s)weight.*bias|bias.*weight"):
        plan_job(config, model=FunctionProvider(_linear), task=_Nothing(), data=DatasetProvider(DATA))


@pytest.mark.parametrize(
    ("checkpoint", "message", "evaluates"),
    [
        ({"local_every": 5}, "got checkpoint.local_every without checkpoint.local_folder", False),
        ({"local_folder": "disk"}, "got checkpoint.local_folder without checkpoint.local_every", False),
        ({"memory_every": 100}, "checkpoint.memory_every = 100 is not less than checkpoint.every = 100", False),
        ({"replicas": 2}, "checkpoint.replicas = 2 has no effect without memory_every or local_every", False),
        ({"keep_every": 150}, "checkpoint.keep_every = 150 is not a multiple of checkpoint.every = 100", False),
        ({"keep_every": 200, "keep_last": None}, "checkpoint.keep_last is null, which keeps every checkpoint", False),
        ({"keep_best": 1, "keep_last": None}, "checkpoint.keep_last is null, which keeps every checkpoint", True),
        ({"keep_best": 1}, "checkpoints are ranked by 'loss', but there are no evaluation data", False),
        (
            {"keep_best": 1, "best_by": "x"},
            "checkpoints are ranked by 'x', but evaluations measure loss; expected",
            True,
        ),
        ({"keep_best": 1, "every": 150}, "checkpoint.every = 150 is not a multiple of evaluation.every = 100", True),
    ],
)
def test_retention_rules_without_an_effect_are_refused(
    tmp_path: Path, checkpoint: dict[str, Any], message: str, evaluates: bool
) -> None:
    _refused(tmp_path, re.escape(message) + ".*", checkpoint=checkpoint, evaluation_data=DATA if evaluates else None)


def test_the_best_of_all_checkpoints_is_exported_if_all_are_kept(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint": {"keep_last": None}, "export": "best"}
    data = DatasetProvider(DATA, evaluation=DATA)
    plan_job(_config(tmp_path, **settings), model=FunctionProvider(_linear), task=_Nothing(), data=data)
    _refused(tmp_path, "checkpoints are ranked by 'loss', but there are no evaluation data.*", **settings)


class _Judged(_Nothing):
    def metrics(self) -> dict[str, Metric]:
        return {"quality": Compose({"f1": Sum(), "best": Compose({"recall": Sum()})})}


def test_best_by_may_be_one_value_of_a_metric(tmp_path: Path) -> None:
    data = DatasetProvider(DATA, evaluation=DATA)

    def check(best_by: str) -> None:
        config = _config(tmp_path, checkpoint={"keep_best": 1, "best_by": best_by})
        plan_job(config, model=FunctionProvider(_linear), task=_Judged(), data=data)

    check("quality/f1")
    check("quality/best/recall")
    with pytest.raises(
        UserError, match=r"by 'quality', but evaluations measure loss, quality/best/recall, quality/f1; exp"
    ):
        check("quality")


def _half_frozen(_stage: StageInfo) -> nn.Module:
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    return model


def test_a_checkpoint_without_frozen_parameters_needs_the_initial_weights(tmp_path: Path) -> None:
    save_model_state(nn.Linear(3, 2), tmp_path / "weights")
    settings = _config(tmp_path).model_dump(mode="json")
    state: JsonValue = {
        "config": settings,
        "data_identity": IDENTITY,
        "code": {},
        "parts": {"data": {"position": 16, "stream": {"position": 16}}},
        "frozen_digest": "0123456789abcdef",
    }
    tensors = model_tensors(_half_frozen(StageInfo()), trainable_only=True)
    CheckpointStore(tmp_path / "runs" / "run" / "checkpoints").save(2, tensors, state=state)
    config = _config(tmp_path, initial_weights=tmp_path / "weights", checkpoint={"trainable_only": True})
    plan_job(config, model=FunctionProvider(_half_frozen), task=_Nothing(), data=DatasetProvider(DATA))
    (tmp_path / "weights").rename(tmp_path / "away")
    with pytest.raises(UserError, match=r"initial_weights = .*weights contains no model"):
        plan_job(config, model=FunctionProvider(_half_frozen), task=_Nothing(), data=DatasetProvider(DATA))
    message = r"different model:\n  the model has the trainable weight, the checkpoint does not\n"
    with pytest.raises(UserError, match=message):
        plan_job(config, model=FunctionProvider(_linear), task=_Nothing(), data=DatasetProvider(DATA))


def test_all_retention_rules_can_be_combined(tmp_path: Path) -> None:
    config = _config(tmp_path, checkpoint={"every": 200, "keep_every": 400, "keep_best": 2, "higher_is_better": True})
    plan_job(config, model=FunctionProvider(_linear), task=_Nothing(), data=DatasetProvider(DATA, evaluation=DATA))
    assert config.checkpoint.retention == Retention(last=2, every=400, best=2, higher_is_better=True)


def test_a_mount_that_is_read_only_may_be_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = SimpleNamespace(f_flag=os.ST_RDONLY)
    monkeypatch.setattr("os.statvfs", lambda path: mounted)
    with pytest.raises(StateError, match="is on a file system that is mounted read-only"):
        check_writable(tmp_path / "run")


class _OwnGenerator:
    """Samples with draws of a generator, by its name."""

    def __init__(self, kind: str) -> None:
        self.kind, self.numpy, self.torch = kind, np.random.default_rng(0), torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        match self.kind:
            case "numpy":
                return torch.from_numpy(self.numpy.random(3))
            case "torch":
                return torch.rand(3, generator=self.torch)
            case "unseeded":
                return torch.from_numpy(np.random.default_rng().random(3))
        return torch.rand(3) + random.random() + torch.from_numpy(np.random.rand(3))  # noqa: S311

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) + self.torch.initial_seed() + torch.rand(1, generator=self.torch)


@pytest.mark.parametrize("kind", ["numpy", "torch", "unseeded", "collate"])
def test_draws_of_a_generator_that_no_position_seeds_are_refused(kind: str, tmp_path: Path) -> None:
    data = _OwnGenerator(kind)
    provider = DatasetProvider(data, collate=data.collate) if kind == "collate" else DatasetProvider(data)
    with pytest.raises(UserError, match=r"the first samples twice gave different values, .*Draw from random,"):
        plan_job(_config(tmp_path), model=FunctionProvider(_linear), task=_Nothing(), data=provider)
    held_out = DatasetProvider(_OwnGenerator("global"), evaluation=_OwnGenerator("numpy"))
    with pytest.raises(UserError, match=r"the first samples twice gave different values"):
        plan_job(_config(tmp_path), model=FunctionProvider(_linear), task=_Nothing(), data=held_out)
    whole = DatasetProvider(_OwnGenerator("global"), evaluation=_OwnGenerator("global"))
    plan_job(_config(tmp_path), model=FunctionProvider(_linear), task=_Nothing(), data=whole)


class _OpenedAtFirstRead(torch.utils.data.Dataset[torch.Tensor]):
    is_open = False

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.is_open = True
        return torch.full((3,), float(index))


def test_with_workers_the_checks_leave_the_files_of_a_dataset_closed(tmp_path: Path) -> None:
    """Forked workers would share the position of an open file, and read each other's samples."""
    identities = []
    for num_workers in (0, 1):
        data, held_out = _OpenedAtFirstRead(), _OpenedAtFirstRead()
        config = _config(tmp_path, data={"num_workers": num_workers})
        trainer = Trainer(config, model=_linear, data=data, evaluation_data=held_out, task=_Nothing())
        plan = trainer.plan_for(Launch())
        identities.append([plan.data_identity(), plan.evaluation_identity()])
        assert data.is_open == held_out.is_open == (num_workers == 0)
    assert identities[0] == identities[1] != [None, None]


class _WithFiles(ModelProvider):
    def build(self, stage: StageInfo) -> nn.Module:
        return nn.Linear(3, 2)

    def export_files(self) -> Any:
        return {"config.json": {"layers": {1, 2}}}


@pytest.mark.parametrize(
    ("model", "file", "from_scratch", "message"),
    [
        (_linear, "run/export/notes.md", False, r"export = true, but .*export holds notes\.md, .* --export false"),
        (_linear, "run/export/notes.md", True, None),
        (_linear, "run/export/tokenizer.json", False, None),
        (_linear, "run/export", False, r"export is a file; expected a folder"),
        (_WithFiles(), "else", False, r"export = true, but the files beside the weights: .*set"),
    ],
)
def test_what_the_export_writes_is_checked_before_the_start(
    tmp_path: Path, model: Any, file: str, from_scratch: bool, message: str | None
) -> None:
    path = tmp_path / "runs" / file
    path.parent.mkdir(parents=True)
    path.touch()
    config = _config(tmp_path, run={"folder": tmp_path / "runs", "from_scratch": from_scratch})
    provider = model_provider(model)
    if message is None:
        assert export_mapper_of(provider, nn.Linear(3, 2), config) is None
    else:
        with pytest.raises(UserError, match=message):
            export_mapper_of(provider, nn.Linear(3, 2), config)


def test_the_folder_of_checkpoints_is_checked_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = _config(tmp_path, checkpoint={"folder": str(tmp_path / "file")})
    with pytest.raises(UserError, match=r"checkpoint folder .*file is a file, not a folder\. .* --checkpoint\.folder"):
        Trainer(config, model=_linear, data=DATA, task=_Nothing()).plan_for(Launch())
