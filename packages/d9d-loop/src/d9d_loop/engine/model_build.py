"""Build of this rank's pipeline stages: parallelized, on the device, with initial values."""

from collections.abc import Mapping
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from d9d_dist import (
    DistributedContext,
    StageInfo,
    UserError,
    canonical_name,
    materialize,
    place_values,
    synchronize_batch_norm,
)
from d9d_dist.data_parallel.embedding_rows import synchronize_embeddings
from d9d_dist.values.model_values import move_values
from d9d_loop.engine.pipeline import Pipeline
from d9d_loop.model.built_model import BuiltModel, build_model, build_with_values, report_different_values
from d9d_loop.model.model_check import (
    check_experts_are_shared_out,
    check_parallelized,
    check_unchanged,
    describe_precision,
    describe_tensors,
    sum_gradients,
)
from d9d_loop.model.model_options import autocast_stage
from d9d_loop.model.model_plan import ModelPlan
from d9d_loop.model.model_provider import ModelProvider
from d9d_pipeline.channel import Messages
from d9d_state import load_model_state


def build_pipeline(
    plan: ModelPlan, ctx: DistributedContext, *, progress: bool, messages: Messages | None = None
) -> Pipeline:
    """Build the stages that a plan assigns to this rank, and load the initial weights, if any. Collective.

    If the pipeline has one stage, the plan's model is parallelized in place. With `late_init`, an initial value is a
    function of the seed, the parameter name and the element index. Otherwise the random number generators are seeded
    while the model is built. With `progress`, show the progress of reading weights. For `messages`, see `Pipeline`.

    Raises:
        UserError: If `parallelize` changed names, shapes or dtypes, or sharded a weight that must stay whole. Also if a
            trainable parameter is not on all ranks of its stage, or no experts were sharded although the
            expert-parallel degree is above 1.
    """
    told = describe_precision(plan.built.module, computes_in_bfloat16=ctx.precision is not None)
    if told is not None and ctx.is_main_process:
        print(told)
    provider, seed, whole = plan.provider, plan.seed, plan.built
    stages = parallelize_stages(plan, ctx)
    if provider.late_init:
        for stage in stages.values():
            materialize(stage, device=ctx.device, seed=seed)
    elif ctx.world_size > 1 or len(stages) > 1:
        if ctx.world_size > 1:
            report_different_values(whole, ctx)
        build = partial(_values_of, provider, whole, seed=seed) if ctx.is_main_process else None
        layout = {name: tensor for name, tensor in whole.tensors.items() if name not in whole.without_values}
        place_values(list(stages.values()), layout, build, device=ctx.device)
    pipeline = Pipeline(stages, ctx=ctx, schedule=plan.schedule, shared_names=plan.shared_names, messages=messages)
    if plan.weights is not None:
        # In a pipeline, the folder has weights of other stages, too. The plan has checked the whole model.
        unused = "ignore" if plan.is_pipelined else "error"
        load_model_state(pipeline.model, plan.weights, plan.load_mapper, unused=unused, progress=progress)
    return pipeline


def parallelize_stages(plan: ModelPlan, ctx: DistributedContext) -> dict[int, nn.Module]:
    """Build and parallelize the stages that a plan assigns to this rank, without their values. Collective.

    Returns the stages by global stage index. They are on `meta`, except in a job of one rank whose provider does not
    set `late_init`. Raises the same errors as `build_pipeline`, except for errors about values.
    """
    provider, seed, whole, num_stages = plan.provider, plan.seed, plan.built, plan.program.num_stages
    stages: dict[int, nn.Module] = {}
    # Creating a process group is collective, so ranks whose stages have no batch norm create it too.
    batch_group = ctx.group_for("batch", "dp", "cp") if ctx.world_size > 1 else None
    for index in plan.program.stages_of(ctx.coordinate("regular", "pp")):
        stage = whole.module
        if num_stages > 1:
            stage = build_model(provider, StageInfo(index, num_stages), seed=seed, keep_values=False).module
            plan.options.apply(stage)
        if not provider.late_init and ctx.world_size == 1:
            move_values(stage, ctx.device)
        if batch_group is not None and batch_group.size() > 1:
            _synchronize(stage, batch_group, ctx)
        _make_embeddings_dense(stage, ctx)
        built = describe_tensors(stage)
        attributes = {canonical_name(name): vars(each) for name, each in stage.named_parameters() if vars(each)}
        provider.parallelize(stage, ctx)
        for name, each in stage.named_parameters() if attributes else ():
            for key, value in attributes.get(canonical_name(name), {}).items():
                vars(each).setdefault(key, value)
        check_unchanged(stage, built)
        check_parallelized(stage, ctx)
        sum_gradients(stage)
        if ctx.is_autocast:
            autocast_stage(stage, ctx.device, is_last=index == num_stages - 1)
        stages[index] = stage
    check_experts_are_shared_out(stages.values(), ctx)
    return stages


def _values_of(provider: ModelProvider, whole: BuiltModel, *, seed: int) -> Mapping[str, Tensor]:
    """Build the model again on rank 0 and return its values by name; check that the structure is unchanged."""
    module, values = build_with_values(provider, StageInfo(), seed=seed)
    expected, found = (
        {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors}
        for tensors in (whole.tensors.items(), [*module.named_parameters(), *module.named_buffers()])
    )
    if expected != found:
        names = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise UserError(
            f"the function built a different model in a second call: {', '.join(names)} differ in name, shape or "
            "dtype; expected the same structure in each call. It must depend only on its arguments and the seed."
        )
    return values


def _make_embeddings_dense(stage: nn.Module, ctx: DistributedContext) -> None:
    """Give embeddings with `sparse=True` dense gradients, which norms, reductions and checkpoints need."""
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    found = {name: each for name, each in stage.named_modules() if isinstance(each, embeddings) and each.sparse}
    for each in found.values():
        each.sparse = False
    if found and ctx.is_main_process:
        names = ", ".join(name or "the model" for name in found)
        print(f"d9d: sparse=True of {names} is not supported; the gradients are dense, with equal values.")


def _synchronize(stage: nn.Module, group: dist.ProcessGroup, ctx: DistributedContext) -> None:
    """Synchronize batch norms, and embeddings with `max_norm` or `scale_grad_by_freq`, over the ranks of the batch."""
    synchronize_embeddings(stage, group)
    names = synchronize_batch_norm(stage, group)
    if names and ctx.is_main_process:
        print(
            f"d9d: {len(names)} batch norms ({names[0]}, ...) compute statistics over {group.size()} data-parallel "
            "ranks."
        )
