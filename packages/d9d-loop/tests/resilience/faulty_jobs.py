"""Real jobs of the Trainer in which a rank does something bad, or something bad is done to it."""

import multiprocessing
import os
import resource
import signal
import tempfile
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from forked_faults import Place
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn import functional as F

from d9d_loop import CheckpointStarted, Loss, StepDone, Task, Trainer, TrainerConfig, command_line
from d9d_loop.resilience import Stopped
from d9d_metrics import TensorBoardTracker

BAD_STEP = 3
_NUM_STEPS = 6


def trains(place: Place, fault: str, culprit: int, **sections: Any) -> None:
    """A job of two ranks; something happens to one of them in step 3."""
    own_fault = fault if place.rank == culprit else "nothing"
    trainer = _trainer(place.folder, own_fault, **sections)
    match own_fault:
        case "event handler raises":
            trainer.events.on(StepDone, _raise)
        case "disk is full":
            trainer.events.on(StepDone, _fill_disk)
        case "is killed":
            trainer.events.on(StepDone, partial(_signal_itself, signal.SIGKILL))
        case "is stopped":
            trainer.events.on(StepDone, partial(_signal_itself, signal.SIGSTOP))
        case "is asked twice" | "is asked again when it leaves":
            trainer.events.on(StepDone, partial(_signal_itself, signal.SIGTERM))
        case "tracker is down":
            mock.patch.object(TensorBoardTracker, "__init__", _refuse).start()
    if own_fault == "is asked twice":
        trainer.events.on(CheckpointStarted, _ask_again)
    with command_line():
        try:
            trainer.train()
        except Stopped:
            if own_fault == "is asked again when it leaves":
                os.kill(os.getpid(), signal.SIGTERM)
            raise


class _Model(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.linear, self.fault, self.num_calls = nn.Linear(4, 1), fault, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.fault == "model raises" and self.num_calls == BAD_STEP:
            raise KeyError("in the model")
        y = self.linear(x)
        if self.fault == "gradient is NaN" and self.num_calls >= BAD_STEP:  # also when the step is done again
            y.register_hook(lambda gradient: gradient * torch.nan)
        return y


class _Regression(Task):
    def __init__(self, fault: str) -> None:
        self.fault, self.num_calls = fault, 0

    def inputs(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"x": batch["x"]}

    def loss(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> Loss:
        self.num_calls += 1
        if self.fault == "task raises" and self.num_calls == BAD_STEP:
            raise KeyError("in the task")
        return Loss(F.mse_loss(outputs, batch["y"], reduction="sum"), weight=batch["y"].numel())


class _Samples:
    def __init__(self, fault: str) -> None:
        self.fault, self.num_calls = fault, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.num_calls += 1
        if self.fault == "data raises" and self.num_calls == 4 * BAD_STEP:
            raise KeyError("in the data")
        if self.fault == "data worker is killed" and self.num_calls == 4 * BAD_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"x": torch.full((4,), index / 64), "y": torch.full((1,), 1.0)}


def _trainer(folder: Path, fault: str, **more: Any) -> Trainer:
    config = {
        "steps": _NUM_STEPS,
        "batch": {"global_size": 8},
        "mesh": {"data_parallel_shard": 2},
        "checkpoint": {"every": 2},
        "run": {"folder": folder},
        "export": False,
        **more,
    }
    return Trainer(
        TrainerConfig.model_validate(config),
        model=lambda stage: _Model(fault),
        data=_Samples(fault),
        task=_Regression(fault),
    )


def _raise(event: StepDone) -> None:
    if event.step == BAD_STEP:
        raise KeyError("in an event handler")


def _fill_disk(event: StepDone) -> None:
    if event.step == BAD_STEP:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then what writes too much gets an error
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))


def _signal_itself(number: signal.Signals, event: StepDone) -> None:
    if event.step == BAD_STEP:
        os.kill(os.getpid(), number)


def _ask_again(event: CheckpointStarted) -> None:
    """In the save that the first signal asked for, which takes long."""
    if event.step > BAD_STEP:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)


def _refuse(*_arguments: Any) -> NoReturn:
    raise ConnectionError("the tracker is down")


def restarted() -> list[tuple[int, list[int]]]:
    """A job that torchrun restarts, because a rank was killed; each rank's steps in all, and those of its last life."""
    multiprocessing.current_process().daemon = False  # may have children, as the pool's rank may not
    with tempfile.TemporaryDirectory(prefix="d9d-elastic-") as folder:
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=2,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            max_restarts=1,
            monitor_interval=0.05,
            start_method="fork",
        )
        results = elastic_launch(launch, _life)(folder)
    return [results[rank] for rank in range(2)]


def _life(folder: str) -> tuple[int, list[int]]:
    """In a process that torchrun's agent forked."""
    os.environ["D9D_DEVICE"] = "cpu"
    torch.set_num_threads(1)
    trainer = _trainer(Path(folder), "nothing", checkpoint={"every": 2, "background": False})
    steps: list[int] = []

    def on_step(event: StepDone) -> None:
        steps.append(event.step)
        if (
            event.step == _NUM_STEPS - 1
            and os.environ["RANK"] == "1"
            and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.events.on(StepDone, on_step)
    return trainer.train().steps, steps
