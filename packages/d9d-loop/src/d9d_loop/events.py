"""What happens in the life of a job, as typed events; see `event_bus` for how handlers are called with them.

In the order of a job: ConfigReady, ModelReady, OptimizerReady, DataReady; in each step StepStarted, BackwardDone,
GradientsReady, OptimizerDone, StepDone, then EvaluationStarted, EvaluationDone, CheckpointStarted, CheckpointSaved
where they are due; at the end ModelExported and Finished, or Failed.
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
from d9d_loop.train_result import TrainResult


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened on every rank.

    Attributes:
        step: Number of optimizer steps done so far; within a step, its number counted from 1.
    """

    step: int


@dataclass(frozen=True, slots=True)
class ConfigReady(Event):
    """The job was checked, and its ranks know each other; nothing is built yet. The step is 0, also of a resumed job.

    Attributes:
        config: The resolved configuration, as JSON.
        ctx: The job's context.
    """

    config: Mapping[str, JsonValue]
    ctx: DistributedContext


@dataclass(frozen=True, slots=True)
class ModelReady(Event):
    """The model is built, parallelised and holds its weights: initial ones, or those of the checkpoint of `step`.

    Attributes:
        model: The model; of a pipeline, this rank's stages.
        ctx: The job's context.
    """

    model: nn.Module
    ctx: DistributedContext


@dataclass(frozen=True, slots=True)
class OptimizerReady(Event):
    """The optimizer is built, and has the state of the checkpoint of `step`, if the job resumes.

    Attributes:
        optimizer: The optimizer.
    """

    optimizer: Optimizer


@dataclass(frozen=True, slots=True)
class DataReady(Event):
    """The training data are about to be read, from the first sample that steps before did not see.

    Attributes:
        num_microbatches: Microbatches of a step on this rank.
        microbatch_size: Samples of a microbatch.
    """

    num_microbatches: int
    microbatch_size: int


@dataclass(frozen=True, slots=True)
class StepStarted(Event):
    """The microbatches of a step are on the device; its first forward comes next."""


@dataclass(frozen=True, slots=True)
class BackwardDone(Event):
    """All forwards and backwards of a step are done. Gradients are sums, in part not yet reduced over ranks.

    Attributes:
        model: The model, whose parameters hold them.
    """

    model: nn.Module


@dataclass(frozen=True, slots=True)
class GradientsReady(Event):
    """The gradients of a step are reduced, divided by the global weight and clipped; the optimizer comes next.

    A handler may look at them, and change them in place.

    Attributes:
        model: The model, whose parameters hold them.
        grad_norm: Their global norm before clipping, 0-dim, on the device; not finite in a step that may be left out.
    """

    model: nn.Module
    grad_norm: Tensor


@dataclass(frozen=True, slots=True)
class OptimizerDone(Event):
    """The optimizer has changed the parameters, or left a bad step out; the gradients are still there.

    Attributes:
        model: The model.
        optimizer: The optimizer.
        taken: Whether it did, 0-dim bool, on the device: not of a bad step whose update was left out.
    """

    model: nn.Module
    optimizer: Optimizer
    taken: Tensor


@dataclass(frozen=True, slots=True)
class StepDone(Event):
    """An optimizer step is done.

    Attributes:
        loss: Weighted mean over the global batch; a 0-dim tensor, so that looking at it is the handler's choice.
        grad_norm: Global norm of the gradients before clipping; 0-dim.
        learning_rate: The learning rate of the step.
        asleep: `with event.asleep():` keeps all state of the training in host memory meanwhile.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    learning_rate: float
    asleep: Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class BadStepFound(Event):
    """A step was not finite, or its loss a spike; comes before the `StepDone` of a step that the job goes on from.

    Attributes:
        kind: `non-finite` or `spike`.
        decision: What all ranks do about it: `report`, `skip`, `rewind` or `stop`.
        why: The same for people, with the first tensor that was not finite.
    """

    kind: str
    decision: str
    why: str


@dataclass(frozen=True, slots=True)
class EvaluationStarted(Event):
    """The model is about to be evaluated."""


@dataclass(frozen=True, slots=True)
class EvaluationDone(Event):
    """The model was evaluated.

    Attributes:
        values: The loss and the task's metrics on the evaluation data.
    """

    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CheckpointStarted(Event):
    """A checkpoint of this step is about to be taken."""


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    """The checkpoint of this step is complete; one that was written in the background may be of an earlier step."""


@dataclass(frozen=True, slots=True)
class Slept(Event):
    """All state of the training is in host memory; the device is free for something else."""


@dataclass(frozen=True, slots=True)
class Woken(Event):
    """The state of the training is back on the device."""


@dataclass(frozen=True, slots=True)
class PartWritten(Event):
    """Inference is through with a part of the samples, and its results are on the disk. The step counts parts.

    Attributes:
        part: The part that this rank computed; `None` where there was none left for it.
    """

    part: int | None


@dataclass(frozen=True, slots=True)
class ModelExported(Event):
    """The model was written in the Hugging Face layout.

    Attributes:
        folder: Where it is.
    """

    folder: Path


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The job is done; every rank is still in it, so a handler may use the model.

    Attributes:
        result: What came of it.
        model: The trained model; of a pipeline, this rank's stages.
        forward: Runs the model as a call of it would, over all stages of a pipeline, without gradients; collective over
            the pipeline, and the result is on every rank.
        ctx: The job's context.
    """

    result: TrainResult
    model: nn.Module
    forward: Callable[..., Any]
    ctx: DistributedContext


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """The job ends with an exception; other ranks may be gone, so a handler must not communicate with them.

    Attributes:
        error: What ends it.
    """

    error: BaseException
