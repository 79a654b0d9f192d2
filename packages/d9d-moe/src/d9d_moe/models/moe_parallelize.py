"""The order of parallelisms for a sparse decoder, as straight-line code: copy it and change it."""

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
from d9d_modules import CheckpointPolicy, Float8, WholeRows, checkpoint_layers, compile_layers, multiply_in_float8
from d9d_modules.models.decoder_tensor_plan import SEQUENCE
from d9d_moe.expert_parallel import Dispatch, parallelize_expert_parallel

ATTENTION = "backbone.layers.*.attention"
"""What the attention of the layers is called in a sparse decoder."""


@final
@dataclass(frozen=True)
class RowParts(TensorStyle):
    """A module that gets a rank's part of rows that arrive whole: the first positional argument [B, L, ...] is cut."""

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
    """Parallelise a sparse decoder of any family, or one pipeline stage of it, in place.

    Tensor and sequence parallel over `tp`, context parallel over `cp`, experts over `ep_shard`, then block by block
    activation checkpointing, compilation, and data parallel: sharded over `dp_cp_shard`, replicated over the rest. An
    axis of one rank changes nothing. Collective over all ranks of the job, as `parallelize_hsdp` is.

    Args:
        model: The model, on `meta`; its blocks are `backbone.layers`.
        ctx: The job's meshes.
        plan: How the dense part is tensor parallel, e.g. `qwen3_moe_tensor_plan(params)`.
        context_method: How context-parallel ranks see each other's keys and values.
        dispatch: How tokens travel to experts.
        shard_replicas: Whether ranks with the same experts share their parameters out.
        checkpointing: What each block keeps for its backward pass.
        checkpoint_every: Which blocks that is for: those whose index in the whole model it divides.
        compile_blocks: Whether each block is compiled.
        float8: How linear layers of blocks, which experts and routers are not, multiply in float8; None for not at all.
        precision: dtypes of computation and reduction; None for those of the parameters. Inputs of blocks are never
            cast: what routing costs stays in float32.

    Raises:
        UserError: If the plan or the experts do not fit the model or the degrees.
    """
    dense = ctx.mesh_for("dense")
    dp = dense["dp_replicate", "dp_cp_shard", "cp_replicate"]
    precision = None if precision is None else replace(precision, cast_inputs=False)
    layers = model.get_submodule("backbone.layers")
    assert isinstance(layers, nn.ModuleDict)
    if float8 is not None:
        multiply_in_float8(layers, float8, ctx)
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
    """The plan for `parallelize_tensor` of a sparse decoder: experts stay whole, and see a part of the tokens.

    Heads and vocabulary are split, and the sequence between the blocks (L / tp tokens on each rank). Routers, shared
    experts and dense feed-forward blocks keep whole parameters and compute on their part of the sequence.

    Args:
        attention: How the attention is split, with the names of `ATTENTION`, sequence parallel.
        pooled_head: Whether the model has a head that pools, in place of a language-model head.
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
