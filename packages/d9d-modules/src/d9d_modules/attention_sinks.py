"""Attention sinks: a learnable logit per head that absorbs part of the softmax.

Shape legend: H query heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard

from d9d_dist import TensorStyle


@final
class AttentionSinks(nn.Module):
    """Learnable logit of each head [H], added to the softmax denominator: "gpt-oss" (arXiv:2508.10925), section 2.2.

    A separate module, so that tensor parallelism can shard it by heads (`HeadParallel`).
    """

    def __init__(self, num_heads: int, *, init_std: float = 0.02) -> None:
        super().__init__()
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the logits from `Normal(0, init_std)`."""
        nn.init.normal_(self.weight, std=self.init_std)

    def forward(self) -> Tensor:
        """Return the sink logits of this rank's heads [H]."""
        return self.weight


@final
@dataclass(frozen=True)
class HeadParallel(TensorStyle):
    """Tensor-parallel style that shards a module's parameters [H, ...], `names`, by attention heads, as `Shard(0)`."""

    names: tuple[str, ...] = ("weight",)

    def placements(self) -> Mapping[str, Placement]:
        """See `d9d_dist.TensorStyle.placements`."""
        return dict.fromkeys(self.names, Shard(0))
