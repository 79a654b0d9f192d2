"""Parallelization of a decoder as straight-line code, to copy and change."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol

from torch import nn

from d9d_dist import (
    ContextMethod,
    DistributedContext,
    Precision,
    TensorStyle,
    UserError,
    parallelize_context,
    parallelize_hsdp,
    parallelize_tensor,
)
from d9d_modules.checkpointing import CheckpointPolicy, checkpoint_layers
from d9d_modules.compiling import compile_layers
from d9d_modules.decoder import HasExperts
from d9d_modules.float8 import Float8, convert_to_float8
from d9d_modules.models.decoder_heads import HeadedDecoder
from d9d_modules.models.decoder_tensor_plan import decoder_tensor_plan


class ParallelizeExperts(Protocol):
    """Function that shards the experts of a model, such as `d9d_moe.parallelize_moe`."""

    def __call__(self, model: nn.Module, ctx: DistributedContext, *, precision: Precision | None = None) -> None:
        """Shard the experts in place."""
        ...


def parallelize_decoder(
    model: nn.Module,
    ctx: DistributedContext,
    *,
    plan: Mapping[str, TensorStyle] | None = None,
    context_method: ContextMethod = "all_gather",
    experts: ParallelizeExperts | None = None,
    checkpointing: CheckpointPolicy = "none",
    checkpoint_every: int = 1,
    compile_blocks: bool = False,
    async_tensor_parallel: bool = False,
    float8: Float8 | None = None,
    precision: Precision | Literal["job"] | None = "job",
) -> None:
    """Parallelize a decoder of any family, or one pipeline stage of it, in place.

    The steps, in order: float8 conversion, tensor and sequence parallelism over `tp`, context parallelism over `cp`,
    expert parallelism, activation checkpointing and compilation of each layer, and HSDP. HSDP shards over `dp_cp_shard`
    and replicates over the other data-parallel axes; each layer, an untied embedding and each untied head are gathered
    separately. An axis of size 1 has no effect. Pipeline stages keep gathered parameters until the last backward of a
    step. Collective over all ranks of the job.

    Args:
        model: Model on the `meta` device, with its layers in `backbone.layers`.
        ctx: Distributed context of the job.
        plan: Tensor-parallel plan; None for `decoder_tensor_plan(model)`.
        context_method: Method by which context-parallel ranks exchange keys and values.
        experts: Expert parallelism of an MoE decoder, on all stages: `d9d_moe.parallelize_moe`, or a `partial` of it
            with other options. None for a dense decoder.
        checkpointing: Policy of `checkpoint_layers`.
        checkpoint_every: Argument `every` of `checkpoint_layers`.
        compile_blocks: If True, compile each layer with `torch.compile`.
        async_tensor_parallel: If True, overlap collectives over `tp` with matrix products; see `compile_layers`.
        float8: Float8 configuration of the linear layers, without experts and routers; None disables float8.
        precision: Dtypes of computation and gradient reduction; "job" for `ctx.precision`, None for the dtypes of the
            parameters. With `experts`, inputs of layers are never cast, so that router losses stay in float32.

    Raises:
        UserError: If the plan does not match the model or the parallel degrees, a layer has experts but `experts` is
            None, or `convert_to_float8` rejects the model or the device. Also if context parallelism is enabled, but a
            head or a token mixer needs whole rows. Also if `async_tensor_parallel` is set without `compile_blocks`, or
            the devices do not support it.
    """
    dense = ctx.mesh_for("dense")
    dp = dense["dp_replicate", "dp_cp_shard", "cp_replicate"]
    layers = model.get_submodule("backbone.layers")
    assert isinstance(layers, nn.ModuleDict)
    if precision == "job":
        precision = ctx.precision
    if async_tensor_parallel and not compile_blocks:
        raise UserError(
            "async_tensor_parallel needs compiled layers; got compile_blocks = False. Set both, or neither."
        )
    if experts is None:
        _check_dense(layers)
    elif precision is not None:
        precision = replace(precision, cast_inputs=False)

    if float8 is not None:
        convert_to_float8(layers, float8, ctx)
    parallelize_tensor(model, dense["tp"], decoder_tensor_plan(model) if plan is None else plan)
    parallelize_context(model, ctx.mesh_for("batch")["cp"], method=context_method)
    if experts is not None:
        experts(model, ctx, precision=precision)
    checkpoint_layers(layers, policy=checkpointing, every=checkpoint_every)
    if compile_blocks:
        compile_layers(layers, async_tensor_parallel=dense["tp"] if async_tensor_parallel else None)
    # In a pipeline, do not reshard after forward: otherwise a stage would gather its parameters for each microbatch.
    shard = partial(
        parallelize_hsdp,
        mesh=dp,
        shard_axis="dp_cp_shard",
        precision=precision,
        reshard_after_forward=ctx.size("regular", "pp") == 1,
    )
    for unit in (*layers.values(), *(model.ends() if isinstance(model, HeadedDecoder) else ())):
        shard(unit)
    shard(model)


def _check_dense(layers: nn.ModuleDict) -> None:
    sparse = [name for name, module in layers.named_modules() if isinstance(module, HasExperts)]
    if sparse:
        raise UserError(
            f"backbone.layers.{sparse[0]} has experts, but experts = None; expected a function that shards them. Pass "
            "experts=d9d_moe.parallelize_moe."
        )
