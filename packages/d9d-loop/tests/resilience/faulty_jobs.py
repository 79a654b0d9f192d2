"""Trainer jobs in which a fault occurs on one rank."""

import multiprocessing
import os
import resource
import signal
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from forked_faults import Place
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn import functional as F

from d9d_loop import (
    CheckpointSaved,
    CheckpointStarted,
    Finished,
    Inference,
    InferenceConfig,
    InferenceTask,
    Loss,
    ModelExported,
    PartWritten,
    StepDone,
    Task,
    Trainer,
    TrainerConfig,
    cli_main,
)
from d9d_loop.events import Event
from d9d_loop.resilience import Stopped
from d9d_metrics import TensorBoardTracker

BAD_STEP = 3
STARTUP_SECONDS = 120  # also the timeout of collectives, which applies where the step timeout does not
_NUM_STEPS = 6
_SIGNALS = {
    "is killed": signal.SIGKILL,
    "is stopped": signal.SIGSTOP,
    "is asked twice": signal.SIGTERM,
    "is asked again when it leaves": signal.SIGTERM,
}


def trains(place: Place, fault: str, culprit: int, **sections: Any) -> None:
    """Run a job of two ranks with a fault on one of them in step 3."""
    own = _Fault(fault if place.rank == culprit else "nothing", place)
    trainer = _trainer(own, **sections)
    trainer.events.on(StepDone, own.on_step)
    if own.name == "is asked twice":
        trainer.events.on(CheckpointStarted, own.ask_again)
    if own.name == "tracker is down":
        mock.patch.object(TensorBoardTracker, "__init__", own.refuse).start()
    with cli_main():
        try:
            trainer.train()
        except Stopped:
            if own.name == "is asked again when it leaves":
                os.kill(os.getpid(), signal.SIGTERM)
            raise


def takes_long(place: Place, step_seconds: float) -> None:
    """Run a job whose handlers together exceed the step timeout, and whose final handlers each exceed it."""
    timeouts = {"startup_seconds": STARTUP_SECONDS, "step_seconds": step_seconds}
    nothing = _Fault("nothing", place)
    trainer = _trainer(nothing, export=True, resilience={"timeouts": timeouts})

    def sleep(event: Event) -> None:
        if event.step == _NUM_STEPS:
            is_at_the_end = isinstance(event, Finished | ModelExported)
            time.sleep((1.3 if is_at_the_end else 0.6) * step_seconds)

    for kind in (StepDone, CheckpointStarted, CheckpointSaved, ModelExported, Finished):
        trainer.events.on(kind, sleep)
    with cli_main():
        trainer.train()


def infers(place: Place, culprit: int) -> None:
    """Run an inference of two ranks without collectives in forward; one rank is stopped after two parts."""
    fault = _Fault("is stopped" if place.rank == culprit else "nothing", place)
    inference = _inference(fault, _Samples(fault), part_size=2)
    inference.events.on(PartWritten, lambda event: fault.strike() if event.step == 4 else None)
    with cli_main():
        inference.run()


def infers_slowly(place: Place, culprit: int) -> None:
    """Run one part of three batches, each within the timeout but not all together; the other rank has no part."""
    fault = _Fault("is slow" if place.rank == culprit else "nothing", place)
    with cli_main():
        _inference(fault, [_Samples(fault)[index] for index in range(3)], part_size=3).run()


def _inference(fault: "_Fault", data: Any, *, part_size: int) -> Inference:
    config = {
        "batch_size": 1,
        "part_size": part_size,
        "mesh": {"data_parallel_replicate": 2},
        "run": {"folder": fault.place.folder},
        "resilience": {"timeouts": {"startup_seconds": STARTUP_SECONDS, "step_seconds": 2}},
    }
    return Inference(
        InferenceConfig.model_validate(config), model=lambda stage: _Model(fault), data=data, task=_Outputs()
    )


class _Outputs(InferenceTask):
    def inputs(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"x": batch["x"]}

    def results(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> list[float]:
        return outputs[:, 0].tolist()


@dataclass(frozen=True, slots=True)
class _Fault:
    """Fault of this rank; the time from the fault to the exit of the ranks is measured."""

    name: str
    place: Place

    def strikes(self, name: str, *, when: bool = True) -> bool:
        """Return True if this fault has the given name and is due."""
        if self.name != name or not when:
            return False
        self.place.fault_is_now()
        return True

    def raises(self, name: str, *, when: bool) -> None:
        if self.strikes(f"{name} raises", when=when):
            raise KeyError(f"in the {name}")

    def on_step(self, event: StepDone) -> None:
        if event.step == BAD_STEP:
            self.strike()

    def strike(self) -> None:
        self.raises("event handler", when=True)
        if self.strikes("disk is full"):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit then raises an error
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
        if self.strikes("waits"):
            while not (self.place.folder / "go").exists():
                time.sleep(0.01)
        if self.name in _SIGNALS:
            if self.name != "is asked twice":  # for two signals, the second one counts
                self.place.fault_is_now()
            os.kill(os.getpid(), _SIGNALS[self.name])

    def ask_again(self, event: CheckpointStarted) -> None:
        """Send a second signal during the slow save that the first signal requested."""
        if event.step > BAD_STEP:
            time.sleep(0.5)
            self.place.fault_is_now()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)

    def refuse(self, *_arguments: Any) -> NoReturn:
        self.place.fault_is_now()
        raise ConnectionError("the tracker is down")


class _Model(nn.Module):
    def __init__(self, fault: _Fault) -> None:
        super().__init__()
        self.linear, self.fault, self.num_calls = nn.Linear(4, 1), fault, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.fault.raises("model", when=self.num_calls == BAD_STEP)
        if self.fault.name == "is slow" and x.device.type != "meta":
            time.sleep(1.2)
        y = self.linear(x)
        if self.fault.strikes("gradient is NaN", when=self.num_calls >= BAD_STEP):  # also when the step is replayed
            y.register_hook(lambda gradient: gradient * torch.nan)
        return y


class _Regression(Task):
    def __init__(self, fault: _Fault) -> None:
        self.fault, self.num_calls = fault, 0

    def inputs(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"x": batch["x"]}

    def loss(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> Loss:
        self.num_calls += 1
        self.fault.raises("task", when=self.num_calls == BAD_STEP)
        return Loss(F.mse_loss(outputs, batch["y"], reduction="sum"), weight=batch["y"].numel())


class _Samples:
    def __init__(self, fault: _Fault) -> None:
        self.fault, self.num_calls = fault, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.num_calls += 1
        self.fault.raises("data", when=self.num_calls == 4 * BAD_STEP)
        if self.fault.strikes("data worker is killed", when=self.num_calls == 4 * BAD_STEP):
            os.kill(os.getpid(), signal.SIGKILL)
        return {"x": torch.full((4,), index / 64), "y": torch.full((1,), 1.0)}


def _trainer(fault: _Fault, **more: Any) -> Trainer:
    config = {
        "steps": _NUM_STEPS,
        "batch": {"global_size": 8},
        "mesh": {"data_parallel_shard": 2},
        "checkpoint": {"every": 2},
        "run": {"folder": fault.place.folder},
        "export": False,
        "resilience": {"health": {"memory_mib": 1, "message_mib": 1, "matrix_size": 32}},  # takes milliseconds
        **more,
    }
    return Trainer(
        TrainerConfig.model_validate(config),
        model=lambda stage: _Model(fault),
        data=_Samples(fault),
        task=_Regression(fault),
    )


def restarted() -> list[tuple[int, list[int]]]:
    """Run a job that torchrun restarts after a kill; return each rank's total steps and those after the restart."""
    multiprocessing.current_process().daemon = False  # allows child processes, unlike a rank of the pool
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
    """Run in a process forked by torchrun's agent."""
    os.environ["D9D_DEVICE"] = "cpu"
    torch.set_num_threads(1)
    nothing = _Fault("nothing", Place(Path(folder), int(os.environ["RANK"])))
    trainer = _trainer(nothing, checkpoint={"every": 2, "background": False})
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
