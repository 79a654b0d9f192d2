"""Routing: which experts see a token, and how much each of them counts.

A router is pure: it changes nothing in its forward pass, so evaluation, recomputation and replays route alike.

Shape legend: T tokens, D hidden size, E experts, A experts active for each token (top-k).
"""

from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist.errors import UserError


@final
class Routing(NamedTuple):
    """The chosen experts of each token, likeliest first.

    Attributes:
        indices: Experts [T, A], int64, distinct in each row.
        probabilities: Weight of each chosen expert [T, A], float32 (float64 for float64 input).
    """

    indices: Tensor
    probabilities: Tensor


@final
class TopKRouter(nn.Module):
    """Softmax over all experts, then the `top_k` largest (as in Qwen3-MoE and Mixtral), all of it in float32.

    Args:
        hidden_size: Size of the last dim of the input.
        num_experts: Number of experts.
        top_k: Number of experts for each token.
        renormalize: Whether the chosen probabilities are scaled to sum to 1.
        init_std: Standard deviation of the initial weight [E, D].

    Raises:
        UserError: If `top_k` is not between 1 and `num_experts`.
    """

    def __init__(
        self, hidden_size: int, *, num_experts: int, top_k: int, renormalize: bool = True, init_std: float = 0.02
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise UserError(f"top_k = {top_k}; expected 1 <= top_k <= num_experts = {num_experts}.")
        self.top_k = top_k
        self.renormalize = renormalize
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from `Normal(0, init_std)`."""
        nn.init.normal_(self.weight, std=self.init_std)

    def forward(self, x_TD: Tensor) -> Routing:
        """Choose the experts of each token of `x_TD` [T, D]."""
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        scores_TE = F.linear(x_TD.to(dtype), self.weight.to(dtype)).softmax(dim=-1)
        probabilities_TA, indices_TA = scores_TE.topk(self.top_k, dim=-1)
        if self.renormalize:
            probabilities_TA = probabilities_TA / probabilities_TA.sum(dim=-1, keepdim=True)
        return Routing(indices_TA, probabilities_TA)
