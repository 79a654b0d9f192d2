"""Expert parallelism of a model as one function: experts to their ranks, and tokens to the experts."""

from collections.abc import Callable, Collection
from typing import Literal, TypeAlias, get_args

import torch.distributed as dist
from torch import nn

from d9d_dist import DistributedContext, Precision, UserError, canonical_name, parallelize_experts
from d9d_moe.all_to_all import AllToAllDispatcher
from d9d_moe.deep_ep import DeepEpDispatcher, check_deep_ep, deep_ep_buffer
from d9d_moe.dispatch import Dispatcher
from d9d_moe.joint_balance import JointBalance
from d9d_moe.layer import MoeFeedForward
from d9d_moe.router_losses import TokenGroups

DispatchName: TypeAlias = Literal["all_to_all", "deep_ep"]
"""How tokens travel to experts of other ranks."""

Dispatch: TypeAlias = DispatchName | Callable[[dist.ProcessGroup], Dispatcher]
"""A name, or a function that makes a dispatcher of the ranks that share the experts out."""


def parallelize_expert_parallel(
    model: nn.Module,
    ctx: DistributedContext,
    *,
    dispatch: Dispatch = "all_to_all",
    shard_replicas: bool = True,
    precision: Precision | None = None,
) -> None:
    """Share the experts of all `MoeFeedForward` blocks of a model out, in place.

    Each rank of `ep_shard` gets E / ep consecutive experts, and its own tokens travel to the experts that they chose.
    Routers and shared experts stay with the dense part, so call this between `parallelize_tensor` and what follows:

        parallelize_tensor(model, dense["tp"], plan)
        parallelize_context(model, cp)
        parallelize_expert_parallel(model, ctx)
        checkpoint_layers(model.layers)
        parallelize_hsdp(model, dense["dp_replicate", "dp_cp_shard", "cp_replicate"], shard_axis="dp_cp_shard")

    Ranks of one tensor-parallel group hold different tokens where experts come, with a plan such as
    `moe_tensor_plan`. Collective over all ranks of the job: it makes process groups. With a degree of 1 tokens
    stay, and experts are spread over `ep_replicate` alone.

    Args:
        model: A model or one stage of it, on `meta` or with equal values on all ranks; there may be no such block.
        ctx: The job's meshes.
        dispatch: How tokens travel.
        shard_replicas: See `d9d_dist.parallelize_experts`.
        precision: dtypes of the experts' computation and reduction.

    Raises:
        UserError: If the degree does not divide the experts, or the way to travel is not there.
    """
    mesh = ctx.mesh_for("expert")["ep_replicate", "ep_shard"]
    groups = TokenGroups(sequence=ctx.group_for("batch", "cp", "tp"), batch=ctx.group_for("batch", "dp", "cp", "tp"))
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, MoeFeedForward)}
    degree = mesh["ep_shard"].size()
    _check_dispatch(dispatch, ctx, degree)
    for name, block in blocks.items():
        if block.num_experts % degree:
            raise UserError(
                f"mesh.expert_parallel = {degree} does not divide the {block.num_experts} experts of "
                f"{canonical_name(name)}. Use a degree that divides {block.num_experts}."
            )
    dispatcher = _dispatcher(dispatch, mesh["ep_shard"].get_group(), ctx, blocks.values()) if degree > 1 else None
    for block in blocks.values():
        parallelize_experts(block.experts, mesh, shard_replicas=shard_replicas, precision=precision)
        block.token_groups = groups
        if dispatcher is not None:
            block.dispatcher = dispatcher
    for module in model.modules():
        if isinstance(module, JointBalance):
            module.token_groups = groups


def _check_dispatch(dispatch: Dispatch, ctx: DistributedContext, degree: int) -> None:
    if dispatch == "deep_ep":
        if degree > 1:  # else nothing travels
            check_deep_ep(ctx.device, num_ranks=degree)
    elif isinstance(dispatch, str) and dispatch != "all_to_all":
        expected = ", ".join(get_args(DispatchName))
        raise UserError(f"dispatch = {dispatch!r}; expected one of {expected}, or a function.")


def _dispatcher(
    dispatch: Dispatch, group: dist.ProcessGroup, ctx: DistributedContext, blocks: Collection[MoeFeedForward]
) -> Dispatcher | None:
    """One for all layers; None where a stage has none: collective over the group, whose ranks have the same stage."""
    if not blocks:
        return None
    if not isinstance(dispatch, str):
        return dispatch(group)
    if dispatch == "all_to_all":
        return AllToAllDispatcher(group)
    widest = max(block.experts.down_proj.weight.shape[1] for block in blocks)
    return DeepEpDispatcher(deep_ep_buffer(group, hidden_size=widest, device=ctx.device))
