"""Inference over a dataset, forward only. Each result is written once, in sample order, also after restarts."""

import json
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch import nn
from torch.utils.data import default_collate

from d9d_dist import ContextSplit, DistributedContext, StageInfo, UserError, broadcast_object, read_launch
from d9d_loop.config.inference_config import InferenceConfig
from d9d_loop.data.batch_placement import BatchPlacement
from d9d_loop.data.batches import Collate, Samples, batch_loader
from d9d_loop.event_bus import Events
from d9d_loop.events import ConfigReady, ModelReady, PartWritten
from d9d_loop.inference.results_folder import ResultsFolder
from d9d_loop.job.job_check import check_data, check_degrees, check_weights, check_writable
from d9d_loop.job.model_plan import ModelPlan, build_program, check_stages
from d9d_loop.job.own_random import own_random
from d9d_loop.job.pipeline import Pipeline
from d9d_loop.job.progress import Progress
from d9d_loop.model.built_model import build_model
from d9d_loop.model.model_build import build_pipeline
from d9d_loop.model.model_provider import FunctionProvider, ModelProvider
from d9d_loop.resilience import HangWatchdog
from d9d_loop.task import InferenceTask, to_inputs
from d9d_pipeline import Executor, OneForwardOneBackward
from d9d_state import CheckpointStore, load_model_state

_MOST_AHEAD = 4
"""Number of batches that a rank may be ahead of the slowest rank.

Large enough that batches of uneven duration rarely make a rank wait.
"""


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """Result of an inference job.

    Attributes:
        num_samples: Number of samples in `file`.
        file: Results as JSON lines, one line per sample in the order of the dataset.
    """

    num_samples: int
    file: Path


@final
class Inference:
    """Runs a model over a dataset. The same script runs as one process and under torchrun.

    A job that is started again computes only the missing parts. The number of ranks may differ between runs.

    Attributes:
        events: Registry of event handlers: `inference.events.on(PartWritten, handler)`.

    Args:
        config: Configuration of the job.
        model: Model provider, or a function that builds a pipeline stage of the model.
        data: Samples to compute results for.
        task: Provides model inputs and results.
        collate: Builds a batch from a list of samples.
    """

    def __init__(
        self,
        config: InferenceConfig,
        *,
        model: ModelProvider | Callable[[StageInfo], nn.Module],
        data: Samples,
        task: InferenceTask,
        collate: Collate = default_collate,
    ) -> None:
        self.events = Events(seed=config.seed)
        self._config = config
        self._provider = model if isinstance(model, ModelProvider) else FunctionProvider(model)
        self._weights = config.weights or self._provider.initial_weights
        self._data, self._task, self._collate = data, task, collate
        self._results = ResultsFolder(
            config.run.dir / "results",
            num_samples=len(data),
            part_size=config.part_size,
            identity=_what_results_follow_from(config, self._weights, task),
        )

    def run(self) -> InferenceResult:
        """Compute the missing results and write the results file. Collective over all ranks.

        Returns:
            Number of samples and results file; equal on every rank.

        Raises:
            UserError: If configuration, model, weights, data and existing results do not fit together, before a
                process group starts; if the configuration differs between ranks; or if the task returns a wrong number
                of results for a batch.
        """
        plan = self._check()
        hangs = self._config.resilience
        with (
            plan.mesh.build(launch=plan.launch, timeouts=hangs.timeouts.timeouts) as ctx,
            HangWatchdog(ctx, enabled=hangs.watchdog.enabled) as watchdog,
        ):
            self.events.watch(watchdog.phase)
            resolved = self._config.model_dump(mode="json")
            ctx.check_agreement("the configuration", json.dumps(resolved, sort_keys=True))
            self.events.emit(ConfigReady(0, resolved, ctx))
            with CheckpointStore(self._results.folder).locked(ctx):
                self._complete(plan, ctx, watchdog)
        return InferenceResult(len(self._data), self._results.file)

    def _complete(self, plan: ModelPlan, ctx: DistributedContext, watchdog: HangWatchdog) -> None:
        """Compute the missing parts, and join all parts to one file on the main process."""
        found: tuple[bool, list[int]] = (False, [])
        if ctx.is_main_process:
            found = self._results.is_complete(), self._results.missing()
        is_complete, missing = broadcast_object(found)
        if is_complete:
            return
        if missing:
            self._compute(missing, self._load(plan, ctx), ctx, watchdog)
        ctx.set_timeout(ctx.timeouts.startup + watchdog.margin)
        with watchdog.phase("writing the results", timeout=ctx.timeouts.startup):
            if ctx.is_main_process:
                self._results.finish()
            ctx.barrier()

    def _check(self) -> ModelPlan:
        config, task = self._config, self._task
        launch = read_launch()
        mesh = config.mesh.resolve(launch.world_size)
        check_degrees(mesh, task)
        check_data(self._data, "data")
        check_writable(config.run.dir)
        self._results.check()
        if self._weights is None and self._provider.late_init:
            raise UserError(
                f"weights is not set, and {type(self._provider).__name__} builds on `meta`, so the results would be "
                "those of random weights. Set --weights to a folder, or late_init = False if the build sets the "
                "weights."
            )
        built = build_model(self._provider, StageInfo(), seed=config.seed, keep_values=launch.world_size == 1)
        model = built.module
        mapper = None
        if self._weights is not None:
            mapper = self._provider.load_mapper(model, self._weights)
            check_weights("weights", self._weights, mapper, built)
        schedule = OneForwardOneBackward()
        program = build_program(schedule, num_ranks=mesh.pipeline_parallel, num_microbatches=1)
        # With context parallelism, the task never gets a whole batch, so the stages are not run on `meta`.
        cuts = mesh.context_parallel_shard * mesh.context_parallel_replicate > 1
        size = min(config.batch_size, len(self._data))
        shared_names = check_stages(
            self._provider,
            model,
            program,
            seed=config.seed,
            stages_per_rank=schedule.stages_per_rank,
            inputs=None if cuts else lambda: task.inputs(self._collate([self._data[index] for index in range(size)])),
        )
        return ModelPlan(launch, mesh, schedule, program, self._weights, mapper, shared_names, built)

    def _load(self, plan: ModelPlan, ctx: DistributedContext) -> Pipeline:
        pipeline = build_pipeline(self._provider, plan, ctx, seed=self._config.seed)
        if plan.weights is not None:
            load_model_state(
                pipeline.model,
                plan.weights,
                plan.load_mapper,
                # A stage uses only a part of the files. `_check` has checked the whole model.
                unused="ignore" if len(plan.program.ranks) > 1 else "error",
                progress=self._config.logging.progress,
            )
        pipeline.shared.copy_values()
        pipeline.model.eval()
        self.events.emit(ModelReady(0, pipeline.model, ctx))
        return pipeline

    def _compute(
        self, missing: Sequence[int], pipeline: Pipeline, ctx: DistributedContext, watchdog: HangWatchdog
    ) -> None:
        """Compute the missing parts in rounds, one part per data-parallel rank in each round."""
        dp_size, config = ctx.size("batch", "dp"), self._config
        forward = _PartForward(pipeline, self._task, ctx)
        pace = _Pace(ctx, watchdog)
        # All ranks run the same number of batches, because they take part in collectives. Padding results are dropped.
        batches_of_a_part = -(-min(config.part_size, len(self._data)) // config.batch_size)
        own = [missing[start : start + dp_size] for start in range(0, len(missing), dp_size)]
        parts = [dict(enumerate(at_once)).get(ctx.coordinate("batch", "dp")) for at_once in own]
        indices = [batch for part in parts for batch in self._batches_of(part, batches_of_a_part)]
        loader = batch_loader(
            self._data,
            indices,
            collate=self._collate,
            num_workers=config.data.num_workers,
            pin_memory=ctx.device.type != "cpu",
        )
        placed = map(BatchPlacement(self._task, ctx), loader)
        num_parts = self._results.num_parts
        progress = Progress(
            num_steps=num_parts,
            done=num_parts - len(missing),
            visible=ctx.is_main_process,
            bar=config.logging.progress,
        )
        for number, part in enumerate(parts):
            with torch.no_grad(), own_random(config.seed, "part", -1 if part is None else part, device=True):
                start = number * batches_of_a_part
                sizes = [len(batch) for batch in indices[start : start + batches_of_a_part]]
                results = forward(placed, sizes, each=partial(pace.batch, number + 1))
            if part is not None and results is not None:
                # The remaining results are those of padding batches.
                self._results.write(part, results[: len(self._results.samples_of(part))])
            for _ in own[number]:
                progress.step()
            num_done = num_parts - len(missing) + min((number + 1) * dp_size, len(missing))
            self.events.emit(PartWritten(num_done, part))
        pace.end()
        progress.close()

    def _batches_of(self, part: int | None, num_batches: int) -> list[list[int]]:
        size = self._config.batch_size
        samples = [] if part is None else list(self._results.samples_of(part))
        batches = [samples[start : start + size] for start in range(0, len(samples), size)]
        return [*batches, *[[0]] * (num_batches - len(batches))]


def _what_results_follow_from(
    config: InferenceConfig, weights: Path | None, task: InferenceTask
) -> dict[str, JsonValue]:
    return {
        "weights": None if weights is None else str(weights.absolute()),
        "batch_size": config.batch_size,
        "seed": config.seed,
        "task": type(task).__qualname__,
    }


@final
class _Pace:
    """Keeps ranks within `_MOST_AHEAD` batches of each other, so that a lost rank is noticed before the end.

    After each batch, a rank starts an asynchronous barrier. It then waits for the barrier of the batch `_MOST_AHEAD`
    before. The barrier before that one is complete, so a wait covers at most one batch of the slowest rank, and its
    time limit is that of one batch.
    """

    def __init__(self, ctx: DistributedContext, watchdog: HangWatchdog) -> None:
        self._ctx, self._watchdog = ctx, watchdog
        self._device_ids = None if ctx.device.type == "cpu" else [ctx.device.index]
        self._told: deque[dist.Work] = deque()
        self._limit = ctx.timeouts.startup
        self._has_started = False
        self._set_timeout()

    @contextmanager
    def batch(self, part: int) -> Generator[None]:
        """Context to compute a batch in.

        Collective: starts a barrier on exit. It is waited for `_MOST_AHEAD` batches later, or at once after the first
        batch.

        Args:
            part: Number of the part, counted from 1, for messages of the watchdog.
        """
        self._watchdog.beat(part, "a batch")
        yield
        self._tell()
        if not self._has_started:
            # Kernels are compiled and process groups are connected now: switch from the start-up to the step timeout.
            self._wait()
            self._limit, self._has_started = self._ctx.timeouts.step, True
            self._set_timeout()
        elif len(self._told) > _MOST_AHEAD:
            self._wait()

    def end(self) -> None:
        """Wait until every rank has written its results. Collective: a barrier."""
        self._tell()
        while self._told:
            self._wait()

    def _tell(self) -> None:
        done = dist.barrier(device_ids=self._device_ids, async_op=True)
        assert done is not None, "an asynchronous collective returns its work"
        self._told.append(done)

    def _wait(self) -> None:
        with self._watchdog.phase("the wait for other ranks", timeout=self._limit):
            self._told.popleft().wait()

    def _set_timeout(self) -> None:
        """Set the timeout of collectives: a barrier may wait for all batches that another rank is behind."""
        self._ctx.set_timeout(self._limit + _MOST_AHEAD * self._ctx.timeouts.step + self._watchdog.margin)


@final
class _PartForward:
    """Runs the batches of a part through the model.

    An executor step takes two microbatches per pipeline rank, or one microbatch without pipeline parallelism.
    """

    def __init__(self, pipeline: Pipeline, task: InferenceTask, ctx: DistributedContext) -> None:
        self._pipeline, self._task = pipeline, task
        self._executors: dict[int, Executor] = {}
        self._at_a_time = 2 * ctx.size("batch", "pp") if ctx.size("batch", "pp") > 1 else 1
        self._split = ContextSplit(ctx.mesh_for("batch")["cp"]) if ctx.size("batch", "cp") > 1 else None
        is_last = ctx.coordinate("batch", "pp") == ctx.size("batch", "pp") - 1
        self._writes = is_last and ctx.coordinate("batch", "cp") == ctx.coordinate("batch", "tp") == 0

    def __call__(
        self, batches: Iterator[Any], sizes: Sequence[int], *, each: Callable[[], AbstractContextManager[None]]
    ) -> list[JsonValue] | None:
        """Compute the results of a part.

        Collective over the ranks of the pipeline, tensor and context parallelism.

        Args:
            batches: Placed batches; the batches of the part are taken from it.
            sizes: Number of samples of each batch of the part.
            each: Returns the context of one executor step.

        Returns:
            Results of all samples in order, those of padding batches included; `None` on ranks that do not write.

        Raises:
            UserError: If the number of results of the task differs from the number of samples of the batch.
        """
        results: list[JsonValue] = []
        for start in range(0, len(sizes), self._at_a_time):
            with each():
                some = list(islice(batches, min(self._at_a_time, len(sizes) - start)))

                def take(outputs: Any, number: int, start: int = start, some: Sequence[Any] = some) -> None:
                    whole = outputs if self._split is None else self._task.join_sequence(outputs, self._split)
                    found = self._task.results(whole, some[number])
                    if len(found) != sizes[start + number]:
                        raise UserError(
                            f"{type(self._task).__name__}.results returned {len(found)} results for a batch of "
                            f"{sizes[start + number]} samples; expected one result per sample, in order."
                        )
                    results.extend(found)

                if len(some) not in self._executors:
                    self._executors[len(some)] = self._pipeline.evaluation(len(some))
                self._executors[len(some)].step([to_inputs(self._task.inputs(batch)) for batch in some], take)
        return results if self._writes else None
