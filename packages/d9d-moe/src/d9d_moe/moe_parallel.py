"""Expert parallelism of a model: sharded experts, and the dispatcher of tokens."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch.distributed as dist
from torch import nn

from d9d_dist import DistributedContext, Precision, UserError, canonical_name, parallelize_experts
from d9d_moe.all_to_all import AllToAllDispatcher
from d9d_moe.deep_ep import DeepEpDispatcher, check_deep_ep, deep_ep_buffer
from d9d_moe.dispatch import Dispatcher
from d9d_moe.fused_experts import DispatchedForward, find_fused_experts
from d9d_moe.layer import LOCAL, MoELayer
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
    """Shard the experts of a model over `ep_shard`, in place.

    Experts are those of `MoELayer` blocks, and fused ones of `transformers` (`find_fused_experts`). Each rank of
    `ep_shard` holds E / ep consecutive experts, and sends its tokens to the ranks of their experts.
    Routers and shared experts are parallelized with the dense part of the model. Call the functions in this order:

        parallelize_tensor(model, dense["tp"], plan)
        parallelize_context(model, cp)
        parallelize_moe(model, ctx)
        checkpoint_layers(model.layers)
        parallelize_hsdp(model, dense["dp_replicate", "dp_cp_shard", "cp_replicate"], shard_axis="dp_cp_shard")

    At a `MoELayer`, ranks of a tensor-parallel group must hold different tokens, as with `decoder_tensor_plan`; at
    fused experts they must hold equal tokens, as in `transformers`, and the plan must not name the experts.
    Collective over all ranks of the job. With a degree of 1 no tokens are sent, and experts are sharded or replicated
    over `ep_replicate` only.

    Args:
        model: Model or pipeline stage, on `meta` or with equal values on all ranks. A stage may have no experts.
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
    fused = find_fused_experts(model)
    experts: list[Any] = [*(block.experts for block in blocks.values()), *fused.values()]
    degree = mesh["ep_shard"].size()
    _check_dispatch(dispatch, ctx, degree)
    for name, block in (blocks | fused).items():
        if block.num_experts % degree:
            raise UserError(
                f"mesh.expert_parallel = {degree} does not divide the {block.num_experts} experts of "
                f"{canonical_name(name)}. Use a degree that divides {block.num_experts}."
            )
    dispatcher: Dispatcher = LOCAL
    if degree > 1 and experts:  # all ranks of the group have the same stage
        dispatcher = _build_dispatcher(dispatch, mesh["ep_shard"].get_group(), ctx, experts)
    for each in experts:
        parallelize_experts(
            each,
            mesh,
            shard_replicas=shard_replicas,
            precision=precision,
            reshard_after_forward=ctx.size("regular", "pp") == 1,
        )
    for block in blocks.values():
        block.token_groups = groups
        if degree > 1:
            block.dispatcher = dispatcher
    for each in fused.values():
        each.forward = DispatchedForward(each, dispatcher, ctx.mesh_for("dense")["tp"])
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
    dispatch: Dispatch, group: dist.ProcessGroup, ctx: DistributedContext, experts: Sequence[Any]
) -> Dispatcher:
    """Build one dispatcher for all experts of a stage. Collective over the group."""
    match dispatch:
        case "all_to_all":
            return AllToAllDispatcher(group)
        case "deep_ep":
            hidden_size = max(_hidden_size(each) for each in experts)
            return DeepEpDispatcher(deep_ep_buffer(group, hidden_size=hidden_size, device=ctx.device))
        case _:
            return dispatch(group)


def _hidden_size(experts: Any) -> int:
    down = experts.down_proj
    return down.weight.shape[1] if isinstance(down, nn.Module) else down.shape[2 if experts.is_transposed else 1]
