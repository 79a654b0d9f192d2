"""Builds this rank's stages of a model: on meta, parallelised, materialised with initial values."""

import torch
from torch import nn

from d9d_dist import DistributedContext, StageInfo, materialize
from d9d_loop.model_check import check_experts_are_shared_out, check_parallelized, check_unchanged, describe_tensors
from d9d_loop.model_plan import ModelPlan
from d9d_loop.model_provider import ModelProvider
from d9d_loop.pipeline import Pipeline


def build_pipeline(provider: ModelProvider, plan: ModelPlan, ctx: DistributedContext, *, seed: int) -> Pipeline:
    """Build the stages that a plan gives to this rank.

    Args:
        provider: Builds and parallelises the model.
        plan: What the job is.
        ctx: The job's context.
        seed: Initial values are a function of it, of a parameter's name and of the place in it; not of the layout.

    Raises:
        UserError: If `parallelize` changed what it must not, or left a parameter to fewer ranks than share it.
    """
    stages: dict[int, nn.Module] = {}
    for index in plan.program.stages_of(ctx.coordinate("regular", "pp")):
        with torch.device("meta"):
            stage = provider.build(StageInfo(index, plan.program.num_stages))
        built = describe_tensors(stage)
        provider.parallelize(stage, ctx)
        check_unchanged(stage, built)
        check_parallelized(stage, ctx)
        materialize(stage, device=ctx.device, seed=seed)
        stages[index] = stage.train()
    check_experts_are_shared_out(stages.values(), ctx)
    return Pipeline(stages, ctx=ctx, schedule=plan.schedule, shared_names=plan.shared_names)
