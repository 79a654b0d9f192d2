"""Expert parallelism of a model: sharded experts, and the dispatcher of tokens."""

from collections.abc import Callable, Collection
from typing import Literal, TypeAlias, get_args

import torch.distributed as dist
from torch import nn

from d9d_dist import DistributedContext, Precision, UserError, canonical_name, parallelize_experts
from d9d_moe.all_to_all import AllToAllDispatcher
from d9d_moe.deep_ep import DeepEpDispatcher, check_deep_ep, deep_ep_buffer
from d9d_moe.dispatch import Dispatcher
from d9d_moe.layer import MoELayer
from d9d_moe.router_losses import JointBalance, TokenGroups

DispatchName: TypeAlias = Literal["all_to_all", "deep_ep"]
"""Name of a dispatcher between ranks."""

Dispatch: TypeAlias = DispatchName | Callable[[dist.ProcessGroup], Dispatcher]
"""Name of a dispatcher, or a function that builds one from the expert-parallel process group."""


def parallelize_moe(
    model: nn.Module,
    ctx: DistributedContext,
    *,
    dispatch: Dispatch = "all_to_all",
    shard_replicas: bool = True,
    precision: Precision | None = None,
) -> None:
    """Shard the experts of all `MoELayer` blocks of a model over `ep_shard`, in place.

    Each rank of `ep_shard` holds E / ep consecutive experts, and sends its tokens to the ranks of their experts.
    Routers and shared experts are parallelized with the dense part of the model. Call the functions in this order:

        parallelize_tensor(model, dense["tp"], plan)
        parallelize_context(model, cp)
        parallelize_moe(model, ctx)
        checkpoint_layers(model.layers)
        parallelize_hsdp(model, dense["dp_replicate", "dp_cp_shard", "cp_replicate"], shard_axis="dp_cp_shard")

    At the experts, ranks of a tensor-parallel group must hold different tokens, as with `decoder_tensor_plan`.
    Collective over all ranks of the job. With a degree of 1 no tokens are sent, and experts are sharded or replicated
    over `ep_replicate` only.

    Args:
        model: Model or pipeline stage, on `meta` or with equal values on all ranks. A stage may have no `MoELayer`.
        ctx: Distributed context of the job.
        dispatch: Dispatcher of tokens between ranks.
        shard_replicas: See `d9d_dist.parallelize_experts`.
        precision: Dtypes of the experts' computation and gradient reduction; None for the parameters' dtypes.

    Raises:
        UserError: If the degree does not divide the number of experts, the name of the dispatcher is unknown, or DeepEP
            cannot be used.
    """
    mesh = ctx.mesh_for("expert")["ep_replicate", "ep_shard"]
    groups = TokenGroups(sequence=ctx.group_for("batch", "cp", "tp"), batch=ctx.group_for("batch", "dp", "cp", "tp"))
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}
    degree = mesh["ep_shard"].size()
    _check_dispatch(dispatch, ctx, degree)
    for name, block in blocks.items():
        if block.num_experts % degree:
            raise UserError(
                f"mesh.expert_parallel = {degree} does not divide the {block.num_experts} experts of "
                f"{canonical_name(name)}. Use a degree that divides {block.num_experts}."
            )
    dispatcher = _build_dispatcher(dispatch, mesh["ep_shard"].get_group(), ctx, blocks.values()) if degree > 1 else None
    for block in blocks.values():
        parallelize_experts(
            block.experts,
            mesh,
            shard_replicas=shard_replicas,
            precision=precision,
            reshard_after_forward=ctx.size("regular", "pp") == 1,
        )
        block.token_groups = groups
        if dispatcher is not None:
            block.dispatcher = dispatcher
    for module in model.modules():
        if isinstance(module, JointBalance):
            module.token_groups = groups


def _check_dispatch(dispatch: Dispatch, ctx: DistributedContext, degree: int) -> None:
    if dispatch == "deep_ep":
        if degree > 1:  # with a degree of 1 no tokens are sent
            check_deep_ep(ctx.device, num_ranks=degree)
    elif isinstance(dispatch, str) and dispatch != "all_to_all":
        expected = ", ".join(get_args(DispatchName))
        raise UserError(
            f"dispatch = {dispatch!r}; expected one of {expected}, or a function that builds a dispatcher from the "
            "process group."
        )


def _build_dispatcher(
    dispatch: Dispatch, group: dist.ProcessGroup, ctx: DistributedContext, blocks: Collection[MoELayer]
) -> Dispatcher | None:
    """Build one dispatcher for all blocks of a stage; None if the stage has no blocks. Collective over the group.

    All ranks of the group have the same stage, so either all or none build a dispatcher.
    """
    if not blocks:
        return None
    match dispatch:
        case "all_to_all":
            return AllToAllDispatcher(group)
        case "deep_ep":
            hidden_size = max(block.experts.down_proj.weight.shape[1] for block in blocks)
            return DeepEpDispatcher(deep_ep_buffer(group, hidden_size=hidden_size, device=ctx.device))
        case _:
            return dispatch(group)
