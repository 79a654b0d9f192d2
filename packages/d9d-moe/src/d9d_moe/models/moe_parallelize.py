"""Parallelization of a sparse decoder, as straight-line code to copy and adapt."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist import (
    ContextMethod,
    DistributedContext,
    Precision,
    SequenceParallel,
    TensorStyle,
    VocabParallelEmbedding,
    VocabParallelHead,
    parallelize_context,
    parallelize_hsdp,
    parallelize_tensor,
)
from d9d_modules import CheckpointPolicy, Float8, WholeRows, checkpoint_layers, compile_layers, convert_to_float8
from d9d_modules.models.decoder_tensor_plan import SEQUENCE
from d9d_moe.expert_parallel import Dispatch, parallelize_expert_parallel

ATTENTION = "backbone.layers.*.attention"
"""Name pattern of the attention modules of a sparse decoder."""


@final
@dataclass(frozen=True)
class RowParts(TensorStyle):
    """Tensor-parallel style that passes this rank's part of the sequence to a module.

    The first positional argument [B, L, ...], equal on all ranks, is split along dim 1 into [B, L / tp, ...].
    """

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `TensorStyle.forward`."""
        return inner(args[0].chunk(mesh.size(), dim=1)[mesh.get_local_rank()], *args[1:], **kwargs)


def parallelize_moe_decoder(
    model: nn.Module,
    ctx: DistributedContext,
    *,
    plan: Mapping[str, TensorStyle],
    context_method: ContextMethod = "all_gather",
    dispatch: Dispatch = "all_to_all",
    shard_replicas: bool = True,
    checkpointing: CheckpointPolicy = "none",
    checkpoint_every: int = 1,
    compile_blocks: bool = False,
    float8: Float8 | None = None,
    precision: Precision | None = None,
) -> None:
    """Parallelize a sparse decoder of any family, or one pipeline stage of it, in place.

    Applies in this order: tensor and sequence parallelism over `tp`, context parallelism over `cp`, expert parallelism
    over `ep_shard`. Then per block: activation checkpointing, compilation, and data parallelism, sharded over
    `dp_cp_shard` and replicated over `dp_replicate` and `cp_replicate`. An axis of size 1 has no effect. Collective
    over all ranks of the job.

    Args:
        model: Model on `meta`, with its blocks in `backbone.layers`.
        ctx: Distributed context with the meshes of the job.
        plan: Tensor-parallel plan of the dense part, e.g. `qwen3_moe_tensor_plan(params)`.
        context_method: Method by which context-parallel ranks exchange keys and values.
        dispatch: Dispatcher of tokens between ranks.
        shard_replicas: Shard the expert parameters over `ep_replicate`; False replicates them.
        checkpointing: Activation checkpointing policy of the blocks.
        checkpoint_every: Apply the policy to every n-th block: those whose index in the whole model n divides.
        compile_blocks: Compile each block with `torch.compile`.
        float8: Float8 settings of the linear layers of the blocks, experts and routers excluded; None disables float8.
        precision: dtypes of computation and gradient reduction; None for the dtypes of the parameters. Inputs of blocks
            are never cast, so router losses stay in float32.

    Raises:
        UserError: If the plan does not match the model, or the expert-parallel degree does not divide the experts.
    """
    dense = ctx.mesh_for("dense")
    dp = dense["dp_replicate", "dp_cp_shard", "cp_replicate"]
    precision = None if precision is None else replace(precision, cast_inputs=False)
    layers = model.get_submodule("backbone.layers")
    assert isinstance(layers, nn.ModuleDict)
    if float8 is not None:
        convert_to_float8(layers, float8, ctx)
    parallelize_tensor(model, dense["tp"], plan)
    parallelize_context(model, ctx.mesh_for("batch")["cp"], method=context_method)
    parallelize_expert_parallel(model, ctx, dispatch=dispatch, shard_replicas=shard_replicas, precision=precision)
    checkpoint_layers(layers, policy=checkpointing, every=checkpoint_every)
    if compile_blocks:
        compile_layers(layers)
    for layer in layers.values():
        parallelize_hsdp(layer, dp, shard_axis="dp_cp_shard", precision=precision)
    parallelize_hsdp(model, dp, shard_axis="dp_cp_shard", precision=precision)


def moe_tensor_plan(attention: Mapping[str, TensorStyle], *, pooled_head: bool = False) -> dict[str, TensorStyle]:
    """Return the plan of a sparse decoder for `parallelize_tensor`.

    Attention heads and the vocabulary are split, and between the modules the sequence is (L / tp tokens per rank).
    Routers, experts, shared experts and dense feed-forward blocks are not split; they process the rank's part of the
    sequence.

    Args:
        attention: Plan of the attention, with module names that start with `ATTENTION` and sequence parallelism.
        pooled_head: True if the model has a pooled head instead of a language-model head.
    """
    heads: dict[str, TensorStyle] = (
        {"head": WholeRows()} if pooled_head else {"lm_head": VocabParallelHead(input=SEQUENCE)}
    )
    return {
        "backbone.embedding": VocabParallelEmbedding(output=SEQUENCE),
        "backbone.token_mask": RowParts(),
        "backbone.layers": SequenceParallel(),
        **attention,
        "backbone.norm": SequenceParallel(),
        **heads,
        "router_losses": WholeRows(),
    }
