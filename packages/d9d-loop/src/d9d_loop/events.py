"""Event classes of training and inference jobs. `event_bus` calls the handlers.

A training job emits ConfigReady, ModelReady, OptimizerReady, DataReady, the events of each step, ModelExported and
Finished, in this order. The events of a step are StepStarted, BackwardDone, GradientsReady, OptimizerDone, StepDone.
Steps with an evaluation or a checkpoint then emit EvaluationStarted, EvaluationDone, CheckpointStarted,
CheckpointSaved. A job that ends with an exception emits Failed.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch.optim import Optimizer

from d9d_dist import DistributedContext
from d9d_loop.job.train_result import TrainResult


@dataclass(frozen=True, slots=True)
class Event:
    """Base of events, which are emitted on every rank.

    Attributes:
        step: Number of completed optimizer steps; for the events within a step, that step, counted from 1.
    """

    step: int


@dataclass(frozen=True, slots=True)
class ConfigReady(Event):
    """The configuration is checked and the distributed context exists; the model is not sharded yet.

    `step` is 0, also in a resumed job.

    Attributes:
        config: Resolved configuration as JSON values.
        ctx: Distributed context of the job.
    """

    config: Mapping[str, JsonValue]
    ctx: DistributedContext


@dataclass(frozen=True, slots=True)
class ModelReady(Event):
    """The model is built and parallelized, and has its initial weights or those of the checkpoint of `step`.

    Attributes:
        model: The model; with pipeline parallelism, this rank's stages.
        ctx: Distributed context of the job.
    """

    model: nn.Module
    ctx: DistributedContext


@dataclass(frozen=True, slots=True)
class OptimizerReady(Event):
    """The optimizer is built; in a resumed job, it has the state of the checkpoint of `step`.

    Attributes:
        optimizer: Optimizer of this rank's parameters.
    """

    optimizer: Optimizer


@dataclass(frozen=True, slots=True)
class DataReady(Event):
    """Training data will be read next, from the first sample after those of the completed steps.

    Attributes:
        num_microbatches: Number of microbatches of a step on this rank.
        microbatch_size: Number of samples of a microbatch.
    """

    num_microbatches: int
    microbatch_size: int


@dataclass(frozen=True, slots=True)
class StepStarted(Event):
    """The microbatches of a step are on the device; the first forward follows."""


@dataclass(frozen=True, slots=True)
class BackwardDone(Event):
    """All forwards and backwards of a step are done.

    Gradients are sums over microbatches. Some of them are not yet reduced over ranks.

    Attributes:
        model: Model whose parameters hold the gradients.
    """

    model: nn.Module


@dataclass(frozen=True, slots=True)
class GradientsReady(Event):
    """The gradients of a step are reduced, divided by the global weight and clipped; the optimizer step follows.

    A handler may change the gradients in place.

    Attributes:
        model: Model whose parameters hold the gradients.
        grad_norm: Global norm of the gradients before clipping; 0-dim tensor on the device. It may be non-finite, in a
            step that may be skipped.
    """

    model: nn.Module
    grad_norm: Tensor


@dataclass(frozen=True, slots=True)
class OptimizerDone(Event):
    """The optimizer has updated the parameters, or skipped a bad step. Gradients are not yet cleared.

    Attributes:
        model: The model; with pipeline parallelism, this rank's stages.
        optimizer: Optimizer of this rank's parameters.
        taken: True if the parameters were updated, False if the step was skipped; 0-dim bool tensor on the device.
    """

    model: nn.Module
    optimizer: Optimizer
    taken: Tensor


@dataclass(frozen=True, slots=True)
class StepDone(Event):
    """An optimizer step is done.

    Attributes:
        loss: Weighted mean over the global batch; 0-dim tensor on the device. Reading its value synchronizes host and
            device.
        grad_norm: Global norm of the gradients before clipping; 0-dim tensor on the device.
        learning_rate: Learning rate of the optimizer's first parameter group in this step.
        asleep: `with event.asleep():` offloads all training state to host memory for the body.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    learning_rate: float
    asleep: Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class BadStepFound(Event):
    """A bad step was found: its loss or gradients are non-finite, or its loss is a spike.

    It is emitted in the bad step or the next one, before the `StepDone` of the step that emits it. After a rollback or
    a stop, this `StepDone` is not emitted.

    Attributes:
        kind: `non-finite` or `spike`.
        decision: Action of all ranks: `report`, `skip`, `rewind` (roll back to a checkpoint) or `stop`.
        why: Message about the step, with the first non-finite tensor if one was found.
    """

    kind: str
    decision: str
    why: str


@dataclass(frozen=True, slots=True)
class EvaluationStarted(Event):
    """An evaluation starts."""


@dataclass(frozen=True, slots=True)
class EvaluationDone(Event):
    """An evaluation is done.

    Attributes:
        values: Loss and task metrics on the evaluation data, by name.
    """

    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CheckpointStarted(Event):
    """Saving of a checkpoint of `step` starts."""


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    """The checkpoint of `step` is complete. A checkpoint that is written in the background may complete steps later."""


@dataclass(frozen=True, slots=True)
class StateOffloaded(Event):
    """Training state is offloaded to host memory, and its device memory is free for other uses."""


@dataclass(frozen=True, slots=True)
class StateOnloaded(Event):
    """Training state is onloaded to the device again."""


@dataclass(frozen=True, slots=True)
class PartWritten(Event):
    """This rank has computed a part of the samples. A rank that writes the results has written them.

    `step` is the number of parts that all ranks have computed, those of previous runs included.

    Attributes:
        part: Index of the part; `None` if no part was left for this rank.
    """

    part: int | None


@dataclass(frozen=True, slots=True)
class ModelExported(Event):
    """The model is exported in the Hugging Face layout.

    Attributes:
        folder: Folder of the exported files.
    """

    folder: Path


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The job is done. All ranks still run, so a handler may call the model and issue collectives.

    Attributes:
        result: Result of the job.
        model: Trained model; with pipeline parallelism, this rank's stages.
        forward: Calls the model over all pipeline stages, without gradients. Collective over the pipeline; every rank
            gets the output.
        ctx: Distributed context of the job.
    """

    result: TrainResult
    model: nn.Module
    forward: Callable[..., Any]
    ctx: DistributedContext


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """The job ends with an exception. Other ranks may have exited, so a handler must not issue collectives.

    Attributes:
        error: The exception.
    """

    error: BaseException
