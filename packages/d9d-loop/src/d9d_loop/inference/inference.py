"""Inference over a dataset. Each result is written once, in sample order, even after restarts."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, final

import torch
from pydantic import JsonValue
from torch import nn
from torch.utils.data import default_collate

from d9d_dist import ContextSplit, DistributedContext, UserError, agree, gather_json, read_launch
from d9d_loop.config.inference_config import InferenceConfig
from d9d_loop.data.batch_reader import BatchReader
from d9d_loop.data.contents import digest_of, identity_of
from d9d_loop.data.data_provider import as_samples
from d9d_loop.data.in_fork import read_apart
from d9d_loop.data.indexed_stream import IndexedStream
from d9d_loop.data.sample_stream import Collate, Samples
from d9d_loop.data.worker_pool import ReadJob
from d9d_loop.engine.code_digest import describe_code, source_digests
from d9d_loop.engine.model_build import build_pipeline
from d9d_loop.engine.pipeline import Pipeline
from d9d_loop.engine.start import agree_on_start
from d9d_loop.event_bus import Events
from d9d_loop.events import ConfigReady, ModelReady, PartWritten
from d9d_loop.inference.pace import Pace
from d9d_loop.inference.results_folder import ResultsFolder
from d9d_loop.isolation import isolated_random
from d9d_loop.job.progress import Progress
from d9d_loop.job.stamped_output import stamped_output
from d9d_loop.model.model_digest import model_digest
from d9d_loop.model.model_plan import ModelPlan, plan_model
from d9d_loop.model.model_provider import BuildFunction, ModelProvider, model_provider
from d9d_loop.resilience import HangWatchdog
from d9d_loop.resilience.launcher_watch import LauncherWatch
from d9d_loop.task import BatchPlacement, InferenceTask
from d9d_loop.writable import check_writable
from d9d_pipeline import OneForwardOneBackward
from d9d_state.folder_lock import locked_folder


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """Result of an inference job: number of samples, and file of JSON lines, one per sample in the dataset's order."""

    num_samples: int
    file: Path


@final
class Inference:
    """Inference over a dataset, in a single process or under torchrun with the same script.

    A restarted job computes only the missing parts. The number of ranks may differ between runs. Other data, values of
    the model, attributes of the task, `batch_size`, `precision` or `seed` than those of the existing parts are an
    error, except attributes whose names begin with an underscore. Changes of the code are printed.

    Attributes:
        events: Event bus. Subscribe with `inference.events.on(PartWritten, handler)`.

    Args:
        config: Configuration of the job.
        model: Model provider, a module, or a function that builds a pipeline stage of the model.
        data: Samples to compute results for.
        collate: Function that builds a batch from a list of samples.
    """

    def __init__(
        self,
        config: InferenceConfig,
        *,
        model: ModelProvider | nn.Module | BuildFunction,
        data: Samples,
        task: InferenceTask,
        collate: Collate = default_collate,
    ) -> None:
        self.events = Events(seed=config.seed)
        self._config = config
        self._provider = model_provider(model)
        self._weights = config.weights or self._provider.initial_weights
        self._data, self._task, self._collate = as_samples(data, "data"), task, collate
        self._results = ResultsFolder(
            config.run.dir / "results",
            num_samples=len(data),
            part_size=config.part_size,
            identity={
                "weights": None if self._weights is None else str(self._weights.absolute()),
                "batch_size": config.batch_size,
                "precision": config.precision,
                "seed": config.seed,
                "task": type(task).__qualname__,
                **_settings(task),
            },
        )

    def run(self) -> InferenceResult:
        """Compute the missing results and write the results file. Collective over all ranks.

        Raises:
            UserError: If configuration, model, weights, data and existing results do not fit together, before a process
                group starts; if the configuration differs between ranks; or if the task returns a wrong number of
                results for a batch.
        """
        with stamped_output(read_launch().rank, enabled=self._config.logging.stamps):
            return self._run()

    def _run(self) -> InferenceResult:
        plan = self._plan()
        hangs = self._config.resilience
        with (
            LauncherWatch(),
            plan.mesh.build(
                launch=plan.launch, timeouts=hangs.timeouts.timeouts, precision=self._config.precision
            ) as ctx,
            HangWatchdog(ctx, enabled=hangs.watchdog.enabled) as watchdog,
        ):
            self.events.watch(watchdog.phase)
            resolved = self._config.model_dump(mode="json")
            read, num_workers = partial(identity_of, self._data), self._config.data.num_workers
            identity = cache(partial(read_apart, read, num_workers=num_workers, what="the data"))
            others = {"collate": self._collate}
            agree_on_start(resolved, ctx, plan, self._task, others, data={"the data": identity})
            self.events.emit(ConfigReady(0, resolved, ctx))
            with locked_folder(self._results.folder, ctx, wait_seconds=hangs.timeouts.lock_seconds):
                code = describe_code(plan.built, self._task, others)
                self._check({"the data": identity()}, ctx, code)
                pipeline = build_pipeline(plan, ctx, progress=self._config.logging.progress)
                pipeline.shared.copy_values()
                pipeline.model.eval()
                self._check({"the values of the model": model_digest(pipeline.model, ctx)}, ctx, {})
                self._complete(pipeline, ctx, watchdog)
        return InferenceResult(len(self._data), self._results.file)

    def _check(self, contents: Mapping[str, JsonValue], ctx: DistributedContext, code: Mapping[str, object]) -> None:
        """Raise `UserError` if the folder has results of other contents; report changed code. Collective."""
        problem: UserError | None = None
        if ctx.is_main_process:
            digests = {name: digest_of(each)[:16] for name, each in code.items()} | source_digests(self._weights)
            try:
                if (lines := self._results.check(contents, digests)) and code:
                    first = f"d9d: results in {self._results.folder} are kept, which other code has computed:"
                    print("\n".join([first, *lines]), flush=True)
            except UserError as error:
                problem = error
        agree(problem)

    def _complete(self, pipeline: Pipeline, ctx: DistributedContext, watchdog: HangWatchdog) -> None:
        """Compute the missing parts, and concatenate all parts into one file on the main process."""
        found = (self._results.is_complete(), self._results.missing()) if ctx.is_main_process else None
        is_complete, missing = gather_json(found)[0]
        if is_complete:
            return
        if missing:
            self.events.emit(ModelReady(0, pipeline.model, ctx))
            self._compute(missing, pipeline, ctx, watchdog)
        ctx.set_timeout(ctx.timeouts.startup + watchdog.margin)
        with watchdog.phase("writing the results", timeout=ctx.timeouts.startup):
            if ctx.is_main_process:
                self._results.finish()
            ctx.barrier()

    def _plan(self) -> ModelPlan:
        config, launch = self._config, read_launch()
        if len(self._data) == 0:
            raise UserError("the data are empty; expected at least one sample. Check the path of the data.")
        check_writable(config.run.dir)
        self._results.check()
        if self._weights is None and self._provider.late_init:
            raise UserError(
                f"weights is not set, and {type(self._provider).__name__} builds on `meta`, so the results would be "
                "random. Set --weights to a folder, or late_init = False if the build sets the "
                "weights."
            )
        size = min(config.batch_size, len(self._data))
        return plan_model(
            self._provider,
            launch=launch,
            mesh=config.mesh.resolve(launch.world_size),
            schedule=OneForwardOneBackward(),
            num_microbatches=1,
            seed=config.seed,
            task=self._task,
            first_batch=lambda: self._collate([self._data[index] for index in range(size)]),
        ).with_weights("weights", self._weights)

    def _compute(
        self, missing: Sequence[int], pipeline: Pipeline, ctx: DistributedContext, watchdog: HangWatchdog
    ) -> None:
        """Compute the missing parts in rounds, one part per data-parallel rank in each round."""
        dp_size, config = ctx.size("batch", "dp"), self._config
        pace = Pace(ctx, watchdog)
        own = [missing[start : start + dp_size] for start in range(0, len(missing), dp_size)]
        parts = [dict(enumerate(at_once)).get(ctx.coordinate("batch", "dp")) for at_once in own]
        indices = [self._batches_of(part) for part in parts]
        # In each round, all ranks run the same number of batches, because of the collectives.
        counts = [max(len(self._batches_of(each)) for each in at_once) for at_once in own]
        padded = [[*found, *[[0]] * (count - len(found))] for found, count in zip(indices, counts, strict=True)]
        batches = BatchReader(
            IndexedStream(self._data, seed=0, shuffle=False),
            self._collate,
            (ReadJob(batch[0], batch) for of_a_part in padded for batch in of_a_part),
            seed=config.seed,
            place=BatchPlacement(self._task, ctx),
            device=ctx.device,
            num_workers=config.data.num_workers,
            prefetch=config.data.prefetch,
            timeout=config.data.worker_timeout,
        )
        num_parts = self._results.num_parts
        progress = Progress(
            num_steps=num_parts,
            done=num_parts - len(missing),
            visible=ctx.is_main_process,
            device=ctx.device,
            bar=config.logging.progress,
        )
        is_writing = pipeline.has_last_stage and ctx.coordinate("batch", "cp") == ctx.coordinate("batch", "tp") == 0
        with closing(batches):
            for number, part in enumerate(parts):
                with torch.no_grad(), isolated_random(config.seed, "part", -1 if part is None else part, device=True):
                    around = partial(pace.batch, number + 1)
                    sizes = [*map(len, indices[number]), *[0] * (counts[number] - len(indices[number]))]
                    results = self._results_of(batches, sizes, pipeline, ctx, around)
                if part is not None and is_writing:
                    self._results.write(part, results)
                for _ in own[number]:
                    progress.step()
                num_done = num_parts - len(missing) + min((number + 1) * dp_size, len(missing))
                self.events.emit(PartWritten(num_done, part))
            pace.end()
        progress.close()

    def _batches_of(self, part: int | None) -> list[list[int]]:
        size = self._config.batch_size
        samples = [] if part is None else list(self._results.samples_of(part))
        return [samples[start : start + size] for start in range(0, len(samples), size)]

    def _results_of(
        self,
        batches: Iterable[Any],
        sizes: Sequence[int],
        pipeline: Pipeline,
        ctx: DistributedContext,
        around: Callable[[], AbstractContextManager[None]],
    ) -> list[JsonValue]:
        """Return the results of a part in order; none on ranks without the last stage.

        `sizes` has the number of samples of each batch, 0 for dummy batches. `around` returns the context of one
        executor step.
        Collective over the ranks of the pipeline, tensor and context parallelism.
        """
        split = ContextSplit(ctx.mesh_for("batch")["cp"]) if ctx.size("batch", "cp") > 1 else None
        results: list[JsonValue] = []

        def take(outputs: Any, index: int, batch: Any) -> None:
            whole = outputs if split is None else self._task.join_sequence(outputs, split)
            if not sizes[index]:
                return
            found = self._task.results(whole, batch)
            if len(found) != sizes[index]:
                raise UserError(
                    f"{type(self._task).__name__}.results returned {len(found)} results for a batch of {sizes[index]} "
                    "samples; expected one result per sample, in order."
                )
            results.extend(found)

        inputs = partial(pipeline.inputs_of, self._task)
        pipeline.forward(batches, len(sizes), inputs=inputs, on_output=take, around=around)
        return results


def _settings(task: InferenceTask) -> dict[str, JsonValue]:
    """Return the attributes of a task whose names do not begin with an underscore; digests of those with parts."""
    found: Any = object.__getstate__(task)
    parts = filter(None, found if isinstance(found, tuple) else (found,))  # with the values of slots
    values = {name: value for part in parts for name, value in part.items() if not name.startswith("_")}
    return {f"the task's {name}": _plain(value) for name, value in values.items()}


def _plain(value: Any) -> JsonValue:
    match value:
        case float() if not math.isfinite(value):
            return repr(value)
        case bool() | int() | float() | str() | None:
            return value
        case Path():
            return str(value)
        case _:
            return digest_of(value)[:16]
