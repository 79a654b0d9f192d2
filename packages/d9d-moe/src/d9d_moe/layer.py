"""The mixture-of-experts block that takes the place of a dense feed-forward: route, dispatch, compute, combine."""

from typing import final

from torch import Tensor, nn

from d9d_moe.dispatch import Dispatcher, LocalDispatcher
from d9d_moe.experts import GroupedSwiGLU
from d9d_moe.router import TopKRouter

LOCAL = LocalDispatcher()
"""The dispatcher for experts that all live on this rank."""


@final
class MoeFeedForward(nn.Module):
    """A drop-in for a feed-forward block: each token passes through `top_k` of `num_experts` SwiGLU experts.

    Args:
        hidden_size: Size of the last dim of input and output.
        intermediate_size: Size of the gated space of each expert.
        num_experts: Number of experts.
        top_k: Number of experts for each token.
        renormalize: Whether the weights of a token's experts are scaled to sum to 1.
        dispatcher: Brings tokens to experts.
        init_std: Standard deviation of the initial weights.

    Raises:
        UserError: If `top_k` is not between 1 and `num_experts`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        renormalize: bool = True,
        dispatcher: Dispatcher = LOCAL,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.dispatcher = dispatcher
        self.router = TopKRouter(
            hidden_size, num_experts=num_experts, top_k=top_k, renormalize=renormalize, init_std=init_std
        )
        self.experts = GroupedSwiGLU(num_experts, hidden_size, intermediate_size, init_std=init_std)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [..., hidden_size] to the same shape and dtype."""
        tokens = x.flatten(0, -2)
        dispatched = self.dispatcher.dispatch(tokens, self.router(tokens), num_experts=self.num_experts)
        return dispatched.combine(self.experts(dispatched.rows, dispatched.counts)).view_as(x)
