"""`Engine`: forward and backward passes, optimizer steps, scores, weights and checkpoints, driven by the caller.

The Trainer uses the engine. Post-training methods with their own outer loop, such as reinforcement learning, call the
engine directly.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Self, SupportsFloat, TypeVar, final, overload
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from d9d_dist import DistributedContext, ModuleOffloader, Region, UserError
from d9d_dist.data_parallel.gathered_parameters import free_all_gathered
from d9d_dist.values.parameter_writes import refuse_later_writes
from d9d_loop.config.engine_config import EngineConfig
from d9d_loop.engine.checkpoints import EngineCheckpoints
from d9d_loop.engine.microbatches import MicrobatchAgreement, same_call, without_padding
from d9d_loop.engine.opened_engine import opened_engine
from d9d_loop.engine.pipeline import Pipeline, WholeRows
from d9d_loop.engine.reference import FrozenReference, Reference
from d9d_loop.engine.scores import ReadTokens, RecordLayers, reference_values, score
from d9d_loop.engine.train_step import StepResult, TrainStep
from d9d_loop.event_bus import Events
from d9d_loop.events import BadStepFound, StateOffloaded, StateOnloaded
from d9d_loop.model.disk_mapper import disk_mapper
from d9d_loop.model.first_steps import FirstSteps
from d9d_loop.model.model_check import dropout_names, stand_in_problem
from d9d_loop.model.model_provider import BuildFunction, ModelProvider
from d9d_loop.optimizers import evaluation_weights
from d9d_loop.optimizers.ema import Ema
from d9d_loop.optimizers.optimizer import OptimizerProvider
from d9d_loop.optimizers.weight_average import WeightAverage
from d9d_loop.resilience import BadStepConfig, StepGuard, Watch
from d9d_loop.resilience.bad_steps import BadStepError
from d9d_loop.resilience.same_values import Same
from d9d_loop.task import BatchTask, LossFunction
from d9d_pipeline import Inputs, Schedule, Timeline
from d9d_state import StateMapper, gathered_weights, weight_shards

W = TypeVar("W")


@final
class Engine:
    """Training of a model in any parallel layout, driven by the caller. The constructor is collective.

    All ranks call the same methods in the same order. Losses are sums with weights: the gradient of a step is the sum
    over all microbatches, calls and ranks, divided once by the sum of all weights.

    Attributes:
        events: Event bus for StepStarted, BackwardDone, GradientsReady and OptimizerDone of each step.
        pipeline: This rank's stages of the model.
        model: This rank's part of the model.
        num_steps: Number of completed optimizer steps.
        peak_learning_rate: Learning rate that `set_learning_rates` multiplies, as steps report it.

    Args:
        model: The model, materialized and parallelized, or the pipeline of its stages.
        optimizer: Optimizer of the model's trainable parameters.
        task: Prepares the model's inputs from a batch, and splits its sequences for context parallelism.
        max_norm: Maximum global gradient norm; `None` measures the norm without clipping.
        num_microbatches: Number of microbatches that most steps have on a rank; other numbers are supported too.
        guard: Calls the optimizer and skips bad steps; by default one with the defaults of `BadStepConfig`.
        polls_guard: True to raise `BadStepError` from `step` if the guard decides to stop. False if the caller polls
            the guard and acts on its decisions.
        average: Average of the weights, which each step that is not skipped updates; `None` for none.
        peak_learning_rate: Learning rate that steps report, with the same factor as those of the parameter groups; by
            default the initial one of the first group. A pipeline stage may have no group of this rate.
        events: Event bus; by default a new one.
        state_mapper: Mapper from the weights on disk to those of the whole model; `None` if the names are equal.
        reference: Reference for the method `reference`. Either a function of the model that returns a context manager,
            such as `d9d_peft.adapters_off`: inside this context, the model acts as the reference. Or "initial", for a
            copy of the current weights in host memory. `None` disables the method.
        checkpoints: Checkpoints for `save` and `load`; `None` disables them.
        step_timeout: Timeout of collectives after the first step; `None` leaves it unchanged.
    """

    def __init__(
        self,
        model: nn.Module | Pipeline,
        optimizer: Optimizer,
        *,
        ctx: DistributedContext,
        task: BatchTask,
        max_norm: float | None = None,
        num_microbatches: int = 1,
        guard: StepGuard | None = None,
        polls_guard: bool = True,
        average: WeightAverage | None = None,
        peak_learning_rate: float | None = None,
        events: Events | None = None,
        state_mapper: StateMapper | None = None,
        reference: Reference | FrozenReference | None = None,
        checkpoints: EngineCheckpoints | None = None,
        step_timeout: timedelta | None = None,
    ) -> None:
        self.pipeline = model if isinstance(model, Pipeline) else Pipeline({0: model}, ctx=ctx)
        self.model, self.optimizer, self.ctx = self.pipeline.model, optimizer, ctx
        self.guard = guard or StepGuard(optimizer, config=BadStepConfig(), ctx=ctx)
        self.events = Events() if events is None else events
        self.num_steps, self._num_updates = 0, 0
        self._average = average
        self._task, self._polls_guard, self._checkpoints = task, polls_guard, checkpoints
        self._state_mapper, self._step_timeout = state_mapper, step_timeout
        self._initial_rates = [group["lr"] for group in optimizer.param_groups]
        self.peak_learning_rate = self._initial_rates[0] if peak_learning_rate is None else peak_learning_rate
        self._set_rates = (0.0, 0.0)  # compared between ranks: the last call that set learning rates, and its argument
        self._step = TrainStep(
            self.pipeline,
            optimizer,
            task=task,
            max_norm=float("inf") if max_norm is None else max_norm,
            num_microbatches=num_microbatches,
            ctx=ctx,
            events=self.events,
            guard=self.guard,
            average=average,
        )
        self._agree = MicrobatchAgreement(task, ctx)
        self._whole = nn.ModuleList(self.pipeline.stages.values())  # with the copies of shared parameters
        offloader = ModuleOffloader(self._whole, optimizer, others=self._copies)
        self._offloader, self._is_offloaded = offloader, False
        if reference == "initial" and checkpoints is not None:
            checkpoints.keep_reference()
        if not isinstance(reference, FrozenReference | None):
            reference = FrozenReference(reference, self.model, whole=self._whole)
        self._reference, self._inside = reference, ""
        self._first_steps, self._has_warned = FirstSteps(self.model, ctx), False

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        *,
        model: ModelProvider | nn.Module | BuildFunction,
        task: BatchTask,
        optimizer: OptimizerProvider | None = None,
        pipeline_schedule: Schedule | None = None,
        reference: Reference | None = None,
        average: Ema | None = None,
    ) -> AbstractContextManager[Self]:
        """Start the process group, build an engine with its initial weights, and close both after the body. Collective.

            with Engine.open(config, model=MyProvider(), task=MyTask()) as engine:
                engine.forward_backward(batches, loss)
                result = engine.step()

        Args:
            config: The configuration.
            model: A model provider, a module, or a function that builds a module or a pipeline stage.
            task: See `Engine`.
            optimizer: Function that builds the optimizer; by default the optimizer of the configuration.
            pipeline_schedule: Pipeline schedule; by default the one of the configuration.
            reference: See `Engine`.
            average: Average of the weights; by default the one of the configuration.

        Raises:
            UserError: If the configuration, model or environment is invalid. Most checks run before the process group
                starts.
        """
        if average is not None:
            config = config.model_copy(update={"average": average})
        build: Callable[..., Self] = partial(cls, reference=reference)
        return opened_engine(
            config, build, model=model, task=task, optimizer=optimizer, pipeline_schedule=pipeline_schedule
        )

    def forward_backward(self, batches: Sequence[Any], loss: LossFunction) -> list[Mapping[str, Tensor]]:
        """Run forward and backward of some batches. Losses, weights and gradients accumulate until `step`.

        Ranks may pass different numbers of batches, of different shapes. Ranks with fewer batches run stand-ins, whose
        loss is 0 (`BatchTask.stand_in`). Collectives: an all-gather of the numbers of batches, and of a batch if a rank
        that never had one needs a stand-in; the model's collectives; sends and receives between stages; the gradient
        reduction; and the exchange of the returned values.

        Args:
            batches: This rank's batches, one for each microbatch, as the collate function builds them: on any device,
                with whole sequences. All ranks of a data-parallel coordinate pass the same batches.
            loss: Function of the model's outputs and the batch that returns the `Loss` of a microbatch, such as
                `task.loss`. Under context parallelism it gets this rank's part of the batch.

        Returns:
            `Loss.tokens` of each batch, in the order of `batches`, on every rank of the data-parallel coordinate: whole
            rows [B, L], detached.

        Raises:
            UserError: On every rank, if no rank has a batch, the ranks of a data-parallel coordinate have different
                batches, or results would include stand-ins. Integers on an accelerator are
                compared in the next step.
        """
        self._require_training("forward_backward()")
        problem = stand_in_problem(self.model, self.ctx.size("batch", "dp"))
        placed, num_added = self._agree(batches, self._step.supported, stand_in_problem=problem)
        values: dict[int, Mapping[str, Tensor]] = {}
        self._step.forward_backward(self.num_steps + 1, placed, loss, num_own=len(batches), values=values)
        found = self.pipeline.gather_tokens([values[index] for index in sorted(values)])
        return without_padding(found, num_added)

    def score(
        self, batches: Sequence[Any], read: ReadTokens | None = None, *, experts: RecordLayers | None = None
    ) -> list[Mapping[str, Tensor]]:
        """Return the log-probability of each label and the entropy of each prediction, without gradients.

        The model runs in evaluation mode; training is not affected. No rank holds the logits of all tokens, nor of the
        whole vocabulary if it is sharded. Collectives: as for `forward_backward`, without the gradients.

        Args:
            batches: As for `forward_backward`. `task.inputs` passes the labels to the model.
            read: Function that reads values per token [B, L] from the model's outputs. By default `task.scores`, if the
                task has this method; else the model is called with `scores=True`, as d9d's decoders support.
            experts: `d9d_moe.record_experts` to also return the experts that the routers chose, for routing replay.

        Returns:
            The values of each batch by name, in the order of `batches`, whole rows [B, L], on every rank of the
            data-parallel coordinate. By default `log_probs` and `entropy` in nats, 0 for ignored labels. With
            `experts` also `expert_indices` [B, L, layers, A], int64, -1 in layers without experts.

        Raises:
            UserError: If the model has no argument `scores` and there is no `read`. Also as for `forward_backward`.
        """
        self._require_onloaded("score()")
        placed, num_added = self._agree(batches, lambda number: number, call="score()")
        found = score(placed, len(batches), pipeline=self.pipeline, task=self._task, read=read, experts=experts)
        return without_padding(found, num_added)

    @contextmanager
    def reference(self) -> Generator[None]:
        """Make the model act as its frozen reference in the body, for `score`. No collectives.

        Raises:
            UserError: If the engine has no reference, `reference` is already active, or the body trains or saves.
        """
        self._require_training("reference()")
        if self._reference is None:
            raise UserError(
                'this engine has no reference; expected one. Pass reference=d9d_peft.adapters_off, or "initial" for a '
                "copy of the initial weights."
            )
        self._warn_of_dropout()
        with self._reference(), self._no_training("reference()"):
            yield

    def with_reference(self, batches: Sequence[Any]) -> list[Any]:
        """Add `Task.reference_values` to prepared microbatches, as for `accumulate`, on the ranks of the last stage.

        Batches are mappings. Collective.
        """
        task: Any = self._task
        with self.reference():
            found = reference_values(batches, len(batches), pipeline=self.pipeline, task=task)
        return [{**batch, **found.get(index, {})} for index, batch in enumerate(batches)]

    def _warn_of_dropout(self) -> None:
        """Print once that the reference is computed without the dropout of the training forward."""
        active = [name for name, module in self.model.named_modules() if module.training and dropout_names(module)]
        if active and not self._has_warned and self.ctx.is_main_process:
            print(
                f"d9d: {active[0]} drops values in forward_backward(), but not in score(), as for the reference: "
                "ratios and KL terms include this noise. Set its probability to 0 for preference and policy losses, "
                "or pass disable_dropout=True to hugging_face_model."
            )
        self._has_warned = True

    def for_generation(self) -> nn.Module | WholeRows:
        """Return the model for `d9d_modules.generate`, in any layout: whole rows of token ids to whole logits.

        All ranks of a data-parallel coordinate pass the same prompts and get the same tokens. Without pipeline and
        context parallelism it is the module itself, which supports a cache.
        """
        self._require_onloaded("for_generation()")
        return self.pipeline.for_generation()

    @overload
    def weights(self, *, shards: Literal[False] = False, base_only: bool = False) -> Iterator[tuple[str, Tensor]]: ...

    @overload
    def weights(self, *, shards: Literal[True], base_only: bool = False) -> Iterator[tuple[str, Tensor, Region]]: ...

    def weights(
        self, *, shards: bool = False, base_only: bool = False
    ) -> Iterator[tuple[str, Tensor] | tuple[str, Tensor, Region]]:
        """Yield the weights of this rank's stages under their names on disk, as an export would write them.

        Without `shards`, yield whole tensors: the ranks of a stage gather one group of the state mapper at a time, such
        as the projections of a layer that the model fuses. Collective; consume the iterator completely on all ranks. A
        tensor may be a view of the group or of a parameter.

        With `shards`, yield `(name, shard, region)` for each part of a tensor on disk that this rank holds: a view of
        the parameter, and its region in the tensor. No collectives and no copies. Replicas yield equal regions.

        With `base_only`, omit adapter weights, which have no place on disk, and dequantize quantized weights. Inside
        `reference`, the weights are those of the reference.

        Raises:
            UserError: If the state mapper does not match the model or has no inverse, or if it omits trained parameters
                without `base_only`; with `shards` also if it computes values, such as dequantized ones. Also
                if a step, `load`, `offload` or `reference` occurs during the iteration.
        """
        self._require_onloaded("weights()")
        if not shards:
            same_call("weights()")
        free_all_gathered(self._whole)
        mapper = disk_mapper(self._state_mapper, self.model, base_only=base_only)
        if shards:
            return self._unchanged(weight_shards(self.model, self._state_mapper))
        return self._unchanged(gathered_weights(self.model, mapper, self.ctx))

    def _unchanged(self, weights: Iterator[W]) -> Iterator[W]:
        """Yield weights; raise `UserError` if the weights change during the iteration."""
        version = self._num_updates, self._is_offloaded, self._inside
        for each in weights:
            yield each
            del each  # this view may keep its group in memory while the next one is gathered
            if version != (self._num_updates, self._is_offloaded, self._inside):
                raise UserError(
                    "the weights changed while weights() was iterated, so the result would mix two steps; expected no "
                    "step(), load(), offload() or reference() during the iteration. Consume the iterator first."
                )

    def _require_onloaded(self, call: str) -> None:
        if self._is_offloaded:
            raise UserError(f"got {call} while the training state is offloaded; call onload() first.")

    def _require_training(self, call: str) -> None:
        """Raise `UserError` if the training state is offloaded, or inside `reference()`. `call` is for the message."""
        self._require_onloaded(call)
        if self._inside:
            raise UserError(
                f"got {call} inside {self._inside}; expected only score() or weights() there. Leave the context first."
            )

    @contextmanager
    def _no_training(self, context: str) -> Generator[None]:
        self._inside = context
        try:
            yield
        finally:
            self._inside = ""

    def accumulate(
        self,
        batches: Sequence[Any],
        loss: LossFunction,
        *,
        num_own: int | None = None,
        measured: bool = False,
        on_microbatch: Callable[[Inputs, Any], object] | None = None,
    ) -> Timeline | None:
        """Run forward and backward of prepared microbatches, without placing batches and without returning values.

        Collectives: those of the model, sends and receives between stages, and the gradient reduction.

        Args:
            batches: Microbatches on this rank's device, split for context parallelism, such as those of a
                `StreamLoader`. Every rank passes the same number.
            loss: See `forward_backward`.
            num_own: Number of microbatches that count; the later ones are stand-ins. `None` if all count.
            measured: True to measure the pipeline's timeline, which adds a barrier and an all-gather.
            on_microbatch: Called with the model's inputs and the batch of each microbatch that counts, on the ranks of
                the last stage.

        Returns:
            Start and end of every pipeline action, if `measured`.
        """
        self._require_training("accumulate()")
        num_own = len(batches) if num_own is None else num_own
        return self._step.forward_backward(
            self.num_steps + 1, batches, loss, num_own=num_own, measured=measured, on_microbatch=on_microbatch
        )

    def step(self, learning_rate: float | None = None, *, only: str | None = None) -> StepResult:
        """Reduce the gradients, divide them by the global weight, clip them, and run the optimizer step.

        Collectives: the gradient reduction and norm; the exchange of parameters shared between stages; one all-reduce
        of loss and weight; the guard's all-reduce; in the first two steps, all-gathers that compare buffers and module
        attributes.

        Args:
            learning_rate: Learning rate of all parameter groups from this step on, equal on all ranks; `None` keeps the
                learning rate of each group. For groups of different learning rates, see `set_learning_rates`.
            only: Regular expression, searched in parameter names: the step drops the gradients of all other parameters,
                so that it neither measures nor updates them. `None` updates all parameters with gradients.

        Raises:
            UserError: If `only` matches no trainable parameter. If there was no forward and backward since the last
                step, or the learning rate is negative or not finite. On every rank, if learning rates or batches differ
                between ranks; on accelerators in the next step or save, without an update. Also if a forward wrote to
                sharded parameters, if the first step created, replaced or deleted parameters, or if the second step
                read an attribute of a module that differs between ranks.
            ReplicaError: On every rank, if persistent buffers differ between ranks after the first step.
            BadStepError: On every rank, if steps were bad and the policy for bad steps is to stop.
        """
        self._require_training("step()")
        if learning_rate is not None:
            _check_rate("learning_rate", learning_rate)
            self._set_rates = (1.0, float(learning_rate))
            for group in self.optimizer.param_groups:
                group["lr"] = float(learning_rate)
        call, argument = self._rates()
        rates = call + crc32((only or "").encode()) / 2**32, argument
        result = self._step.update(self.num_steps + 1, Same(rates, self._agree.pop_digests()), only=only)
        self.num_steps, self._num_updates = self.num_steps + 1, self._num_updates + 1
        if not self.num_steps & (self.num_steps - 1):  # after steps 1, 2, 4, 8, ..., because it reads all parameters
            refuse_later_writes(self._whole, compare_next=True)
        self._first_steps.check(self.num_steps)
        if self._num_updates == 1 and self._step_timeout is not None:
            self.ctx.set_timeout(self._step_timeout)
        self._apply_decisions()
        return replace(result, learning_rate=self._reported_rate())

    def _rates(self) -> tuple[float, float]:
        """Return what must be equal on all ranks: the last call that set learning rates, and a sum of the rates.

        Callers may also set the rates of the optimizer's groups, such as by a scheduler of torch. Stages of a pipeline
        may have different groups, so they compare the argument of the call. Rates that are tensors are not compared.
        """
        call, argument = self._set_rates
        if self.pipeline.group is not None:
            return call, argument
        rates = enumerate((group["lr"] for group in self.optimizer.param_groups), 1)
        return call, sum(rate / number for number, rate in rates if not isinstance(rate, Tensor))

    def _reported_rate(self) -> float:
        """Return the learning rate of the first group, scaled if its initial value is not the peak learning rate."""
        (call, factor), peak, first = self._set_rates, self.peak_learning_rate, self._initial_rates[0]
        rate = self.optimizer.param_groups[0]["lr"]
        if call == 1.0 or first == peak:
            return rate
        return peak * (factor if call == 2.0 else rate / first)

    def _apply_decisions(self, *, settle: bool = False) -> None:
        if not self._polls_guard:
            return
        while (bad := self.guard.poll(settle=settle)) is not None:
            self.events.emit(BadStepFound(bad.step, bad.kind, bad.decision, bad.why))
            if bad.decision == "stop":
                raise BadStepError(bad.why)

    def _copies(self) -> list[Tensor]:
        averages = [] if self._average is None else list(self._average.tensors().values())
        return [*self._step.copies_of_buffers(), *averages]

    @contextmanager
    def offloaded(self) -> Generator[None]:
        """Offload parameters, buffers, gradients and optimizer state to host memory for the body. No collectives.

        Emits `StateOffloaded` after offloading, and `StateOnloaded` after onloading unless the body raises. Raises
        `UserError` if the state is already offloaded.
        """
        self._offloader.offload()
        self._is_offloaded = True
        try:
            self._after_offload()
            yield
        finally:
            self._offloader.onload()
            self._is_offloaded = False
        self.events.emit(StateOnloaded(self.num_steps))

    def offload(self) -> None:
        """Offload parameters, buffers, gradients and optimizer state to host memory, until `onload`. No collectives."""
        self._offloader.offload()
        self._is_offloaded = True
        self._after_offload()

    def _after_offload(self) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.memory.empty_cache()
        self.events.emit(StateOffloaded(self.num_steps))

    def onload(self) -> None:
        """Restore the offloaded state on the device: the same tensors, with bitwise equal values. No collectives."""
        self._offloader.onload()
        self._is_offloaded = False
        self.events.emit(StateOnloaded(self.num_steps))

    @contextmanager
    def evaluation_weights(self) -> Generator[None]:
        """Swap in the averaged weights for `score`, `weights` and generation; without an average, they do not change.

        The average is that of `Engine.open(average=)` or of an averaging optimizer. Training and saves in the body are
        errors. Collective: copies shared parameters to all stages.
        """
        self._require_training("evaluation_weights()")
        averaging = self.optimizer if self._average is None else self._average
        with evaluation_weights(self.model, averaging), self._no_training("evaluation_weights()"):
            self.pipeline.shared.copy_values()
            yield
        self.pipeline.shared.copy_values()

    def save(self, state: Any = None, *, background: bool = False) -> None:
        """Save a checkpoint of model, optimizer, learning rates, random states and step. Collective.

        Args:
            state: State of the caller, such as the number of prompts that were used: JSON, and tensors of at most
                16 MiB in all. It may differ between ranks, such as the state of a generator; it can then be loaded only
                on the same mesh.
            background: True to return after the copy to host memory, and write the files in the background.

        Raises:
            UserError: If the engine has no checkpoints, or there are accumulated gradients that no `step` has used. On
                every rank, if `state` has a `DTensor` or too large tensors.
            BadStepError: On every rank, if the last step was bad and the policy for bad steps is to stop, or a trained
                parameter is not finite.
            ReplicaError: On every rank, if persistent buffers differ between ranks.
            StateError: On every rank, if `state` has another value that is not JSON, or if this save or the previous
                background save failed on any rank.
        """
        checkpoints = self._settle_for("save()")
        same_call("save()")
        checkpoints.save(self.num_steps, state, background=background)

    def save_local(self, state: Any = None) -> None:
        """Save as `save` does, but in the local tiers of `EngineConfig.tiers` that are due at this step. Collective.

        Call it after every step. The files are written in the background, and `load` reads them if they are newer than
        the checkpoints. The errors of `save` also apply.

        Raises:
            UserError: If the job has too few hosts for the replicas of a tier.
        """
        checkpoints = self._settle_for("save_local()")
        checkpoints.save_local(self.num_steps, state)

    def delete_local(self) -> None:
        """Delete the saves of `save_local` on all hosts, when the run is complete. Collective."""
        self._require_checkpoints().delete_local()

    def _settle_for(self, call: str) -> EngineCheckpoints:
        """Apply the guard's decisions up to the last step, and return the checkpoints to save to. Collective."""
        self._require_training(call)
        checkpoints = self._require_checkpoints()
        if self._step.is_pending:
            raise UserError(
                f"got {call} with accumulated gradients, which checkpoints do not contain; call step() first."
            )
        self._apply_decisions(settle=True)
        return checkpoints

    def load(self) -> Any:
        """Load the newest valid checkpoint, and return the state that was passed to `save`. Collective.

        Tensors of the state have the saved dtypes and values, and are on the CPU; tuples are now lists. Without
        checkpoints, the weights do not change, and the result is `None`. Accumulated gradients are discarded.
        Learning rates that `step` or `set_learning_rates` has set are restored. Buffers that checkpoints omit, such as
        tokens per expert, get the values that they had before the first step.

        Raises:
            UserError: If the engine has no checkpoints. On every rank, if the values of `save` differ between ranks,
                and the mesh is not that of the save.
            StateError: On every rank, if there are checkpoints, but none is valid.
        """
        self._require_training("load()")
        same_call("load()")
        self._step.discard()
        free_all_gathered(self._whole)
        found = self._require_checkpoints().load()
        if found is None:
            return None
        self.after_restore(found[0])
        return found[1]

    def after_restore(self, num_steps: int) -> None:
        """Complete the load of a checkpoint of a step: buffers that it omits, and copies of shared parameters.

        Collective: copies shared parameters to all stages.
        """
        self.num_steps, self._num_updates = num_steps, self._num_updates + 1
        self._step.reset_buffers()
        self.pipeline.shared.copy_values()

    def _require_checkpoints(self) -> EngineCheckpoints:
        if self._checkpoints is None:
            raise UserError("this engine has no checkpoints; create it with Engine.open or Engine(checkpoints=...).")
        return self._checkpoints

    def set_learning_rates(self, factor: float) -> None:
        """Set the learning rate of each parameter group to `factor` times its initial one, equal on all ranks."""
        _check_rate("factor", factor)
        self._set_rates = (2.0, float(factor))
        for group, initial in zip(self.optimizer.param_groups, self._initial_rates, strict=True):
            group["lr"] = initial * factor

    def replay(self, batches: Sequence[Any], loss: LossFunction, watch: Watch) -> None:
        """Repeat forward and backward of prepared microbatches, discard the gradients, and restore all buffers.

        `watch` is called with "the loss" and the loss of each microbatch. Collectives: those of the model and the
        gradient reduction.
        """
        self._step.replay(batches, loss, watch)


def _check_rate(name: str, value: float) -> None:
    is_number = not isinstance(value, bool) and isinstance(value, (float, SupportsFloat))  # the protocol is slow
    if not is_number or not 0.0 <= float(value) < math.inf:
        raise UserError(f"{name} = {value!r}; expected a finite number, 0 or more.")
