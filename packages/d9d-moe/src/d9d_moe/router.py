"""Routers, which choose the experts of each token and their weights.

The forward pass of a router has no side effects, so evaluation and recomputation route identically.

Shape legend: T tokens, D hidden size, E experts, A experts per token (top-k), G groups of experts.
"""

from typing import NamedTuple, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist.errors import UserError
from d9d_moe.autocast import no_autocast


@final
class Routing(NamedTuple):
    """Chosen experts of each token, with their weights.

    Attributes:
        indices: Chosen experts [T, A], int64, distinct in each row; in any order. A negative index drops the choice:
            it adds nothing to the token, and is not counted.
        probabilities: Weight of each chosen expert [T, A], float32 (float64 for float64 input).
        logits: Router logits [T, E]; required for router losses.
        scores: Scores of all experts [T, E], without the expert bias, normalized to sum to 1 for each token; required
            for router losses.
    """

    indices: Tensor
    probabilities: Tensor
    logits: Tensor | None = None
    scores: Tensor | None = None


class Router(Protocol):
    """Module that chooses the experts of each token."""

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        ...

    @property
    def top_k(self) -> int:
        """Number of experts per token."""
        ...

    def __call__(self, x_TD: Tensor) -> Routing:
        """Choose the experts of each token of `x_TD` [T, D]."""
        ...


@runtime_checkable
class ReplayRouter(Protocol):
    """Router that can use recorded experts instead of its own choice. Both routers of this package can.

    Reinforcement learning replays the routing of the inference engine: otherwise, small numerical differences between
    the engines could lead to other experts, and change the probabilities of tokens ("Stabilizing MoE Reinforcement
    Learning by Aligning Training and Inference Routers", arXiv:2510.11370).
    """

    @property
    def can_replay(self) -> bool:
        """Always True: the router accepts recorded experts."""
        ...

    def __call__(self, x_TD: Tensor, recorded_TA: Tensor | None = None) -> Routing:
        """Route each token of `x_TD` [T, D] to recorded experts, with weights from the current scores.

        Args:
            x_TD: Tokens [T, D].
            recorded_TA: Recorded experts [T, A], integer, distinct in each row. The router chooses the experts of
                tokens with an index below 0. None: the router chooses the experts of all tokens.
        """
        ...


class WeightedRouter(nn.Module):
    """Router with a weight [E, D]. Base class of the routers below.

    Args:
        renormalize: If True, scale the weights of the chosen experts to sum to 1.
        bias: If True, the logits have a learnable bias [E] (GPT-OSS).
        balance_bias: If True, experts are chosen by score plus `selection_bias`.

    Attributes:
        selection_bias: Expert bias [E], float32; a persistent buffer, which `update_expert_bias` updates once per step.
            None without `balance_bias`.

    Raises:
        UserError: If `top_k` is not between 1 and `num_experts`.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        top_k: int,
        renormalize: bool = True,
        bias: bool = False,
        balance_bias: bool = False,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        check_top_k(top_k, num_experts)
        self.can_replay = True
        self.num_experts = num_experts
        self.top_k = top_k
        self.renormalize = renormalize
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_experts)) if bias else None
        self.register_buffer("selection_bias", torch.empty(num_experts, dtype=torch.float32) if balance_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from `Normal(0, init_std)`, and set both biases to zero."""
        nn.init.normal_(self.weight, std=self.init_std)
        for bias in (self.bias, self._buffers["selection_bias"]):
            if bias is not None:
                nn.init.zeros_(bias)


@final
class TopKRouter(WeightedRouter):
    """Router of Qwen3-MoE and Mixtral: softmax over all experts, then the `top_k` largest, computed in float32.

    With `renormalize`, this equals a softmax over the logits of the chosen experts, as in GPT-OSS.
    """

    selection_bias: Tensor | None

    def forward(self, x_TD: Tensor, recorded_TA: Tensor | None = None) -> Routing:
        """Choose the experts of each token of `x_TD` [T, D], or use the recorded ones; see `ReplayRouter`."""
        logits_TE = _logits(x_TD, self.weight, self.bias)
        scores_TE = logits_TE.softmax(dim=-1)
        if self.selection_bias is None:
            probabilities_TA, indices_TA = scores_TE.topk(self.top_k, dim=-1)
        else:
            biased_TE = scores_TE.detach() + self.selection_bias.to(scores_TE.dtype)
            indices_TA = biased_TE.topk(self.top_k, dim=-1).indices
            probabilities_TA = scores_TE.gather(1, indices_TA)
        if recorded_TA is not None:
            indices_TA = _replayed(indices_TA, recorded_TA)
            probabilities_TA = scores_TE.gather(1, indices_TA)
        if self.renormalize:
            probabilities_TA = probabilities_TA / probabilities_TA.sum(dim=-1, keepdim=True)
        return Routing(indices_TA, probabilities_TA, logits_TE, scores_TE)


@final
class SigmoidRouter(WeightedRouter):
    """Router of DeepSeek-V3 (arXiv:2412.19437, equations 12 to 16): sigmoid scores and an expert bias.

    `s = sigmoid(x @ weight.T)`. The `top_k` experts with the largest `s + selection_bias` are chosen. Their weights are
    the scores `s` without the bias. Group-limited routing (section 2.1.2, and DeepSeek-V2, arXiv:2405.04434, section
    2.2.2) chooses experts from the `top_groups` groups with the highest scores. The score of a group is the sum of its
    two largest biased scores.

    Args:
        num_groups: Number of groups of consecutive experts.
        top_groups: Number of groups from which the experts of a token are chosen.
        renormalize: See `WeightedRouter`.
        scale: Multiplier of the routing weights, applied after renormalization.

    Raises:
        UserError: If `top_k` is not between 1 and `num_experts`, `num_groups` does not divide `num_experts`,
            `top_groups` is not between 1 and `num_groups`, or `top_groups` groups hold fewer than `top_k` experts.
    """

    selection_bias: Tensor

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        top_k: int,
        num_groups: int = 1,
        top_groups: int = 1,
        renormalize: bool = True,
        scale: float = 1.0,
        init_std: float = 0.02,
    ) -> None:
        super().__init__(
            hidden_size,
            num_experts=num_experts,
            top_k=top_k,
            renormalize=renormalize,
            balance_bias=True,
            init_std=init_std,
        )
        check_groups(num_experts=num_experts, top_k=top_k, num_groups=num_groups, top_groups=top_groups)
        self.num_groups, self.top_groups = num_groups, top_groups
        self.scale = scale

    def forward(self, x_TD: Tensor, recorded_TA: Tensor | None = None) -> Routing:
        """Choose the experts of each token of `x_TD` [T, D], or use the recorded ones; see `ReplayRouter`."""
        logits_TE = _logits(x_TD, self.weight)
        scores_TE = logits_TE.sigmoid()
        with torch.no_grad():
            biased_TE = self._mask_other_groups(scores_TE + self.selection_bias.to(scores_TE.dtype))
            indices_TA = biased_TE.topk(self.top_k, dim=-1).indices
        if recorded_TA is not None:
            indices_TA = _replayed(indices_TA, recorded_TA)
        probabilities_TA = scores_TE.gather(1, indices_TA)
        if self.renormalize:
            probabilities_TA = probabilities_TA / (probabilities_TA.sum(dim=-1, keepdim=True) + 1e-20)
        shares_TE = scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + 1e-20)
        return Routing(indices_TA, probabilities_TA * self.scale, logits_TE, shares_TE)

    def _mask_other_groups(self, biased_TE: Tensor) -> Tensor:
        """Set the scores of experts outside the `top_groups` best groups to minus infinity."""
        if self.top_groups == self.num_groups:
            return biased_TE
        grouped_TGE = biased_TE.unflatten(-1, (self.num_groups, -1))
        best_TG = grouped_TGE.topk(min(2, grouped_TGE.shape[-1]), dim=-1).values.sum(dim=-1)
        chosen_TG = torch.zeros_like(best_TG, dtype=torch.bool)
        chosen_TG.scatter_(1, best_TG.topk(self.top_groups, dim=-1).indices, value=True)
        return grouped_TGE.masked_fill(~chosen_TG.unsqueeze(-1), float("-inf")).flatten(start_dim=1)


def _replayed(chosen_TA: Tensor, recorded_TA: Tensor) -> Tensor:
    """Return the recorded experts; for tokens without a record, the chosen experts."""
    if recorded_TA.shape != chosen_TA.shape:
        raise UserError(
            f"the recorded experts have shape {tuple(recorded_TA.shape)}; expected {tuple(chosen_TA.shape)}, the top_k "
            "experts of each token of this rank."
        )
    has_record_T1 = (recorded_TA >= 0).all(dim=-1, keepdim=True)
    return torch.where(has_record_T1, recorded_TA.to(chosen_TA.dtype), chosen_TA)


def check_top_k(top_k: int, num_experts: int) -> None:
    """Raise a `UserError` if `top_k` is not between 1 and `num_experts`."""
    if not 1 <= top_k <= num_experts:
        raise UserError(f"top_k = {top_k}; expected 1 <= top_k <= num_experts = {num_experts}.")


def check_groups(*, num_experts: int, top_k: int, num_groups: int, top_groups: int) -> None:
    """Raise a `UserError` if a token cannot choose `top_k` experts from `top_groups` of `num_groups` equal groups."""
    if num_groups < 1 or num_experts % num_groups:
        raise UserError(f"num_groups = {num_groups}; expected a divisor of num_experts = {num_experts}.")
    if not 1 <= top_groups <= num_groups:
        raise UserError(f"top_groups = {top_groups}; expected 1 <= top_groups <= num_groups = {num_groups}.")
    reachable = top_groups * (num_experts // num_groups)
    if top_k > reachable:
        raise UserError(
            f"top_k = {top_k}, but top_groups = {top_groups} of {num_groups} groups hold {reachable} experts, of "
            f"num_experts = {num_experts}; expected top_k <= {reachable}. Lower top_k, or raise top_groups."
        )


def _logits(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """Compute the router logits [T, E] in at least float32; rounding to 16 bits could make close logits equal."""
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    with no_autocast(x_TD):
        return F.linear(x_TD.to(dtype), weight_ED.to(dtype), None if bias_E is None else bias_E.to(dtype))
