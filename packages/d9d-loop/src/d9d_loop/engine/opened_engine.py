"""Start of an engine from a configuration: the plan, the process group, and the engine's parts."""

from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from typing import TypeVar

from torch import nn

from d9d_dist import UserError, read_launch
from d9d_loop.config.engine_config import EngineConfig
from d9d_loop.engine.checkpoints import EngineCheckpoints
from d9d_loop.engine.local_tiers import check_local_tiers
from d9d_loop.engine.optimizer_fit import optimizer_provider
from d9d_loop.engine.start import agree_on_start, build_training
from d9d_loop.event_bus import Events
from d9d_loop.model.compiled_model import check_backend
from d9d_loop.model.model_check import check_trained_dtypes
from d9d_loop.model.model_options import ModelOptions
from d9d_loop.model.model_plan import plan_model
from d9d_loop.model.model_provider import BuildFunction, ModelProvider, model_provider
from d9d_loop.optimizers.optimizer import OptimizerProvider
from d9d_loop.task import BatchTask
from d9d_loop.writable import check_writable
from d9d_pipeline import Schedule

E = TypeVar("E")


@contextmanager
def opened_engine(
    config: EngineConfig,
    build: Callable[..., E],
    *,
    model: ModelProvider | nn.Module | BuildFunction,
    task: BatchTask,
    optimizer: OptimizerProvider | None,
    pipeline_schedule: Schedule | None,
) -> Generator[E]:
    """Check the configuration, start the process group, and yield an engine; see `Engine.open`. Collective.

    `build` gets the arguments of `Engine` except `reference`.
    """
    provider = model_provider(model)
    _check_bad_steps(config)
    if config.compile is not None:
        check_backend(config.compile)
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
        options=ModelOptions(config.freeze, config.activation_checkpointing),
    ).with_weights("initial_weights", config.initial_weights or provider.initial_weights)
    check_trained_dtypes(plan.built.module)
    build_optimizer = optimizer_provider(optimizer, config.optimizer, plan.built.module)
    mapper = provider.state_mapper(plan.built.module)
    with mesh.build(launch=launch, timeouts=config.timeouts.timeouts, precision=config.precision) as ctx:
        resolved = config.model_dump(mode="json")
        agree_on_start(resolved, ctx, plan, task, {"the optimizer": build_optimizer}, health=config.health)
        training = build_training(
            plan,
            ctx,
            build_optimizer,
            gradients=config.gradients,
            average=config.average,
            bad_steps=config.bad_steps,
            progress=config.progress,
            compile_with=config.compile,
        )
        training.pipeline.shared.copy_values()
        events = Events(seed=config.seed)
        checkpoints = EngineCheckpoints(config, training, ctx=ctx, events=events)
        num_stages = training.pipeline.num_stages
        with closing(checkpoints):
            yield build(
                training.pipeline,
                training.optimizer,
                ctx=ctx,
                task=task,
                max_norm=config.gradients.max_norm,
                num_microbatches=2 * num_stages if num_stages > 1 else 1,
                guard=training.guard,
                average=training.average,
                peak_learning_rate=config.optimizer.learning_rate if optimizer is None else None,
                events=events,
                state_mapper=mapper,
                checkpoints=checkpoints,
                step_timeout=ctx.timeouts.step if "step_seconds" in config.timeouts.model_fields_set else None,
            )


def _check_bad_steps(config: EngineConfig) -> None:
    for key in ("non_finite", "spike"):
        if getattr(config.bad_steps, key) == "roll_back":
            raise UserError(
                f'bad_steps.{key} = "roll_back", but an engine cannot repeat the steps of its caller; expected another '
                f'action. Use "stop", catch BadStepError, and call engine.load().'
            )
