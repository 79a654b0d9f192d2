"""Auxiliary losses of routers, as one value per token, so that their sum does not depend on how tokens are split.

For a given load of the experts, the balance loss is linear in the scores. The loss of a sequence is therefore a sum
over its tokens, and each rank computes the values of its own tokens. A model adds the values to its losses per token,
so a task that averages losses over tokens averages the router losses too.

`transformers` instead concatenates the tokens of all layers and computes `E * sum_e f_e * P_e`. P_e is the mean router
score of expert e. f_e is the fraction of tokens that chose expert e, which is known only after the last layer. Each
layer therefore returns a record per token. The records are summed over layers, sent from stage to stage, and converted
to losses after the last layer.

Shape legend: B batch, L length, T = B * L tokens, E experts, A experts per token (top-k), R = 2 E + 2
record entries per token.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from d9d_dist.errors import UserError, check_choice
from d9d_moe.router import Routing

BalanceScope: TypeAlias = Literal["sequence", "batch", "global_batch"]
"""Set of tokens over which the load of the experts is counted."""

BalanceDefinition: TypeAlias = Literal["per_layer", "transformers"]
"""One balance loss per layer, or one over the tokens of all layers as in `transformers`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLosses:
    """Auxiliary losses of a model's routers, and their weights relative to the loss of a token.

    Attributes:
        balance: Weight of the load-balancing loss `sum_e f_e * P_e`; 0 disables it. f is the fraction of tokens that
            chose an expert, times `num_experts / top_k`; P is the expert's mean score. Sources: "DeepSeek-V3",
            arXiv:2412.19437, equations 17 to 20; for a top_k of 1, "Switch Transformers", arXiv:2101.03961, equation 4.
            The loss is 1 if load and scores are even. With `definition = "transformers"`, `balance` is the
            `router_aux_loss_coef` of `transformers`.
        definition: "per_layer": each layer has the loss above, and the losses of all layers are added. "transformers":
            one loss over the tokens of all layers, `E * sum_e f_e * P_e`, as in `load_balancing_loss_func`. Here f is
            the fraction of tokens that chose an expert, and the loss is `top_k` if load and scores are even. With more
            than one layer, no factor converts one definition into the other.
        scope: Set of tokens over which f is counted; padding is excluded if the model gets a mask. "sequence": the
            tokens of one row of the batch, over all its context-parallel and tensor-parallel parts. "batch": the tokens
            of one microbatch over all ranks (arXiv:2501.11873). "global_batch": all tokens of the previous step, whose
            load `balance_experts` sets; the load of the current step is known only after its last microbatch. With
            "sequence" and "global_batch" the loss does not depend on the parallel layout.
        z: Weight of the z-loss, the mean of `logsumexp(logits)^2` ("ST-MoE", arXiv:2202.08906, equation 5); 0 disables
            the z-loss.
    """

    balance: float = 0.0
    definition: BalanceDefinition = "per_layer"
    scope: BalanceScope = "sequence"
    z: float = 0.0

    def __post_init__(self) -> None:
        check_choice("router_losses.scope", self.scope, BalanceScope)
        check_choice("router_losses.definition", self.definition, BalanceDefinition)
        if self.definition == "transformers" and self.scope == "global_batch":
            raise UserError(
                'router_losses.definition = "transformers" with scope = "global_batch": no pipeline stage has the load '
                'of all layers in the previous step; expected scope = "sequence" or "batch".'
            )
        for name, value in (("balance", self.balance), ("z", self.z)):
            if value < 0:
                raise UserError(f"router_losses.{name} = {value}; expected 0 (disabled) or above.")

    @property
    def any(self) -> bool:
        """True if a factor is above 0."""
        return self.balance > 0 or self.z > 0

    @property
    def are_joint(self) -> bool:
        """True if there is one balance loss over all layers; see `JointBalance`."""
        return self.balance > 0 and self.definition == "transformers"

    @property
    def follow_batch(self) -> bool:
        """True if the balance loss counts the tokens of one microbatch over all ranks."""
        return self.balance > 0 and self.scope == "batch"

    @property
    def follow_global_batch(self) -> bool:
        """True if the balance loss uses the load of the previous step."""
        return self.balance > 0 and self.scope == "global_batch"


@final
@dataclass(frozen=True, slots=True)
class TokenGroups:
    """Process groups over which tokens are counted; None counts only the tokens of this rank.

    Attributes:
        sequence: Ranks that hold parts of the same rows of the batch.
        batch: Ranks that hold parts of the same microbatch.
    """

    sequence: dist.ProcessGroup | None = None
    batch: dist.ProcessGroup | None = None


def token_losses(
    routing: Routing,
    losses: RouterLosses,
    groups: TokenGroups,
    *,
    rows: int,
    global_load_E: Tensor | None = None,
    mask_T: Tensor | None = None,
) -> Tensor:
    """Compute the router losses of each token [T]; 0 for padding.

    With a balance loss of scope "sequence" or "batch": collective over the group of the scope, one all-reduce of the
    counts.

    Args:
        routing: Routing of `rows` rows of equal length, flattened to [T].
        losses: Losses and their factors.
        groups: Process groups over which tokens are counted.
        rows: Number of rows B.
        global_load_E: Load of each expert in the previous step [E], relative to an even load; for "global_batch" only.
        mask_T: Token mask [T], bool; False marks padding. None if there is no padding.

    Raises:
        UserError: If the routing has no logits or no scores.
    """
    scores_TE, _ = _require_scores(routing)
    total_T = _z_losses(routing, losses)
    if losses.balance:
        if losses.scope == "global_batch":
            assert global_load_E is not None
            load_BE = global_load_E.unsqueeze(0)
        else:
            load_BE = expert_load(routing, groups, scope=losses.scope, rows=rows, mask_T=mask_T)
        num_tokens, num_loads = len(total_T), len(load_BE)
        load_TE = load_BE.to(scores_TE.dtype).repeat_interleave(num_tokens // max(num_loads, 1), dim=0)
        total_T = total_T + losses.balance * (scores_TE * load_TE).sum(dim=-1)
    return total_T if mask_T is None else total_T.masked_fill(~mask_T, 0.0)


def _require_scores(routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the scores and the logits of a routing, both [T, E]; raise a `UserError` if one is missing."""
    if routing.scores is None or routing.logits is None:
        raise UserError(
            "got router losses for a router that returns no logits and scores; expected both in its Routing. Disable "
            "the router losses, or return logits and scores from the router."
        )
    return routing.scores, routing.logits


def _z_losses(routing: Routing, losses: RouterLosses) -> Tensor:
    """Compute the z-loss of each token [T]; zeros if the z-loss is disabled."""
    scores_TE, logits_TE = _require_scores(routing)
    return losses.z * logits_TE.logsumexp(dim=-1).square() if losses.z else torch.zeros_like(scores_TE[:, 0])


@torch.no_grad()
def expert_load(
    routing: Routing,
    groups: TokenGroups,
    *,
    scope: Literal["sequence", "batch"],
    rows: int,
    mask_T: Tensor | None = None,
) -> Tensor:
    """Compute the load of each expert relative to an even load: [B, E] for "sequence", [1, E] for "batch"; float32.

    Collective over the group of the scope: one all-reduce of float32 counts, in the shape of the result. The
    routing has `rows` rows of equal length, flattened to [T]. Padding, marked by False in `mask_T` [T], is not counted.
    """
    assert routing.scores is not None
    num_tokens, num_experts = routing.scores.shape
    top_k = routing.indices.shape[1]
    num_loads, group = (rows, groups.sequence) if scope == "sequence" else (1, groups.batch)
    counts_BE = torch.zeros(num_loads, num_experts, dtype=torch.float32, device=routing.indices.device)
    ones_TA = (routing.indices >= 0).to(torch.float32)  # dropped choices have negative indices
    if mask_T is not None:
        ones_TA = ones_TA * mask_T.unsqueeze(1)
    # `rows` is 0 for an empty batch.
    shape = (num_loads, num_tokens * top_k // max(num_loads, 1))
    counts_BE.scatter_add_(1, routing.indices.clamp(min=0).reshape(shape), ones_TA.reshape(shape))
    if group is not None and group.size() > 1:
        dist.all_reduce(counts_BE, group=group)
    return counts_BE * (num_experts / counts_BE.sum(dim=-1, keepdim=True).clamp(min=1))


def token_records(routing: Routing, losses: RouterLosses, *, mask_T: Tensor | None = None) -> Tensor:
    """Return one layer's records [T, R], the per-token inputs to the loss over all layers; zeros for padding.

    Columns: router scores [E], one-hot mask of the chosen experts [E], ones [1] (summed over layers, they give the
    layer count), z-loss [1]. `mask_T` is the token mask [T], bool; None if there is no padding.

    Raises:
        UserError: If the routing has no logits or no scores.
    """
    scores_TE, _ = _require_scores(routing)
    is_chosen_TA = (routing.indices >= 0).to(scores_TE.dtype)
    chosen_TE = torch.zeros_like(scores_TE).scatter_add_(1, routing.indices.clamp(min=0), is_chosen_TA)
    ones_T1 = torch.ones_like(scores_TE[:, :1])
    records_TR = torch.cat([scores_TE, chosen_TE, ones_T1, _z_losses(routing, losses).unsqueeze(1)], dim=1)
    return records_TR if mask_T is None else records_TR.masked_fill(~mask_T.unsqueeze(1), 0.0)


@final
class JointBalance(nn.Module):
    """Conversion of the records of all layers to one loss per token, after the last layer of a model.

    Args:
        losses: Losses and their factors, with `definition = "transformers"`.

    Attributes:
        token_groups: Process groups over which tokens are counted; `parallelize_moe` sets them.
    """

    def __init__(self, losses: RouterLosses) -> None:
        super().__init__()
        self.losses = losses
        self.token_groups = TokenGroups()

    def forward(self, records_BLR: Tensor) -> Tensor:
        """Compute the router losses of each token [B, L] from the sum of `token_records` over all layers.

        Without MoE layers the records are [B, L, 1]. Collective over the group of the scope: one all-reduce of
        B x (E + 1) or E + 1 float64 values.
        """
        num_experts = (records_BLR.shape[-1] - 2) // 2
        if num_experts <= 0:
            return records_BLR.squeeze(-1)
        scores_BLE, chosen_BLE, layers_BL1, z_BL1 = records_BLR.split([num_experts, num_experts, 1, 1], dim=-1)
        load_BLE = self._load(chosen_BLE, layers_BL1).to(scores_BLE.dtype)
        balance_BL1 = (scores_BLE * load_BLE).sum(dim=-1, keepdim=True) / layers_BL1.detach().clamp(min=1)
        return (self.losses.balance * balance_BL1 + z_BL1).squeeze(-1)

    @torch.no_grad()
    def _load(self, chosen_BLE: Tensor, layers_BL1: Tensor) -> Tensor:
        """Return `E * f_e` [B or 1, 1, E]; f_e is the fraction of the tokens of all layers that chose expert e."""
        per_row = self.losses.scope == "sequence"
        # Float64 keeps the sums over tokens, layers and ranks exact.
        counts = torch.cat([chosen_BLE, layers_BL1], dim=-1).double().sum(dim=1 if per_row else (0, 1), keepdim=True)
        group = self.token_groups.sequence if per_row else self.token_groups.batch
        if group is not None and group.size() > 1:
            dist.all_reduce(counts, group=group)
        num_experts = chosen_BLE.shape[-1]
        return counts[..., :-1] * num_experts / counts[..., -1:].clamp(min=1)
