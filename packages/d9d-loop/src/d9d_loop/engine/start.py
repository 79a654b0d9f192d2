"""Start of a job on all ranks: agreement and health check, then the model of this rank with its optimizer.

The Trainer, `Engine.open` and `Inference` start in the same order. Each rank plans alone, by `plan_model`. Then the
process group starts, and `agree_on_start` compares the ranks. A training continues with `build_training`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from pydantic import JsonValue
from torch.optim import Optimizer

from d9d_dist import DistributedContext, UserError, agree, seed_everything
from d9d_loop.config.trainer_config import AverageConfig, GradientConfig
from d9d_loop.data.contents import agree_on_data, flatten
from d9d_loop.engine.code_digest import describe_code
from d9d_loop.engine.model_build import build_pipeline
from d9d_loop.engine.optimizer_fit import check_optimizer
from d9d_loop.engine.pipeline import Pipeline
from d9d_loop.model.compiled_model import compile_stages
from d9d_loop.model.model_check import describe_modes
from d9d_loop.model.model_plan import ModelPlan
from d9d_loop.optimizers.optimizer import OptimizerProvider
from d9d_loop.optimizers.weight_average import WeightAverage, average_of
from d9d_loop.resilience import StepGuard, check_health
from d9d_loop.resilience.resilience_config import BadStepConfig, HealthConfig
from d9d_loop.task import BatchTask
from d9d_metrics.trackers.redaction import redact_secrets


def agree_on_start(
    resolved: Mapping[str, JsonValue],
    ctx: DistributedContext,
    plan: ModelPlan,
    task: BatchTask,
    others: Mapping[str, object],
    *,
    mistake: UserError | None = None,
    data: Mapping[str, Callable[[], JsonValue]] | None = None,
    health: HealthConfig | None = None,
) -> None:
    """Raise the same `UserError` on all ranks if they have other code, another configuration or other data. Collective.

    `resolved` is the configuration as JSON, and `others` are more objects of the user, by name. A `mistake` that this
    rank has found alone is raised on all ranks. The identities of the `data` are read if all else agrees. Then
    `check_health` runs, if it is configured.
    """
    code = describe_code(plan.built, task, others) if ctx.world_size > 1 else {}
    agree(mistake, same={**code, "the configuration": dict(flatten(redact_secrets(resolved)))})
    if data is not None:
        agree_on_data({name: identity() for name, identity in data.items()})
    report = None if health is None else check_health(health, ctx=ctx)
    if report is not None and report.slow and ctx.is_main_process:
        print(report)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """This rank's stages of a model with initial values, their optimizer, its guard, and the average of the weights."""

    pipeline: Pipeline
    optimizer: Optimizer
    average: WeightAverage | None
    guard: StepGuard


def build_training(
    plan: ModelPlan,
    ctx: DistributedContext,
    optimizer: OptimizerProvider,
    *,
    gradients: GradientConfig,
    average: AverageConfig,
    bad_steps: BadStepConfig,
    progress: bool,
    compile_with: str | None = None,
) -> Training:
    """Build this rank's part of a planned model, seed the generators, and build the optimizer. Collective.

    Call `pipeline.shared.copy_values` when the values are final. `compile_with` is a backend of `torch.compile`.
    Raises the errors of `build_pipeline`, and `UserError` if `optimizer` does not return an optimizer.
    """
    if (modes := describe_modes(plan.built.module)) is not None and ctx.is_main_process:
        print(modes)
    pipeline = build_pipeline(plan, ctx, progress=progress)
    pipeline.set_gradients(gradients)
    if compile_with is not None:
        compile_stages(pipeline.stages.values(), compile_with)
    seed_everything(plan.seed, ctx)
    built = check_optimizer(optimizer(pipeline.model))
    return Training(
        pipeline=pipeline,
        optimizer=built,
        average=average_of(pipeline.model, built, average),
        guard=StepGuard(built, config=bad_steps, ctx=ctx),
    )
