"""What happens in a job, for anyone who wants to know: typed events, and handlers that are called with them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from d9d_dist import DistributedContext
from d9d_loop.train_result import TrainResult

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class GradientsReady:
    """The gradients of a step are reduced, divided by the global weight and clipped; the optimizer comes next.

    A handler may look at them, and change them in place.

    Attributes:
        step: The step that they belong to, counted from 1.
        model: The model, whose parameters hold them.
    """

    step: int
    model: nn.Module


@dataclass(frozen=True, slots=True)
class StepDone:
    """An optimizer step is done.

    Attributes:
        step: Number of steps done so far.
        loss: Weighted mean over the global batch; a 0-dim tensor, so that looking at it is the handler's choice.
        grad_norm: Global norm of the gradients before clipping; 0-dim.
        learning_rate: The learning rate of the step.
    """

    step: int
    loss: torch.Tensor
    grad_norm: torch.Tensor
    learning_rate: float


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    """The model was evaluated.

    Attributes:
        step: Number of steps done so far.
        values: The loss and the task's metrics on the evaluation data.
    """

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint is complete.

    Attributes:
        step: Number of steps done so far.
    """

    step: int


@dataclass(frozen=True, slots=True)
class ModelExported:
    """The model was written in the Hugging Face layout.

    Attributes:
        folder: Where it is.
    """

    folder: Path


@dataclass(frozen=True, slots=True)
class Finished:
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


class Events:
    """Calls handlers with events, on every rank, in the order of subscription."""

    def __init__(self) -> None:
        self._handlers: dict[type, list[Callable[[Any], None]]] = {}

    def on(self, kind: type[E], handler: Callable[[E], None]) -> None:
        """Call `handler` with every event of a kind."""
        self._handlers.setdefault(kind, []).append(handler)

    def emit(self, event: object) -> None:
        """Call the handlers of an event. What a handler raises ends the job, with a note that names the handler."""
        for handler in self._handlers.get(type(event), ()):
            try:
                handler(event)
            except Exception as error:
                name = getattr(handler, "__qualname__", repr(handler))
                error.add_note(f"raised by the handler {name} of {type(event).__name__}")
                raise
