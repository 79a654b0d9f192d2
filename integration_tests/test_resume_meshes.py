"""A job resumes in another layout with the unread samples, in order, and with the same losses.

Each layout trains once from the start and saves in the middle; each is then resumed in others. In float64 all
of them agree with one process that was never interrupted. In the same layout, a job that has lost a host resumes from
the memory of the others with the same bits.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from d9d_dist import ContextSplit, DistributedContext, MeshConfig, StageInfo
from d9d_dist.testing import run_ranks
from d9d_loop import (
    ConfigReady,
    DataProvider,
    Loss,
    ModelProvider,
    StepDone,
    StepStarted,
    Task,
    Trainer,
    TrainerConfig,
)
from d9d_loop.data import IndexedStream, SampleStream, ShuffledStream
from d9d_loop.engine import local_tiers
from d9d_loop.testing import parse_layout
from d9d_modules import parallelize_decoder
from d9d_moe import Qwen3MoeForCausalLM, Qwen3MoeParams, parallelize_moe
from d9d_pipeline import Inputs
from d9d_state import CheckpointStore

STEPS, SAVED = 4, 2
GLOBAL_SIZE = 4
NUM_SAMPLES = 11  # an epoch ends in the third step, the first one after the resume
LENGTH, VOCAB = 8, 16

LAYOUTS = (
    "",
    "dp_shard=2",
    "dp_replicate=2,microbatch=1",
    "tp=2",
    "cp_shard=2",
    "pp=2,microbatch=1",
    "ep=2,dp_shard=2",
    "dp_shard=2,tp=2",
    "pp=2,dp_replicate=2,schedule=zb1p,microbatch=1",
    "ep=4,dp_shard=4",
    "ep=2,tp=2,cp_replicate=2",
    "pp=2,ep=2,dp_shard=2,microbatch=1",
)
PAIRS = [(source, LAYOUTS[(index + by) % len(LAYOUTS)]) for by in (5, 1) for index, source in enumerate(LAYOUTS)]
SAMPLE = ("", "tp=2", "pp=2,ep=2,dp_shard=2,microbatch=1")
"""Layouts of the default run, each resumed once in the next."""
LOST = "lost"
"""Name of runs that save every step in the memory of two hosts, and are interrupted in their last step."""
SAME = ("pp=2,ep=2,dp_shard=2,microbatch=1", "tp=2")
"""Layouts that are also resumed in themselves, with the same bits. The default run resumes only the first."""

Batch: TypeAlias = Mapping[str, Tensor]
Job: TypeAlias = tuple[str, Path]
"""Layout and run folder."""

_PARAMS = Qwen3MoeParams(
    vocab_size=VOCAB,
    hidden_size=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=12,
    initializer_range=0.3,
    num_experts=4,
    top_k=2,
    expert_intermediate_size=6,
)


@final
class _Decoder(ModelProvider):
    def build(self, stage: StageInfo) -> nn.Module:
        return Qwen3MoeForCausalLM(_PARAMS, stage).double()

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        parallelize_decoder(model, ctx, experts=parallelize_moe)


@final
class _Numbered(DataProvider):
    """Rows that contain their sample index."""

    def training(self, *, seed: int) -> SampleStream:
        tokens = torch.randint(VOCAB, (NUM_SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
        rows = [
            {"ids": row[:-1], "labels": row[1:], "positions": torch.arange(LENGTH), "number": torch.tensor(number)}
            for number, row in enumerate(tokens)
        ]
        return ShuffledStream(IndexedStream(rows, seed=seed), window=5, seed=seed)


@final
class _NextToken(Task):
    def __init__(self) -> None:
        self.seen: list[list[int]] = []  # samples of each microbatch

    def inputs(self, batch: Batch) -> Inputs:
        self.seen.append(batch["number"].tolist())
        return Inputs(batch["ids"], labels=batch["labels"], position_ids=batch["positions"])

    def loss(self, outputs: Tensor, batch: Batch) -> Loss:
        return Loss(outputs.sum(), weight=outputs.numel())

    def split_sequence(self, batch: Batch, split: ContextSplit) -> Batch:
        rows = {name: batch[name] for name in ("ids", "labels", "positions")}
        return {**batch, **split.split(rows)}


class _Cut(Exception):  # noqa: N818 - not an error of the job
    pass


@dataclass(slots=True)
class _Life:
    """Record of one process of a rank, from its start to its end."""

    dp_rank: int = 0
    microbatches: dict[int, list[list[int]]] = field(default_factory=dict)
    """Samples of each microbatch of the rank, by step."""
    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)


def _live(layout: str, folder: Path) -> _Life:
    """Run or resume a job on every rank."""
    parsed = parse_layout(layout)
    off = {"enabled": False}
    config = {
        "steps": STEPS,
        "batch": {"global_size": GLOBAL_SIZE, "microbatch_size": parsed.microbatch_size},
        "mesh": parsed.mesh,
        "pipeline": {"schedule": parsed.schedule, "draw": False},
        "optimizer": {"learning_rate": 0.05},
        "lr_schedule": {"warmup_steps": 2},
        "gradients": {"max_norm": 0.5},
        "checkpoint": {"every": SAVED, "background": False},
        **({"checkpoint": {"every": STEPS, "memory_every": 1}} if folder.name == LOST else {}),
        "run": {"folder": folder},
        "trackers": (),
        "logging": {"progress": False},
        "resilience": {"health": off, "watchdog": off},
        "export": False,
    }
    life, task = _Life(), _NextToken()
    is_cut = folder.name == LOST and not folder.exists()

    def on_step(done: StepDone) -> None:
        life.microbatches[done.step], task.seen = task.seen, []
        life.losses[done.step], life.norms[done.step] = done.loss.item(), done.grad_norm.item()
        if is_cut and done.step == STEPS:
            raise _Cut

    def on_start(ready: ConfigReady) -> None:
        life.dp_rank = ready.ctx.coordinate("batch", "dp")

    trainer = Trainer(TrainerConfig.model_validate(config), model=_Decoder(), data=_Numbered(), task=task)
    trainer.events.on(ConfigReady, on_start)
    trainer.events.on(StepStarted, lambda _: task.seen.clear())  # drops the shape check before the first step
    trainer.events.on(StepDone, on_step)
    host = folder.parent / f"host-{2 * dist.get_rank() // dist.get_world_size()}" if dist.is_initialized() else folder
    with mock.patch.object(local_tiers, "MEMORY", host), suppress(_Cut):
        trainer.train()
    return life


def _live_all(jobs: Sequence[Job]) -> list[_Life]:
    """Run jobs in sequence in one process group, which saves time."""
    lives = []
    with MeshConfig(data_parallel_shard=-1).build():
        for layout, folder in jobs:
            try:
                lives.append(_live(layout, folder))
            except Exception as error:
                error.add_note(f"in the layout {layout!r}, {folder}")
                raise
    return lives


@dataclass(frozen=True, slots=True)
class _Course:
    """Record of a job: samples of each step in the global order, losses, and gradient norms."""

    samples: dict[int, list[int]]
    losses: dict[int, float]
    norms: dict[int, float]


def _courses(jobs: Sequence[Job]) -> list[_Course]:
    """Run jobs on the number of ranks of their layouts."""
    courses: dict[Job, _Course] = {}
    for world_size in {parse_layout(layout).world_size for layout, _ in jobs}:
        ours = [job for job in jobs if parse_layout(job[0]).world_size == world_size]
        lives_of_ranks = run_ranks(_live_all, ours, world_size=world_size, timeout=400)
        courses.update(zip(ours, map(_course, zip(*lives_of_ranks, strict=True)), strict=True))
    return [courses[job] for job in jobs]


def _course(lives: Sequence[_Life]) -> _Course:
    """Merge the records of all ranks; ranks with the same samples must agree, and all losses must be equal."""
    first, by_dp_rank = lives[0], {life.dp_rank: life.microbatches for life in lives}
    assert all((life.losses, life.norms) == (first.losses, first.norms) for life in lives)
    assert all(life.microbatches == by_dp_rank[life.dp_rank] for life in lives)
    samples = {
        step: [
            sample
            for microbatches in zip(*(by_dp_rank[rank][step] for rank in sorted(by_dp_rank)), strict=True)
            for microbatch in microbatches
            for sample in microbatch
        ]
        for step in first.losses
    }
    return _Course(samples, first.losses, first.norms)


def _left_in_the_middle(run: Path, folder: Path) -> Path:
    """Return a copy of a run killed after its first checkpoint."""
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "run" / "checkpoints" / f"step-{STEPS:08}")
    return folder


def _assert_close(found: _Course, expected: _Course, what: str) -> None:
    assert found.samples == {step: expected.samples[step] for step in found.samples}, what
    for values, others in ((found.losses, expected.losses), (found.norms, expected.norms)):
        assert values == pytest.approx({step: others[step] for step in values}, rel=1e-9), what


@pytest.mark.slow
@pytest.mark.long
def test_resumes_in_any_other_layout_with_the_unread_samples(tmp_path: Path, exhaustive: bool) -> None:
    layouts = LAYOUTS if exhaustive else SAMPLE
    runs = {layout: tmp_path / str(number) for number, layout in enumerate(layouts)}
    whole = dict(zip(layouts, _courses(list(runs.items())), strict=True))
    one = whole[""]
    seen = [sample for samples in one.samples.values() for sample in samples]
    assert len(set(seen[: NUM_SAMPLES - 1])) == NUM_SAMPLES - 1  # the last sample shares a window with the next epoch
    for layout, course in whole.items():
        assert list(course.losses) == [1, 2, 3, 4]
        _assert_close(course, one, layout)
    assert len(set(PAIRS)) >= 20
    pairs = PAIRS if exhaustive else zip(SAMPLE, (*SAMPLE[1:], SAMPLE[0]), strict=True)
    ways = [*pairs, *((layout, layout) for layout in (SAME if exhaustive else SAME[:1]))]
    folders = [_left_in_the_middle(runs[source], tmp_path / f"way-{number}") for number, (source, _) in enumerate(ways)]
    jobs = [(target, folder) for (_, target), folder in zip(ways, folders, strict=True)]
    for (source, target), course in zip(ways, _courses(jobs), strict=True):
        assert list(course.losses) == [3, 4]
        _assert_close(course, one, f"from {source!r} to {target!r}")
        if source == target:
            expected = whole[source]
            assert (course.losses, course.norms) == (_last(expected.losses), _last(expected.norms)), source


@pytest.mark.slow
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout])
@pytest.mark.sample("tp=2")
def test_a_job_that_lost_the_memory_of_a_host_resumes_bitwise(tmp_path: Path, layout: str) -> None:
    calm, lost = tmp_path / "calm", tmp_path / LOST
    (whole, _) = _courses([(layout, calm), (layout, lost)])
    assert not list((lost / "run" / "checkpoints").glob("step-*"))
    shutil.rmtree(tmp_path / "host-1")
    (resumed,) = _courses([(layout, lost)])
    assert list(resumed.losses) == [STEPS]
    assert (resumed.losses, resumed.norms) == ({STEPS: whole.losses[STEPS]}, {STEPS: whole.norms[STEPS]})
    found, expected = (CheckpointStore(run / "run" / "checkpoints").newest() for run in (lost, calm))
    assert found is not None
    assert expected is not None
    assert found.manifest.tensors == expected.manifest.tensors  # with the digest of each chunk
    assert not list(tmp_path.glob("host-*/d9d-*")), "a complete run leaves nothing in memory"


def _last(values: dict[int, float]) -> dict[int, float]:
    return {step: value for step, value in values.items() if step > SAVED}
