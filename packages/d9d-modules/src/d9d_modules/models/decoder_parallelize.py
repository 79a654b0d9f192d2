"""Parallelization of a decoder as straight-line code, to copy and change."""

from collections.abc import Mapping

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
from d9d_modules.float8 import Float8, convert_to_float8
from d9d_modules.models.decoder_tensor_plan import WholeRows


def parallelize_decoder(
    model: nn.Module,
    ctx: DistributedContext,
    *,
    plan: Mapping[str, TensorStyle],
    context_method: ContextMethod = "all_gather",
    checkpointing: CheckpointPolicy = "none",
    checkpoint_every: int = 1,
    compile_blocks: bool = False,
    float8: Float8 | None = None,
    precision: Precision | None = None,
) -> None:
    """Parallelize a decoder of any family, or one pipeline stage of it, in place.

    The steps, in order: float8 conversion, tensor and sequence parallelism over `tp`, context parallelism over `cp`,
    activation checkpointing and compilation of each layer, and HSDP. HSDP shards over `dp_cp_shard` and replicates over
    the other data-parallel axes. An axis of one rank has no effect. Call it on all ranks: `parallelize_hsdp` is a
    collective.

    Args:
        model: Model on the `meta` device, with its layers in `backbone.layers`.
        ctx: Distributed context with the meshes of the job.
        plan: Tensor-parallel plan, such as `qwen3_tensor_plan(params)`.
        context_method: How context-parallel ranks exchange keys and values.
        checkpointing: Activation checkpointing policy of the layers.
        checkpoint_every: Checkpoint the layers whose global index is a multiple of it; the other layers save all
            activations.
        compile_blocks: If True, compile each layer with `torch.compile`.
        float8: Float8 configuration of the linear layers; None disables float8.
        precision: Dtypes of computation and gradient reduction; None for those of the parameters.

    Raises:
        UserError: If the plan does not match the model or the parallel degrees, a pooling head is used with context
            parallelism, or `convert_to_float8` rejects the model or the device.
    """
    dense, cp = ctx.mesh_for("dense"), ctx.mesh_for("batch")["cp"]
    dp = dense["dp_replicate", "dp_cp_shard", "cp_replicate"]
    layers = model.get_submodule("backbone.layers")
    assert isinstance(layers, nn.ModuleDict)
    _check_rows_are_whole(plan, cp.size())

    if float8 is not None:
        convert_to_float8(layers, float8, ctx)
    parallelize_tensor(model, dense["tp"], plan)
    parallelize_context(model, cp, method=context_method)
    checkpoint_layers(layers, policy=checkpointing, every=checkpoint_every)
    if compile_blocks:
        compile_layers(layers)
    for layer in layers.values():
        parallelize_hsdp(layer, dp, shard_axis="dp_cp_shard", precision=precision)
    parallelize_hsdp(model, dp, shard_axis="dp_cp_shard", precision=precision)


def _check_rows_are_whole(plan: Mapping[str, TensorStyle], context_size: int) -> None:
    pooling = [name for name, style in plan.items() if isinstance(style, WholeRows)]
    if pooling and context_size > 1:
        raise UserError(
            f"{pooling[0]} pools whole rows, but {context_size} context-parallel ranks each hold a part of a row; "
            "expected 1 rank. Set the mesh's context-parallel degrees to 1."
        )
