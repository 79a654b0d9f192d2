"""Event classes of training and inference jobs.

A training job emits ConfigReady, ModelReady, OptimizerReady, DataReady, the events of each step, ModelExported and
Finished, in this order. The events of a step are StepStarted, BackwardDone, GradientsReady, OptimizerDone, StepDone.
Steps with a checkpoint or an evaluation then emit CheckpointStarted, CheckpointSaved, EvaluationStarted,
EvaluationDone. A job that ends with an exception emits Failed. With pipeline parallelism, the attribute `model` of an
event has only this rank's stages.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from torch import Tensor, nn
from torch.optim import Optimizer

from d9d_dist import DistributedContext
from d9d_metrics.trackers.values import Tracked


@dataclass(frozen=True, slots=True)
class Event:
    """Base class of events, which are emitted on every rank.

    Attributes:
        step: Number of completed optimizer steps; for the events within a step, that step, counted from 1.
    """

    step: int


@dataclass(frozen=True, slots=True)
class ConfigReady(Event):
    """Event after the checks of the configuration; the distributed context exists, the model is not yet sharded.

    `step` is 0, even in a resumed job.

    Attributes:
        config: Resolved configuration as JSON values.
    """

    config: Mapping[str, JsonValue]
    ctx: DistributedContext


@dataclass(frozen=True, slots=True)
class ModelReady(Event):
    """Event after the model is parallelized and holds its initial weights or those of the checkpoint of `step`."""

    model: nn.Module
    ctx: DistributedContext


@dataclass(frozen=True, slots=True)
class OptimizerReady(Event):
    """Event after the optimizer is built; in a resumed job, it has the state of the checkpoint of `step`."""

    optimizer: Optimizer


@dataclass(frozen=True, slots=True)
class DataReady(Event):
    """Event before the first read of training data, which starts after the samples of the completed steps.

    Attributes:
        num_microbatches: Number of microbatches of a step on this rank.
        microbatch_size: Number of samples of a microbatch.
    """

    num_microbatches: int
    microbatch_size: int


@dataclass(frozen=True, slots=True)
class StepStarted(Event):
    """Event before the first forward; the microbatches of the step's first `forward_backward` are on the device."""


@dataclass(frozen=True, slots=True)
class BackwardDone(Event):
    """Event after all forwards and backwards of a step.

    Gradients are sums over microbatches. Some gradients are not yet reduced over ranks.
    """

    model: nn.Module


@dataclass(frozen=True, slots=True)
class GradientsReady(Event):
    """Event before the optimizer step; the gradients are reduced, divided by the global weight and clipped.

    A handler may change the gradients in place.

    Attributes:
        grad_norm: Global norm of the gradients before clipping; 0-dim tensor on the device. May be non-finite in a bad
            step.
    """

    model: nn.Module
    grad_norm: Tensor


@dataclass(frozen=True, slots=True)
class OptimizerDone(Event):
    """Event after the optimizer has updated the parameters or skipped a bad step; gradients are not yet cleared.

    Attributes:
        taken: True if the parameters were updated, False if the step was skipped; 0-dim bool tensor on the device.
    """

    model: nn.Module
    optimizer: Optimizer
    taken: Tensor


@dataclass(frozen=True, slots=True)
class StepDone(Event):
    """Event after an optimizer step.

    Attributes:
        loss: Weighted mean over the global batch; 0-dim tensor on the device. Reading its value synchronizes host and
            device.
        grad_norm: Global norm of the gradients before clipping; 0-dim tensor on the device.
        learning_rate: Configured learning rate times the schedule; without it, that of the first parameter group.
        offloaded: `with event.offloaded():` offloads all training state to host memory for the body.
        finish: Ends the job as complete, with its last checkpoint, evaluation and export. One rank may call it. With
            several ranks, the job ends one or two steps later, or up to 2 * `resilience.stop.every` steps.
    """

    loss: Tensor
    grad_norm: Tensor
    learning_rate: float
    offloaded: Callable[[], AbstractContextManager[None]]
    finish: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class BadStepFound(Event):
    """Event of a bad step: its loss or gradients are non-finite, it has no weight, or its loss is a spike.

    The event is emitted in the bad step or in the next step, before the `StepDone` of that step. After a rollback or a
    stop, this `StepDone` is not emitted.

    Attributes:
        kind: `non-finite`, `no weight` or `spike`.
        decision: Action of all ranks: `report`, `skip`, `roll_back` (roll back to a checkpoint) or `stop`.
        why: Message about the step, with the first non-finite tensor if one was found.
    """

    kind: str
    decision: str
    why: str


@dataclass(frozen=True, slots=True)
class EvaluationStarted(Event):
    """Event before an evaluation."""


@dataclass(frozen=True, slots=True)
class EvaluationDone(Event):
    """Event after an evaluation, with the model in evaluation mode, and with the evaluation (averaged) weights.

    Attributes:
        values: Loss and task metrics on the evaluation data, by name.
        forward: Calls the model over all pipeline stages, as in `Finished`.
        track: Passes further values of this step to the trackers, such as samples of text (strings). Without effect on
            ranks other than the main process.
        finish: Ends the job after this step, as complete, with its checkpoint and export. One rank may call it.
    """

    values: Mapping[str, float]
    forward: Callable[..., Any]
    track: Callable[[Mapping[str, Tracked]], None]
    finish: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class CheckpointStarted(Event):
    """Event before the checkpoint of `step` is saved."""


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    """Event when the checkpoint of `step` is complete, possibly some steps later if saved in the background."""


@dataclass(frozen=True, slots=True)
class StateOffloaded(Event):
    """Event after training state was offloaded to host memory, which frees its device memory."""


@dataclass(frozen=True, slots=True)
class StateOnloaded(Event):
    """Event after training state was onloaded to the device again."""


@dataclass(frozen=True, slots=True)
class PartWritten(Event):
    """Event after this rank has computed a part of the samples, and has written the results if it is a writing rank.

    `step` is the number of parts that all ranks have computed, including previous runs.

    Attributes:
        part: Index of the part; `None` if no part was left for this rank.
    """

    part: int | None


@dataclass(frozen=True, slots=True)
class ModelExported(Event):
    """Event after the model was exported in the Hugging Face layout."""

    folder: Path


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of a training job, equal on every rank.

    Attributes:
        steps: Number of completed steps, including those before a resume.
        evaluation: Loss and task metrics of the last evaluation, by name; empty without evaluation.
        weight_per_second: Mean throughput since the last start or resume, in units of the loss weight, e.g. tokens.
        export_dir: Folder of the exported model; `None` if the run has no export. With `export = false` or
            `evaluation.only`, the export of an earlier start of the run.
    """

    steps: int
    train_loss: float
    evaluation: Mapping[str, float]
    weight_per_second: float
    run_dir: Path
    export_dir: Path | None


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """Event at the end of a job, while all ranks run: a handler may call the model and issue collectives.

    Attributes:
        forward: Calls the model over all pipeline stages, without gradients. Collective over the pipeline; every rank
            gets the output.
        for_generation: Returns the model for `d9d_modules.generate`, in any layout; see `Engine.for_generation`.
    """

    result: TrainResult
    model: nn.Module
    forward: Callable[..., Any]
    ctx: DistributedContext
    for_generation: Callable[[], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """Event of an exception that ends the job. Other ranks may have exited: handlers must not issue collectives."""

    error: BaseException
