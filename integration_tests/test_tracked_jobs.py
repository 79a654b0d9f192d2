"""A job resumed from an older checkpoint is one run in each tracker, with every step once."""

import json
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from d9d_loop import Loss, StepDone, Task, Trainer, TrainerConfig
from d9d_loop.events import Event
from d9d_metrics import read_metrics

STEPS = 6
TRACKERS = [
    {"kind": "jsonl"},
    {"kind": "tensorboard"},
    {"kind": "wandb", "project": "test", "mode": "offline"},
    {"kind": "aim"},
]


class _Squares(Task):
    weight_unit = "samples"

    def inputs(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"input": batch}

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        return Loss((outputs - 1).square().sum(), weight=len(batch))


class _Stopped(Exception):  # noqa: N818 - not an error: simulates an interruption
    pass


def _trained(folder: Path, *, on_step: Callable[[Event], None] = lambda event: None) -> dict[int, float]:
    """Train, and return the losses of the job itself."""
    config = {
        "steps": STEPS,
        "batch": {"global_size": 4},
        "run": {"folder": folder},
        "checkpoint": {"every": 2, "keep_last": 5},
        "logging": {"every": 1, "progress": False},
        "resilience": {"health": {"memory_mib": 1, "message_mib": 1, "matrix_size": 32}},  # takes milliseconds
        "trackers": TRACKERS,
    }
    draws = torch.Generator().manual_seed(0)
    data = list(torch.randn(24, 3, generator=draws))
    trainer = Trainer(TrainerConfig.model_validate(config), model=lambda _: nn.Linear(3, 1), data=data, task=_Squares())
    losses: dict[int, float] = {}
    trainer.events.on(StepDone, lambda event: losses.update({event.step: event.loss.item()}))
    trainer.events.on(StepDone, on_step)
    trainer.train()
    return losses


def _stop_after_fifth(event: Event) -> None:
    if event.step == 5:
        raise _Stopped


@pytest.mark.full
def test_a_job_resumed_from_an_older_checkpoint_has_every_step_once_in_each_tracker(tmp_path: Path) -> None:
    with pytest.raises(_Stopped):
        _trained(tmp_path, on_step=_stop_after_fifth)
    run = tmp_path / "run"
    (newest,) = (run / "checkpoints").glob("*4")
    shutil.rmtree(newest)
    resumed = _trained(tmp_path)
    assert list(resumed) == [3, 4, 5, 6]
    _assert_in_jsonl(run, resumed)
    _assert_in_tensorboard(run, resumed)
    _assert_in_aim(run, resumed)
    _assert_in_wandb(run, resumed)


def _assert_one_curve(steps: list[int], values: list[float], resumed: dict[int, float]) -> None:
    assert steps == list(range(1, STEPS + 1))
    assert values[2:] == pytest.approx(list(resumed.values()), rel=1e-6)


def _assert_in_jsonl(run: Path, resumed: dict[int, float]) -> None:
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    _assert_one_curve([int(line["step"]) for line in lines], [line["loss"] for line in lines], resumed)


def _assert_in_tensorboard(run: Path, resumed: dict[int, float]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = {file.parent for file in run.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder)).Reload().Scalars("loss")
    _assert_one_curve([event.step for event in events], [event.value for event in events], resumed)


def _assert_in_aim(run: Path, resumed: dict[int, float]) -> None:
    import aim
    from aim.sdk.types import QueryReportMode

    time.sleep(0.6)  # Aim detects new runs only after half a second
    repository = aim.Repo(str(run.parent))
    repository._recreate_index()  # queries need this index, which `aim up` updates in the background
    found = repository.query_metrics("metric.name == 'loss'", report_mode=QueryReportMode.DISABLED)
    ((metric,),) = [list(of_run) for of_run in found.iter_runs()]
    steps, (values, *_) = metric.data.items_list()
    curve = dict(sorted(zip(map(int, steps), values, strict=True)))  # Aim stores them unordered
    _assert_one_curve(list(curve), list(curve.values()), resumed)


def _assert_in_wandb(run: Path, resumed: dict[int, float]) -> None:
    """Offline, each start of a job writes a file; merged, they give the first value of each step."""
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    lives = [_finished_records(file) for file in files]
    assert len({record.run.run_id for life in lives for record in life if record.HasField("run")}) == 1
    curves = [_losses(life) for life in lives]
    assert [list(curve) for curve in curves] == [[1, 2, 3, 4], [3, 4, 5, 6]]
    merged = curves[1] | curves[0]
    _assert_one_curve(sorted(merged), [merged[step] for step in sorted(merged)], resumed)


def _losses(life: list[Any]) -> dict[int, float]:
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in life
        if record.HasField("history")
    ]
    return {row["_step"]: row["loss"] for row in rows if "loss" in row}


def _finished_records(file: Path) -> list[Any]:
    """Return the records of a file, after W&B's process has finished it."""
    for _ in range(3000):
        found = list(_records(file.read_bytes()))
        if any(record.HasField("exit") for record in found):
            return found
        time.sleep(0.1)
    raise AssertionError("W&B did not finish its run in five minutes")


def _records(content: bytes) -> Iterator[Any]:
    """Yield the protocol buffers of a LevelDB log."""
    from wandb.proto.wandb_internal_pb2 import Record  # ty: ignore[import-not-found] - generated by protobuf

    block, header, last_or_whole = 32768, struct.Struct("<IHB"), (1, 4)
    place, parts = header.size, b""
    while place + header.size <= len(content):
        if block - place % block < header.size:
            place += block - place % block
            continue
        _, length, kind = header.unpack_from(content, place)
        place += header.size
        parts += content[place : place + length]
        place += length
        if kind in last_or_whole:
            yield Record.FromString(parts)
            parts = b""
