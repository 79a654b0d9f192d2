"""The mixture-of-experts block that takes the place of a dense feed-forward: route, dispatch, compute, combine."""

from typing import final

import torch
from torch import Tensor, nn

from d9d_dist.errors import UserError
from d9d_moe.dispatch import Dispatcher, LocalDispatcher
from d9d_moe.expert_counts import ExpertCounter
from d9d_moe.experts import GroupedSwiGLU
from d9d_moe.joint_balance import token_records
from d9d_moe.router import Router, Routing
from d9d_moe.router_losses import HiddenAndLosses, RouterLosses, TokenGroups, token_losses

LOCAL = LocalDispatcher()
"""The dispatcher for experts that all live on this rank."""

NO_LOSSES = RouterLosses()
"""Routers that cost nothing."""


@final
class MoeFeedForward(nn.Module):
    """A drop-in for a feed-forward block: each token passes through the experts that its router chooses.

        moe = MoeFeedForward(64, 32, router=TopKRouter(64, num_experts=8, top_k=2))

    Args:
        hidden_size: Size of the last dim of input and output.
        intermediate_size: Size of the gated space of each expert.
        router: Chooses experts: a module that is a `Router`.
        shared: What all tokens pass through beside them; None for nothing.
        losses: What the routing costs, while training: in evaluation mode each token costs 0.
        dispatcher: Brings tokens to experts.
        init_std: Standard deviation of the initial weights of the experts.

    Attributes:
        dispatcher: As above; `parallelize_expert_parallel` puts that of the experts' ranks in its place.
        token_groups: The ranks that have other tokens; set there too.
        global_load: How often each expert was chosen in the step before [E], float32, 1 where all were equally; a
            buffer, which `update_global_load` writes, for losses that follow it; else None.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        router: Router,
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
        self.experts = GroupedSwiGLU(router.num_experts, hidden_size, intermediate_size, init_std=init_std)
        self.shared = shared
        self.global_load: Tensor | None
        has_load = losses.follow_global_batch
        self.register_buffer("global_load", torch.empty(router.num_experts, dtype=torch.float32) if has_load else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Take the load of the step before the first one as even."""
        if self.global_load is not None:
            nn.init.ones_(self.global_load)

    def forward(self, x: Tensor, *, mask_BL: Tensor | None = None) -> Tensor | HiddenAndLosses:
        """Map `x` [..., hidden_size] to the same shape and dtype; collective if the dispatcher or the losses are.

        Args:
            x: Hidden states; [B, L, hidden_size] where there are losses.
            mask_BL: Where there is a token [...], bool or 0 and 1; None for everywhere. Padding is routed as well, but
                neither counted nor does it cost anything.

        Returns:
            The hidden states; with what each token's routing costs, where there are losses.

        Raises:
            UserError: If the mask has not a number for each token.
        """
        if mask_BL is not None and mask_BL.shape != x.shape[:-1]:
            raise UserError(
                f"the mask has shape {tuple(mask_BL.shape)}; expected {tuple(x.shape[:-1])}, one number for each token "
                'of this rank. Tensor parallel, a plan cuts it: see "backbone.token_mask" in moe_tensor_plan.'
            )
        mask_T = None if mask_BL is None else mask_BL.flatten().bool()
        tokens_TD = x.flatten(0, -2)
        routing = self.router(tokens_TD)
        dispatched = self.dispatcher.dispatch(tokens_TD, routing, num_experts=self.num_experts)
        combining = dispatched.combine(self.experts(dispatched.rows, dispatched.counts))
        shared = None if self.shared is None else self.shared(x)  # while tokens are on their way back
        y = combining.wait().view_as(x)
        y = self.counter(y if shared is None else y + shared, routing.indices, mask_T)
        return HiddenAndLosses(y, self._losses(routing, x, mask_T)) if self.losses.any else y

    def _losses(self, routing: Routing, x: Tensor, mask_T: Tensor | None) -> Tensor:
        """Compute what each token costs [...], or record what a loss over all layers needs [..., R]."""
        if not self.training:
            zeros = x.new_zeros(x.shape[:-1], dtype=routing.probabilities.dtype)
            return zeros.unsqueeze(-1) if self.losses.are_joint else zeros
        if self.losses.are_joint:
            return token_records(routing, self.losses, mask_T=mask_T).unflatten(0, x.shape[:-1])
        losses_T = token_losses(
            routing, self.losses, self.token_groups, rows=len(x), global_load_E=self.global_load, mask_T=mask_T
        )
        return losses_T.view(x.shape[:-1])
