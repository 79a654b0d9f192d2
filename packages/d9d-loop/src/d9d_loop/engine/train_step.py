"""One optimizer step: forward, backward, gradient reduction, clipping and update."""

import re
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from d9d_dist import DistributedContext, GradientSync, UserError, canonical_name, clip_grad_norm_, gather_json
from d9d_dist.errors import shorten
from d9d_dist.gradients.grad_dtype import grad_dtype_of
from d9d_dist.values.buffer_values import BufferValues
from d9d_loop.engine.pipeline import Pipeline
from d9d_loop.engine.step_totals import StepTotals
from d9d_loop.event_bus import Events
from d9d_loop.events import BackwardDone, GradientsReady, OptimizerDone, StepStarted
from d9d_loop.model.model_check import stand_in_problem
from d9d_loop.optimizers.groupwise import GroupwiseOptimizer
from d9d_loop.optimizers.joined import parts_of
from d9d_loop.optimizers.weight_average import WeightAverage
from d9d_loop.resilience import StepGuard, Watch
from d9d_loop.resilience.same_values import NOTHING, Same
from d9d_loop.task import BatchTask, Loss, LossFunction
from d9d_pipeline import Executor, Inputs, Timeline


@dataclass(frozen=True, slots=True)
class StepResult:
    """Measured values of an optimizer step. Tensors are on the device and equal on every rank.

    Attributes:
        loss: Weighted mean of the loss over the global batch, 0-dim float64.
        weight: Weight of the global batch, 0-dim float64.
        grad_norm: Global gradient norm before clipping, 0-dim.
        taken: True if the parameters were updated, False if the step was skipped; 0-dim bool.
        learning_rate: Configured learning rate times the factor of the step, or that of the first parameter group.
    """

    loss: Tensor
    weight: Tensor
    grad_norm: Tensor
    taken: Tensor
    learning_rate: float


@final
class TrainStep:
    """Forward, backward and update of a model; gradients accumulate between updates. The constructor is collective.

    The arguments are those of `Engine`; a `max_norm` of infinity measures the norm without clipping.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: Optimizer,
        *,
        task: BatchTask,
        max_norm: float,
        num_microbatches: int,
        ctx: DistributedContext,
        events: Events,
        guard: StepGuard,
        average: WeightAverage | None,
    ) -> None:
        self._pipeline, self._model, self._shared = pipeline, pipeline.model, pipeline.shared
        self._optimizer, self._task = optimizer, task
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._known = set(map(id, self._parameters))
        own = [each for each in parts_of(optimizer) if isinstance(each, GroupwiseOptimizer)]
        wide = {p for part in own if part.takes_wide_gradients for group in part.param_groups for p in group["params"]}
        self._wide = [each for each in self._parameters if grad_dtype_of(each) != each.dtype and each not in wide]
        self._max_norm, self._ctx, self._events, self._guard = max_norm, ctx, events, guard
        self._average = average
        self._splits = pipeline.program(num_microbatches).splits
        self._supported: dict[int, int] = {}
        pipeline.training(num_microbatches)
        self._gradient_sync = GradientSync(self._model)
        if ctx.size("regular", "pp") > 1:  # pipeline ranks may have created different numbers of groups
            ctx.align_groups()
        self._losses_group = ctx.group_for("batch", "pp", "dp", "cp")
        self._totals: StepTotals | None = None
        self._buffers = BufferValues(self._model)  # at the start of the step, to undo it
        # Those that checkpoints omit, before the first step.
        self._first_buffers = BufferValues(self._model, "not saved", device=torch.device("cpu"))
        self._has_failed = False
        self._is_first = True

    @property
    def is_pending(self) -> bool:
        """True if gradients were accumulated since the last update."""
        return self._totals is not None

    def supported(self, num_microbatches: int) -> int:
        """Return the smallest supported number of microbatches that is at least `num_microbatches`.

        Some schedules require, for example, a multiple of the number of pipeline ranks. Either all backward passes are
        split or none are, because FSDP is configured only once.
        """
        if num_microbatches not in self._supported:
            # Each schedule supports large enough multiples of twice the number of stages. The range has two of them.
            candidates = range(num_microbatches, num_microbatches + 4 * self._pipeline.num_stages + 1)
            supports = partial(self._pipeline.supports, splits=self._splits)
            self._supported[num_microbatches] = next(filter(supports, candidates))
        return self._supported[num_microbatches]

    def _executor(self, num_microbatches: int) -> Executor:
        """Return the executor of a step, and prepare the gradient reduction for its backward passes."""
        # With split backward, a parameter that is used twice may accumulate its gradient in two parts.
        self._gradient_sync.num_microbatches = None if self._splits else num_microbatches
        return self._pipeline.training(num_microbatches)

    def forward_backward(
        self,
        number: int,
        batches: Sequence[Any],
        loss: LossFunction,
        *,
        num_own: int,
        values: dict[int, Mapping[str, Tensor]] | None = None,
        measured: bool = False,
        on_microbatch: Callable[[Inputs, Any], object] | None = None,
    ) -> Timeline | None:
        """Run forward and backward of all microbatches; see `Engine.accumulate`.

        `number` is the number of the step, counted from 1. `values` receives the values per token of the microbatches
        that count, by index.

        Raises:
            UserError: On this rank, if results of the model would include its stand-ins; if the result of
                `loss` is not a `Loss` of 0-dim values; if an in-place operation changed a value that backward needs; or
                if an earlier call failed.
        """
        self._refuse_partial_gradients()
        self._refuse_unfrozen()
        if num_own < len(batches) and (problem := stand_in_problem(self._model, self._ctx.size("batch", "dp"))):
            raise UserError(f"this rank has fewer microbatches than others, and {problem}")
        if self._totals is None:
            self._events.emit(StepStarted(number))
            self._totals = StepTotals(self._ctx.device)
            self._buffers.refresh()
        else:  # finish the reduction of the previous call; later gradients are added to the reduced sum
            self._gradient_sync.finish()
        totals = self._totals

        def take_loss(outputs: Any, microbatch: int) -> Tensor:
            if microbatch >= num_own:
                return _zero_loss(outputs)
            if on_microbatch is not None:
                on_microbatch(inputs[microbatch], batches[microbatch])
            taken = _checked(loss(outputs, batches[microbatch]))
            totals.add(taken)
            if values is not None:
                values[microbatch] = taken.tokens
            return taken.total

        inputs = [
            self._pipeline.inputs_of(self._task, batch, is_stand_in=index >= num_own)
            for index, batch in enumerate(batches)
        ]
        executor = self._executor(len(batches))
        self._has_failed = True  # until all microbatches are done
        with _in_place_explained():
            run = executor.measured_step if measured else executor.step
            timeline = run(inputs, take_loss, num_own=num_own)
        self._has_failed = False
        return timeline

    def copies_of_buffers(self) -> list[Tensor]:
        """Return the copies of buffers on the device."""
        return self._buffers.tensors()

    def reset_buffers(self) -> None:
        """Set the buffers that checkpoints omit to their values before the first step. Call it after a load."""
        self._first_buffers.restore()

    def _refuse_partial_gradients(self) -> None:
        if self._has_failed:
            raise UserError(
                "an earlier forward_backward() failed, so some of its microbatches have no gradients; expected "
                "no further training. Build the engine again, and load() a checkpoint."
            )

    def _refuse_unfrozen(self) -> None:
        if _has_only(self._model, self._known):
            return
        new = [
            canonical_name(name)
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and id(parameter) not in self._known
        ]
        if new:
            raise UserError(
                f"{shorten(new)} require gradients, but did not at the start of the training, so the optimizer does "
                "not have them; expected the trainable parameters of the start. Unfreeze them in the function or "
                "provider that builds the model, or build another Engine."
            )

    def _others(self, only: str) -> list[nn.Parameter]:
        """Return the trainable parameters whose names do not match `only`. Collective with several stages."""
        names = {canonical_name(name): each for name, each in self._model.named_parameters() if each.requires_grad}
        others = {name: each for name, each in names.items() if re.search(only, name) is None}
        if not any(gather_json(len(others) < len(names), alone=self._pipeline.group is None)):
            raise UserError(
                f"got step(only={only!r}), which matches no trainable parameter; expected at least one of "
                f"{shorten(names)}. Correct the pattern, which is searched in these names."
            )
        return list(others.values())

    def _name_unused(self) -> None:
        """Print the trainable parameters that got no gradient on any rank, in the first step. Collective."""
        self._is_first = False
        grads = {canonical_name(name): each.grad for name, each in self._model.named_parameters() if each.requires_grad}
        candidates = _names(gather_json([name for name, grad in grads.items() if grad is None]))
        if not candidates:
            return
        used = gather_json([name for name in candidates if grads.get(name) is not None])
        unused = candidates - _names(used)
        if unused and self._ctx.is_main_process:
            print(
                f"d9d: {shorten(sorted(unused))} got no gradient in the first step, so the loss does not depend on it. "
                "Use it in forward, or freeze it.",
                flush=True,
            )

    def update(self, number: int, same: Same = NOTHING, *, only: str | None = None) -> StepResult:
        """Reduce the gradients and run the optimizer step `number`; see `Engine.step`."""
        self._refuse_partial_gradients()
        if self._totals is None:
            raise UserError("got step() without gradients; expected forward_backward() before each step.")
        others = [] if only is None else self._others(only)
        totals, self._totals = self._totals, None
        self._events.emit(BackwardDone(number, self._model))
        totals.start_reduction(self._losses_group)
        self._gradient_sync.finish()
        self._shared.add_gradients()
        for parameter in others:
            parameter.grad = None
        if self._is_first and only is None:
            self._name_unused()
        loss, weight, per_weight = totals.finish()
        grad_norm = clip_grad_norm_(self._parameters, self._max_norm, ctx=self._ctx, factor=per_weight)
        self._events.emit(GradientsReady(number, self._model, grad_norm))
        with _converted_gradients(self._wide) if self._wide else nullcontext():
            taken = self._guard.step(number, loss=loss, grad_norm=grad_norm, weight=weight, same=same)
        if self._average is not None:
            self._average.update(taken)
        self._shared.copy_values()
        self._events.emit(OptimizerDone(number, self._model, self._optimizer, taken))
        # A skipped step leaves no NaN in running statistics.
        if self._guard.last_taken is not True:
            self._buffers.restore(unless=taken)
        self._drop_gradients()
        return StepResult(loss, weight, grad_norm, taken, self._optimizer.param_groups[0]["lr"])

    def replay(self, batches: Sequence[Any], loss: LossFunction, watch: Watch) -> None:
        """Repeat forward and backward, discard the gradients, and restore all buffers; see `Engine.replay`."""

        def take_loss(outputs: Any, microbatch: int) -> Tensor:
            taken = _checked(loss(outputs, batches[microbatch]))
            watch("the loss", taken.total)
            return taken.total

        buffers = BufferValues(self._model)
        try:
            inputs = [self._pipeline.inputs_of(self._task, batch) for batch in batches]
            self._executor(len(batches)).step(inputs, take_loss)
        finally:
            buffers.restore()
        self._discard()

    def discard(self) -> None:
        """Discard gradients and changes of buffers since the last update. Collective: finishes the reduction."""
        if self.is_pending:
            self._totals = None
            self._discard()
            self._buffers.restore()

    def _discard(self) -> None:
        self._gradient_sync.finish()
        self._shared.add_gradients()  # clears the gradients of copies, which model.parameters() omits
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:  # also those without an optimizer, whose gradients would accumulate
            parameter.grad = None


def _has_only(model: nn.Module, known: Container[int]) -> bool:
    """Return True if the ids of all trainable parameters are known; faster than a loop over `parameters()`."""
    modules: list[nn.Module | None] = [model]
    while modules:
        if (module := modules.pop()) is not None:
            for each in module._parameters.values():
                if each is not None and each.requires_grad and id(each) not in known:
                    return False
            if module._modules:
                modules += module._modules.values()
    return True


def _names(of_ranks: list[Any]) -> set[str]:
    """Return the union of the names of all ranks; the simulated ranks of a dry run send none."""
    return {name for names in of_ranks for name in names or ()}


def _checked(loss: object) -> Loss:
    """Return the result of a loss function; raise `UserError` if it is not a sum with its weight."""
    if not isinstance(loss, Loss):
        raise UserError(f"the loss function returned a {type(loss).__name__}; expected Loss(total, weight=...).")
    for name, value in (("total", loss.total), ("weight", loss.weight)):
        if isinstance(value, Tensor) and value.dim():
            raise UserError(
                f"Loss.{name} has shape {tuple(value.shape)}; expected a 0-dim tensor: the sum over the microbatch."
            )
        if isinstance(value, Tensor) and value.is_complex():
            raise UserError(f"Loss.{name} is complex; expected a real number, such as that of .abs() or .real.")
    return loss


@contextmanager
def _in_place_explained() -> Generator[None]:
    """Convert torch's error about in-place operations to a `UserError`."""
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        value = str(error).partition("inplace operation: ")[2].partition(". Hint")[0]
        raise UserError(
            f"the backward of the step fails: an in-place operation has changed a value that backward needs ({value}). "
            "Use an operation that returns a new tensor, such as x = x + y for x += y, or inplace=False. "
            "torch.autograd.set_detect_anomaly(True) prints the line that computed the value."
        ) from error


def _zero_loss(outputs: Any) -> Tensor:
    """Return a loss of 0 that depends on all outputs, so that the backward pass runs."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise UserError("no output of the model requires gradients; keep some parameters of the model trainable.")
    return sum((leaf * 0.0).sum() for leaf in leaves)


@contextmanager
def _converted_gradients(parameters: Sequence[nn.Parameter]) -> Generator[None]:
    """Convert gradients to the dtypes of their parameters for an optimizer step, and drop them afterwards.

    Most optimizers do not support gradients whose dtype differs from that of the parameter.
    """
    wide = [(parameter, grad_dtype_of(parameter)) for parameter in parameters]
    with torch.no_grad():
        for parameter, _ in wide:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
    try:
        yield
    finally:
        for parameter, dtype in wide:
            parameter.grad = None
            parameter.grad_dtype = dtype
