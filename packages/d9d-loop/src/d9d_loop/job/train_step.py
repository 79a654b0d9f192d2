"""One optimizer step: forward, backward, gradient reduction, clipping and update."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from d9d_dist import DistributedContext, clip_grad_norm_
from d9d_loop.event_bus import Events
from d9d_loop.events import BackwardDone, GradientsReady, OptimizerDone, StepStarted
from d9d_loop.job.pipeline import Pipeline
from d9d_loop.lr.lr_schedule import LrSchedule
from d9d_loop.resilience import StepGuard, Watch
from d9d_loop.task import Task, to_inputs
from d9d_metrics import Metric
from d9d_pipeline import Timeline


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Measured values of a step. Tensors are on the device and equal on every rank.

    Attributes:
        loss: Weighted mean of the loss over the global batch, 0-dim float64.
        weight: Weight of the global batch, 0-dim float64.
        grad_norm: Global gradient norm before clipping, 0-dim.
        learning_rate: Learning rate of the first parameter group.
        timeline: Start and end of every pipeline action; `None` if the step was not measured.
    """

    loss: torch.Tensor
    weight: torch.Tensor
    grad_norm: torch.Tensor
    learning_rate: float
    timeline: Timeline | None = None


class TrainStep:
    """Training step of a model: forward, backward and update. The constructor is collective: it creates process groups.

    Args:
        model: The model, materialized and parallelized, or the pipeline of its stages.
        optimizer: Optimizer of the model's trainable parameters. Its current learning rates are the peak ones.
        task: Prepares inputs and computes the loss.
        metrics: Task metrics, updated with each microbatch.
        lr_schedule: Function from the step to the factor of the peak learning rate.
        max_norm: Maximum global gradient norm; `None` measures the norm without clipping.
        num_microbatches: Number of microbatches of a step on this rank.
        ctx: Distributed context.
        events: Event bus for the events of a step.
        guard: Calls the optimizer and skips bad steps; `None` never skips a step.
    """

    def __init__(
        self,
        model: nn.Module | Pipeline,
        optimizer: Optimizer,
        *,
        task: Task,
        metrics: Mapping[str, Metric],
        lr_schedule: LrSchedule,
        max_norm: float | None,
        num_microbatches: int,
        ctx: DistributedContext,
        events: Events,
        guard: StepGuard | None = None,
    ) -> None:
        pipeline = model if isinstance(model, Pipeline) else Pipeline({0: model}, ctx=ctx)
        self._model, self._shared = pipeline.model, pipeline.shared
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = optimizer
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self._task, self._metrics = task, metrics
        self._lr_schedule = lr_schedule
        self._max_norm = float("inf") if max_norm is None else max_norm
        self._executor = pipeline.training(num_microbatches)
        self._gradient_sync = pipeline.gradient_sync(num_microbatches)
        if ctx.size("regular", "pp") > 1:  # pipeline ranks may have created different numbers of groups
            ctx.align_groups()
        self._ctx, self._events, self._guard = ctx, events, guard
        self._losses_group = ctx.group_for("batch", "pp", "dp", "cp")

    def __call__(self, step: int, batches: Sequence[Any], *, measured: bool = False) -> StepOutcome:
        """Run one step: `forward_backward`, then `update`.

        Args:
            step: Number of completed steps before this one.
            batches: This rank's microbatches, on its device.
            measured: True to measure the pipeline's timeline, which adds a barrier and an all-gather.
        """
        self._events.emit(StepStarted(step + 1))
        timeline = self.forward_backward(batches, measured=measured)
        self._events.emit(BackwardDone(step + 1, self._model))
        return self.update(step, timeline)

    def forward_backward(self, batches: Sequence[Any], *, measured: bool = False) -> Timeline | None:
        """Run the forward and backward of all microbatches, which sums their gradients, losses and weights.

        Returns start and end of every pipeline action, if `measured`. Collectives: those of the model; sends and
        receives between stages.
        """
        self._totals = torch.zeros(2, dtype=torch.float64, device=self._ctx.device)
        total, weight = self._totals.unbind()  # views, so that one all-reduce sums both

        def take_loss(outputs: Any, microbatch: int) -> torch.Tensor:
            loss = self._task.loss(outputs, batches[microbatch])
            total.add_(loss.total.detach())
            weight.add_(loss.weight)
            self._task.update_metrics(self._metrics, outputs=outputs, batch=batches[microbatch], loss=loss)
            return loss.total

        inputs = [to_inputs(self._task.inputs(batch)) for batch in batches]
        if measured:
            return self._executor.measured_step(inputs, take_loss)
        self._executor.step(inputs, take_loss)
        return None

    def update(self, step: int, timeline: Timeline | None = None) -> StepOutcome:
        """Reduce the gradients, divide them by the global weight, clip them, and run the optimizer step.

        Collectives: the gradient reduction and norm; one all-reduce of loss and weight; the guard's all-reduce.
        """
        total, weight = self._totals.unbind()
        self._gradient_sync.finish()
        self._shared.add_gradients()
        if self._losses_group.size() > 1:
            dist.all_reduce(self._totals, group=self._losses_group)
        # With weight 0 the factor is 0, because 0 / 0 would be NaN. A NaN weight gives NaN.
        per_weight = torch.where(weight > 0, 1.0 / weight, 0.0 * weight)
        grad_norm = clip_grad_norm_(self._parameters, self._max_norm, ctx=self._ctx, factor=per_weight)
        self._events.emit(GradientsReady(step + 1, self._model, grad_norm))
        factor = self._lr_schedule(step)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        loss = total * per_weight
        if self._guard is None:
            self._optimizer.step()
            taken = torch.ones_like(grad_norm, dtype=torch.bool)
        else:
            taken = self._guard.step(step + 1, loss=loss, grad_norm=grad_norm)
        self._shared.copy_values()
        self._events.emit(OptimizerDone(step + 1, self._model, self._optimizer, taken))
        self._model.zero_grad()  # also for parameters without an optimizer, whose gradients would accumulate
        return StepOutcome(loss, weight, grad_norm, self._peaks[0] * factor, timeline)

    def replay(self, batches: Sequence[Any], watch: Watch) -> None:
        """Repeat the forward and backward of a step, discard the gradients, and restore all buffers.

        `watch` is called with "the loss" and the loss of each microbatch. Collectives: those of the model and the
        gradient reduction.
        """

        def take_loss(outputs: Any, microbatch: int) -> torch.Tensor:
            loss = self._task.loss(outputs, batches[microbatch])
            watch("the loss", loss.total)
            return loss.total

        with _buffers_kept(self._model):
            self._executor.step([to_inputs(self._task.inputs(batch)) for batch in batches], take_loss)
        self._gradient_sync.finish()
        self._shared.add_gradients()  # clears the gradients of copies, which model.parameters() omits
        self._model.zero_grad()


@contextmanager
def _buffers_kept(model: nn.Module) -> Generator[None]:
    """Restore all buffers after the body: the same tensor objects and values, even if the body reassigned them."""
    kept = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in kept:
                setattr(module, name, buffer.copy_(value))
