r"""LoRA: low-rank updates of linear layers and of grouped experts.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (https://arxiv.org/abs/2106.09685), equation 3:
$h = W x + \frac{\alpha}{r} B A x$ with a frozen $W$.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement
from torch.nn import functional as F

from d9d_dist import local_tensor
from d9d_peft._grouped import Product, grouped_product
from d9d_peft.low_rank import LowRank, LowRankAdapter, LowRankMethod, factor_placements


@final
class LoraAdapter(LowRankAdapter):
    """Adapter that adds a low-rank update to the output of a layer, initially without effect.

    Attributes:
        lora_a: $A$ [rank, in]; [groups, rank, in] in a grouped layer.
        lora_b: $B$ [out, rank]; [groups, out, rank] in a grouped layer. Initially zero.
        low_rank: Rank, scale and dropout.
    """

    def __init__(self, layer: nn.Module, low_rank: LowRank, *, dtype: torch.dtype | None = None) -> None:
        """Create an adapter for an `nn.Linear` or a `d9d_moe.GroupedLinear`, on the device of the layer's weight.

        `dtype` is that of A and B; `None` for the dtype of the weight, but at least float32.
        """
        product, weight = product_of(layer), layer._parameters["weight"]
        assert product is not None
        assert weight is not None
        super().__init__(weight, low_rank, dtype)
        self._product = product
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw A uniformly from ±1 / sqrt(in), like the weight of `nn.Linear`, and set B to zero."""
        self._reset_factors()

    def forward(self, layer: nn.Module, inner: Callable[..., Tensor], *args: Any) -> Tensor:
        """Compute `inner(x) + s B A x`, where `x` is the first argument; see `Adapter.forward`.

        The update is computed in the dtype of A; in a grouped layer in that of `x`, as in `peft` for experts. The sum
        is computed in the wider dtype of both addends, then cast to the dtype of `inner(x)`.
        """
        x, *rest = args
        dtype = x.dtype if self.lora_a.ndim == 3 else self.lora_a.dtype
        dropped = F.dropout(x.to(dtype), self.low_rank.dropout, self.training)
        update = self._product(self._product(dropped, self.lora_a.to(dtype), *rest), self.lora_b.to(dtype), *rest)
        y = inner(x, *rest)
        return (y + self.low_rank.scaling * update).to(y.dtype)

    @torch.no_grad()
    def merge_(self, layer: nn.Module) -> None:
        """Add `s B A`, computed in at least float32, to the weight and set B to zero; see `Adapter.merge_`."""
        weight = layer._parameters["weight"]
        assert weight is not None
        local_tensor(weight).add_(self._update_part(weight), alpha=self.low_rank.scaling)
        self.lora_b.zero_()

    def tensor_placements(self, weight: Placement) -> Mapping[str, Placement]:
        """See `factor_placements`."""
        return factor_placements(weight, self.lora_a.ndim)


@final
@dataclass(frozen=True, slots=True)
class LoRA(LowRankMethod):
    """Method that puts a `LoraAdapter` into each linear layer and each layer of grouped experts that a target matches.

    Attributes:
        target: Regular expression, searched in the qualified names of the model's modules (`r"attn.[qkvo]_proj$"`), or
            module types such as `nn.Linear`. Matches that are neither `nn.Linear` nor `d9d_moe.GroupedLinear` are
            skipped.
        rank: Rank of each update.
        alpha: Numerator of the scale alpha / rank of each update.
        dropout: Probability that an input element of an update is zeroed in training.
        rank_stabilized: True to scale updates by alpha / sqrt(rank) instead of alpha / rank; see `LowRank`.
        dtype: dtype of the adapters; `None` for the dtype of each layer's weight, but at least float32.
    """

    _expected = "nn.Linear or d9d_moe.GroupedLinear"

    def _supports(self, layer: nn.Module) -> bool:
        return product_of(layer) is not None

    def _make_adapter(self, layer: nn.Module, low_rank: LowRank) -> LoraAdapter:
        return LoraAdapter(layer, low_rank, dtype=self.dtype)


def product_of(layer: nn.Module) -> Product | None:
    """Return the matmul function of a layer: `F.linear` or the grouped matmul. `None` if LoRA does not support it."""
    return F.linear if isinstance(layer, nn.Linear) else grouped_product(layer)
