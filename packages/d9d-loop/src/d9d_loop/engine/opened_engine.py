"""Start of an engine from a configuration: the plan, the process group, and the engine's parts."""

import json
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from functools import partial
from typing import TypeVar

from torch import nn

from d9d_dist import StageInfo, UserError, agree, parameter_roles, read_launch, seed_everything
from d9d_loop.config.engine_config import EngineConfig
from d9d_loop.engine.checkpoints import EngineCheckpoints
from d9d_loop.engine.local_tiers import check_local_tiers
from d9d_loop.engine.model_build import build_pipeline
from d9d_loop.engine.optimizer_fit import check_optimizer
from d9d_loop.event_bus import Events
from d9d_loop.model.model_check import check_trained_dtypes, describe_modes
from d9d_loop.model.model_plan import plan_model
from d9d_loop.model.model_provider import FunctionProvider, ModelProvider
from d9d_loop.optimizers.optimizer import OptimizerProvider
from d9d_loop.optimizers.weight_average import average_of
from d9d_loop.resilience import StepGuard, check_health
from d9d_loop.task import BatchTask
from d9d_loop.writable import check_writable
from d9d_pipeline import Schedule

E = TypeVar("E")


@contextmanager
def opened_engine(
    config: EngineConfig,
    build: Callable[..., E],
    *,
    model: ModelProvider | Callable[[StageInfo], nn.Module],
    task: BatchTask,
    optimizer: OptimizerProvider | None,
    pipeline_schedule: Schedule | None,
) -> Generator[E]:
    """Check the configuration, start the process group, and yield an engine; see `Engine.open`. Collective.

    `build` gets the arguments of `Engine` except `reference`.
    """
    provider = model if isinstance(model, ModelProvider) else FunctionProvider(model)
    _check_bad_steps(config)
    check_local_tiers(config.tiers, section="tiers")
    check_writable(config.run.dir)
    launch, schedule = read_launch(), pipeline_schedule or config.pipeline_schedule.build()
    mesh = config.mesh.resolve(launch.world_size)
    plan = plan_model(
        provider,
        launch=launch,
        mesh=mesh,
        schedule=schedule,
        # Any supported number: the engine builds programs for other numbers when they are first used.
        num_microbatches=2 * mesh.pipeline_parallel * schedule.stages_per_rank if mesh.pipeline_parallel > 1 else 1,
        seed=config.seed,
        task=task,
        first_batch=None,
    ).with_weights("initial_weights", config.initial_weights or provider.initial_weights)
    check_trained_dtypes(plan.built.module)
    if optimizer is None:
        config.optimizer.check(plan.built.module)
        # A stage need not match every parameter group: the groups were checked on the whole model.
        optimizer = partial(config.optimizer.build, whole=False, roles=parameter_roles(plan.built.module))
    mapper = provider.state_mapper(plan.built.module)
    timeouts = config.timeouts.timeouts
    with mesh.build(launch=launch, timeouts=timeouts, precision=config.precision) as ctx:
        agree(same={"the configuration": json.dumps(config.model_dump(mode="json"), sort_keys=True)})
        health = check_health(config.health, ctx=ctx)
        if health is not None and health.slow and ctx.is_main_process:
            print(health)
        if (modes := describe_modes(plan.built.module)) is not None and ctx.is_main_process:
            print(modes)
        pipeline = build_pipeline(plan, ctx, progress=config.progress)
        pipeline.set_gradients(config.gradients)
        seed_everything(config.seed, ctx)
        built = check_optimizer(optimizer(pipeline.model))
        pipeline.shared.copy_values()
        average = average_of(pipeline.model, built, config.average)
        guard, events = StepGuard(built, config=config.bad_steps, ctx=ctx), Events(seed=config.seed)
        checkpoints = EngineCheckpoints(
            config, model=pipeline.model, optimizer=built, average=average, guard=guard, ctx=ctx, events=events
        )
        with closing(checkpoints):
            yield build(
                pipeline,
                built,
                ctx=ctx,
                task=task,
                max_norm=config.gradients.max_norm,
                num_microbatches=2 * pipeline.num_stages if pipeline.num_stages > 1 else 1,
                guard=guard,
                average=average,
                events=events,
                state_mapper=mapper,
                checkpoints=checkpoints,
            )


def _check_bad_steps(config: EngineConfig) -> None:
    for key in ("non_finite", "spike"):
        if getattr(config.bad_steps, key) == "roll_back":
            raise UserError(
                f'bad_steps.{key} = "roll_back", but an engine cannot repeat the steps of its caller; expected another '
                f'action. Use "stop", catch BadStepError, and call engine.load().'
            )
