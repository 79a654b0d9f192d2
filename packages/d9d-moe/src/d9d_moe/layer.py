"""Mixture-of-experts block, a replacement for a dense feed-forward block: route, dispatch, compute, combine."""

from typing import final

import torch
from torch import Tensor, nn

from d9d_dist.errors import UserError
from d9d_dist.token_ids import check_token_ids
from d9d_modules.decoder import HiddenAndLosses
from d9d_moe.dispatch import Dispatcher, LocalDispatcher
from d9d_moe.expert_counts import ExpertCounter
from d9d_moe.experts import Experts, GroupedSwiGLU
from d9d_moe.router import ReplayRouter, Router, Routing, WeightedRouter
from d9d_moe.router_losses import RouterLosses, TokenGroups, token_losses, token_records

LOCAL = LocalDispatcher()
"""Dispatcher for experts that are all on this rank."""

NO_LOSSES = RouterLosses()
"""No router losses."""


@final
class MoELayer(nn.Module):
    """Drop-in replacement for a feed-forward block: each token passes through the experts that the router chooses.

        moe = MoELayer(64, 32, router=TopKRouter(64, num_experts=8, top_k=2))

    Args:
        experts: Routed experts; None for a `GroupedSwiGLU`.
        shared: Shared experts, a module that maps all tokens [..., hidden_size] to the same shape; None to omit them.
        losses: Router losses. In evaluation mode they are 0.
        dispatcher: Dispatcher of tokens; `parallelize_moe` replaces it.

    Attributes:
        token_groups: Process groups over which tokens are counted; `parallelize_moe` sets them.
        global_load: Load of each expert in the previous step [E], float32, relative to an even load (1 is even). A
            buffer that `update_global_load` writes; None unless the scope of the losses is "global_batch".
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        router: Router,
        experts: Experts | None = None,
        shared: nn.Module | None = None,
        losses: RouterLosses = NO_LOSSES,
        dispatcher: Dispatcher = LOCAL,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.num_experts = router.num_experts
        self.dispatcher = dispatcher
        self.losses = losses
        self.token_groups = TokenGroups()
        self.router = router
        self.counter = ExpertCounter(router.num_experts)
        self.experts: Experts = experts or GroupedSwiGLU(
            router.num_experts, hidden_size, intermediate_size, init_std=init_std
        )
        self.shared = shared
        self.global_load: Tensor | None
        has_load = losses.follow_global_batch
        self.register_buffer("global_load", torch.empty(router.num_experts, dtype=torch.float32) if has_load else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the load of the previous step to an even load."""
        if self.global_load is not None:
            nn.init.ones_(self.global_load)

    def forward(
        self, x: Tensor, *, mask_BL: Tensor | None = None, expert_indices: Tensor | None = None
    ) -> Tensor | HiddenAndLosses:
        """Apply the experts to hidden states. Issues collectives only if the dispatcher or the router losses do.

        Args:
            x: Hidden states [..., hidden_size]; [B, L, hidden_size] if there are router losses.
            mask_BL: Token mask [...] (the leading shape of `x`), bool or 0 and 1; None if there is no padding. Padding
                is routed, but excluded from the tokens per expert, and has router loss 0.
            expert_indices: Recorded experts of each token [..., A] to use instead of the router's choice; see
                `ReplayRouter`. None for the router's choice.

        Returns:
            Hidden states of the shape and dtype of `x`; with router losses a `HiddenAndLosses`.

        Raises:
            UserError: If the shape of the mask is not the leading shape of `x`, or `expert_indices` are given and the
                router cannot replay recorded experts.
        """
        if mask_BL is not None and mask_BL.shape != x.shape[:-1]:
            raise UserError(
                f"the mask has shape {tuple(mask_BL.shape)}; expected {tuple(x.shape[:-1])}, one number for each token "
                "of this rank. With tensor parallelism the plan must split the mask along the sequence: see "
                '"backbone.token_mask" in d9d_modules.decoder_tensor_plan.'
            )
        mask_T = None if mask_BL is None else mask_BL.flatten().bool()
        tokens_TD = x.flatten(0, -2)
        routing = self._route(tokens_TD, expert_indices)
        chosen = routing if isinstance(self.router, WeightedRouter) else _without_dropped(routing, self.num_experts)
        dispatched = self.dispatcher.dispatch(tokens_TD, chosen, num_experts=self.num_experts)
        combine_handle = dispatched.combine(self.experts(dispatched.rows, dispatched.counts))
        shared = None if self.shared is None else self.shared(x)  # overlaps with the combine
        y = combine_handle.wait().view_as(x)
        y = self.counter(y if shared is None else y + shared, routing.indices, mask_T)
        return HiddenAndLosses(y, self._losses(routing, x, mask_T)) if self.losses.any else y

    def _route(self, tokens_TD: Tensor, expert_indices: Tensor | None) -> Routing:
        if expert_indices is None:
            return self.router(tokens_TD)
        if not isinstance(self.router, ReplayRouter):
            raise UserError(
                f"got recorded experts for a {type(self.router).__name__}, which cannot replay them; expected a router "
                "that does. Implement ReplayRouter, or omit expert_indices."
            )
        return self.router(tokens_TD, expert_indices.flatten(0, -2))

    def _losses(self, routing: Routing, x: Tensor, mask_T: Tensor | None) -> Tensor:
        """Compute the router losses of each token [...], or the records [..., R] for a loss over all layers."""
        if not self.training:
            zeros = x.new_zeros(x.shape[:-1], dtype=routing.probabilities.dtype)
            return zeros.unsqueeze(-1) if self.losses.are_joint else zeros
        if self.losses.are_joint:
            return token_records(routing, self.losses, mask_T=mask_T).unflatten(0, x.shape[:-1])
        losses_T = token_losses(
            routing, self.losses, self.token_groups, rows=len(x), global_load_E=self.global_load, mask_T=mask_T
        )
        return losses_T.view(x.shape[:-1])


def _without_dropped(routing: Routing, num_experts: int) -> Routing:
    """Return the routing of a custom router, in which dropped choices go to expert 0 with weight 0.

    Raises `UserError` if an index is `num_experts` or more; asynchronously on an accelerator.
    """
    indices_TA, is_dropped_TA = routing.indices.clamp(min=0), routing.indices < 0
    check_token_ids(indices_TA, num_experts, what="the router's expert indices, or a negative one to drop a choice,")
    return routing._replace(indices=indices_TA, probabilities=routing.probabilities.masked_fill(is_dropped_TA, 0.0))
