"""Balance loss over the tokens of all layers, as `transformers` defines it.

`transformers` concatenates the tokens of all layers and computes `E * sum_e f_e * P_e`. P_e is the mean router score of
expert e. f_e is the fraction of tokens that chose expert e, which is known only after the last layer. Each layer
therefore returns a record per token. The records are summed over layers, sent from stage to stage, and converted to
losses after the last layer.

Shape legend: B batch, L length, T = B * L tokens, E experts, R = 2 E + 2 record entries per token.
"""

from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from d9d_moe.router import Routing
from d9d_moe.router_losses import RouterLosses, TokenGroups, require_scores, z_losses


def token_records(routing: Routing, losses: RouterLosses, *, mask_T: Tensor | None = None) -> Tensor:
    """Return one layer's records [T, R], the per-token inputs to the loss over all layers; zeros for padding.

    Columns: router scores [E], one-hot mask of the chosen experts [E], ones [1] (summed over layers, they give the
    layer count), z-loss [1]. `mask_T` is the token mask [T], bool; None if there is no padding.

    Raises:
        UserError: If the routing has no logits or no scores.
    """
    scores_TE, _ = require_scores(routing)
    chosen_TE = torch.zeros_like(scores_TE).scatter_(1, routing.indices, 1.0)
    ones_T1 = torch.ones_like(scores_TE[:, :1])
    records_TR = torch.cat([scores_TE, chosen_TE, ones_T1, z_losses(routing, losses).unsqueeze(1)], dim=1)
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

        Without sparse layers the records are [B, L, 1]. Collective over the group of the scope: one all-reduce of
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
