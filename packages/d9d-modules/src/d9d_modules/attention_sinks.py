"""Attention sinks: a learnable score for each head that lets it attend to nothing.

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
    """A score for each head [H] beside those of the keys: "gpt-oss" (arXiv:2508.10925), section 2.2.

    A module of its own, so that tensor parallelism can give each rank those of its heads (`HeadParallel`).

    Args:
        num_heads: Number of query heads.
        init_std: Standard deviation of the initial scores.
    """

    def __init__(self, num_heads: int, *, init_std: float = 0.02) -> None:
        super().__init__()
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the scores from `Normal(0, init_std)`."""
        nn.init.normal_(self.weight, std=self.init_std)

    def forward(self) -> Tensor:
        """The scores of this rank's heads [H]."""
        return self.weight


@final
@dataclass(frozen=True)
class HeadParallel(TensorStyle):
    """A module with a part for each attention head, split like the heads: weight [H, ...] is `Shard(0)`."""

    def placements(self) -> Mapping[str, Placement]:
        """See `d9d_dist.TensorStyle.placements`."""
        return {"weight": Shard(0)}
