"""The order of parallelisms for a decoder, as straight-line code: copy it and change it."""

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
from d9d_modules.float8 import Float8, multiply_in_float8
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
    """Parallelise a decoder of any family, or one pipeline stage of it, in place.

    Float8, tensor and sequence parallel over `tp`, context parallel over `cp`, then block by block activation
    checkpointing, compilation, and data parallel: sharded over `dp_cp_shard`, replicated over the rest. An axis of one
    rank changes nothing. Collective over all ranks of the job, as `parallelize_hsdp` is.

    Args:
        model: The model, on `meta`; its blocks are `backbone.layers`.
        ctx: The job's meshes.
        plan: How the model is tensor parallel, e.g. `qwen3_tensor_plan(params)`.
        context_method: How context-parallel ranks see each other's keys and values.
        checkpointing: What each block keeps for its backward pass.
        checkpoint_every: Which blocks that is for: those whose index in the whole model it divides; the others keep
            everything.
        compile_blocks: Whether each block is compiled.
        float8: How linear layers of blocks multiply in float8; None for not at all.
        precision: dtypes of computation and reduction; None for those of the parameters.

    Raises:
        UserError: If the plan does not fit the model or the degrees, a head pools rows that context-parallel ranks
            share out, or `multiply_in_float8` refuses float8.
    """
    dense, cp = ctx.mesh_for("dense"), ctx.mesh_for("batch")["cp"]
    dp = dense["dp_replicate", "dp_cp_shard", "cp_replicate"]
    layers = model.get_submodule("backbone.layers")
    assert isinstance(layers, nn.ModuleDict)
    _check_rows_are_whole(plan, cp.size())

    if float8 is not None:
        multiply_in_float8(layers, float8, ctx)
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
            f"{pooling[0]} pools whole rows, and {context_size} context-parallel ranks share each row out; expected "
            "one. Set the mesh's context-parallel degrees to 1."
        )
