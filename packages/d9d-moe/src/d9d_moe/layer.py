"""The mixture-of-experts block that takes the place of a dense feed-forward: route, dispatch, compute, combine."""

from typing import final

from torch import Tensor, nn

from d9d_moe.dispatch import Dispatcher, LocalDispatcher
from d9d_moe.expert_counts import ExpertCounter
from d9d_moe.experts import GroupedSwiGLU
from d9d_moe.router import Router
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
        losses: What the routing costs.
        dispatcher: Brings tokens to experts.
        init_std: Standard deviation of the initial weights of the experts.

    Attributes:
        dispatcher: As above; `parallelize_expert_parallel` puts that of the experts' ranks in its place.
        token_groups: The ranks that have other tokens; set there too.
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

    def forward(self, x: Tensor) -> Tensor | HiddenAndLosses:
        """Map `x` [..., hidden_size] to the same shape and dtype; collective if the dispatcher or the losses are.

        Args:
            x: Hidden states; [B, L, hidden_size] where there are losses.

        Returns:
            The hidden states; with what each token's routing costs, where there are losses.
        """
        tokens_TD = x.flatten(0, -2)
        routing = self.router(tokens_TD)
        counted = routing._replace(probabilities=self.counter(routing.probabilities, routing.indices))
        dispatched = self.dispatcher.dispatch(tokens_TD, counted, num_experts=self.num_experts)
        y = dispatched.combine(self.experts(dispatched.rows, dispatched.counts)).view_as(x)
        if self.shared is not None:
            y = y + self.shared(x)
        if not self.losses.any:
            return y
        losses_T = token_losses(routing, self.losses, self.token_groups, rows=len(x))
        return HiddenAndLosses(y, losses_T.view(x.shape[:-1]))
