"""The balance loss over all layers together, as `transformers` defines it.

`transformers` concatenates the tokens of all layers, and then takes `E * sum_e f_e * P_e`. The share f of an expert is
known behind the last layer only. So each layer records what the loss needs, per token; the records of the layers are
summed, pass from stage to stage, and become losses behind the last layer.

Shape legend: B batch, L length, T = B * L tokens, E experts, R = 2 E + 2 recorded numbers per token.
"""

from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from d9d_moe.router import Routing
from d9d_moe.router_losses import RouterLosses, TokenGroups, scored, z_losses


def token_records(routing: Routing, losses: RouterLosses, *, mask_T: Tensor | None = None) -> Tensor:
    """Record what the loss over all layers needs of one layer [T, R]; zeros for padding.

    The columns: the scores [E], how often the token chose each expert [E], 1 for the layer, and the z-loss.

    Args:
        routing: Of tokens [T].
        losses: Which losses.
        mask_T: True for tokens, False for padding [T]; None for tokens alone.

    Raises:
        UserError: If the router gives no scores.
    """
    scores_TE, _ = scored(routing)
    chosen_TE = torch.zeros_like(scores_TE).scatter_(1, routing.indices, 1.0)
    ones_T1 = torch.ones_like(scores_TE[:, :1])
    records_TR = torch.cat([scores_TE, chosen_TE, ones_T1, z_losses(routing, losses).unsqueeze(1)], dim=1)
    return records_TR if mask_T is None else records_TR.masked_fill(~mask_T.unsqueeze(1), 0.0)


@final
class JointBalance(nn.Module):
    """Turns the records of all layers into a loss for each token, behind the last layer of a model.

    Args:
        losses: Which losses; `definition` is "transformers".

    Attributes:
        token_groups: The ranks that have other tokens; `parallelize_expert_parallel` sets them.
    """

    def __init__(self, losses: RouterLosses) -> None:
        super().__init__()
        self.losses = losses
        self.token_groups = TokenGroups()

    def forward(self, records_BLR: Tensor) -> Tensor:
        """Compute what the routing of each token costs [B, L].

        Collective over the group of the scope: one all-reduce of B x (E + 1) or E + 1 numbers.

        Args:
            records_BLR: `token_records`, summed over all layers; [B, L, 1] of a model without sparse layers.
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
        """`E * f_e` [B or 1, 1, E], where f is the share of all tokens of all layers that chose an expert."""
        is_by_row = self.losses.scope == "sequence"
        # Float64: the sums are numbers of tokens, of all layers and ranks, and exact.
        counts = torch.cat([chosen_BLE, layers_BL1], dim=-1).double().sum(dim=1 if is_by_row else (0, 1), keepdim=True)
        group = self.token_groups.sequence if is_by_row else self.token_groups.batch
        if group is not None and group.size() > 1:
            dist.all_reduce(counts, group=group)
        num_experts = chosen_BLE.shape[-1]
        return counts[..., :-1] * num_experts / counts[..., -1:].clamp(min=1)
