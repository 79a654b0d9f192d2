r"""Low-rank adaptation of linear layers and of grouped experts.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (https://arxiv.org/abs/2106.09685), equation 3:
$h = W x + \frac{\alpha}{r} B A x$, where $W$ stays as it is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement
from torch.nn import functional as F

from d9d_peft._grouped import Product, grouped_product
from d9d_peft._sharded import local_region
from d9d_peft._targets import Target, check_target, claims, find_layers
from d9d_peft.adapter import Adapter
from d9d_peft.low_rank import (
    LowRank,
    adapter_dtype,
    check_dtype,
    factor_placements,
    low_rank_part,
    new_factors,
    reset_factors,
)
from d9d_peft.method import Plan, first_names


@final
class LoraAdapter(Adapter):
    """Adds a trained low-rank product to what a layer computes. It starts as nothing, because `lora_b` starts at zero.

    Attributes:
        lora_a: $A$, of shape [rank, in]; [groups, rank, in] in a layer of groups.
        lora_b: $B$, of shape [out, rank]; [groups, out, rank] in a layer of groups.
        low_rank: Rank and scale.
    """

    def __init__(self, layer: nn.Module, low_rank: LowRank, *, dtype: torch.dtype | None = None) -> None:
        """Make an adapter for a layer, on the device of the layer's weight.

        Args:
            layer: An `nn.Linear` or a `d9d_moe.GroupedLinear`.
            low_rank: Rank and scale.
            dtype: The dtype of A and B; `None` for that of the weight, but float32 at least.
        """
        super().__init__()
        product, weight = product_of(layer), layer._parameters["weight"]
        assert product is not None
        assert weight is not None
        self.low_rank = low_rank
        self.lora_a, self.lora_b = new_factors(weight, low_rank.rank, adapter_dtype(weight, dtype))
        self._product = product
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set A as a linear layer's weight is set (uniform within 1 / sqrt(in)) and B to zero."""
        reset_factors(self.lora_a, self.lora_b)

    def forward(self, layer: nn.Module, inner: Callable[..., Tensor], *args: Any) -> Tensor:
        """`inner(x) + s B A x`, where `x` is the first of the arguments; see `Adapter.forward`.

        The update is computed in the dtype of A; in a layer of groups in that of `x`, as `peft` does for experts. It is
        added in the wider of the dtypes, and the sum has the dtype of `inner(x)`.
        """
        x, *rest = args
        dtype = x.dtype if self.lora_a.ndim == 3 else self.lora_a.dtype
        dropped = F.dropout(x.to(dtype), self.low_rank.dropout, self.training)
        update = self._product(self._product(dropped, self.lora_a.to(dtype), *rest), self.lora_b.to(dtype), *rest)
        y = inner(x, *rest)
        return (y + self.low_rank.scaling * update).to(y.dtype)

    @torch.no_grad()
    def merge_(self, layer: nn.Module) -> None:
        """Add s B A to the weight, computed in float32 at least, and set B to zero; see `Adapter.merge_`."""
        weight = layer._parameters["weight"]
        assert weight is not None
        local_region(weight)[0].add_(low_rank_part(weight, self.lora_a, self.lora_b), alpha=self.low_rank.scaling)
        self.lora_b.zero_()

    def tensor_placements(self, weight: Placement) -> Mapping[str, Placement]:
        """See `factor_placements`."""
        return factor_placements(weight, self.lora_a.ndim)

    def extra_repr(self) -> str:
        """What `print(model)` says."""
        return str(self.low_rank)


@final
@dataclass(frozen=True, slots=True)
class LoRA:
    """Trains a low-rank update of every linear layer, and of every layer of grouped experts, that a target matches.

    Attributes:
        target: Regular expression, searched in the qualified names of the model's modules: `r"attn.[qkvo]_proj$"`; or
            types of modules: `nn.Linear`. What matches and is no such layer is passed over.
        rank: Rank of each update.
        alpha: Scale of each update, times the rank or its square root.
        dropout: Probability that an input of an update is zeroed while training.
        rank_stabilized: Whether updates are scaled by alpha / sqrt(rank), and not by alpha / rank; see `LowRank`.
        dtype: The dtype of the adapters; `None` for that of each layer's weight, but float32 at least.
    """

    target: Target
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    rank_stabilized: bool = False
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            UserError: If a number is out of range, the target is neither a regular expression nor types, or the dtype
                is no floating-point one.
        """
        check_target(self.target, "LoRA")
        self._low_rank().check("LoRA")
        check_dtype(self.dtype, "LoRA")

    def plan(self, model: nn.Module) -> Plan:
        """Put a `LoraAdapter` into each layer that matches."""
        layers, unmatched = find_layers(
            model,
            self.target,
            lambda module: product_of(module) is not None,
            method="LoRA",
            expected="nn.Linear or d9d_moe.GroupedLinear",
        )
        low_rank = self._low_rank()
        return Plan(
            claimed=claims(layers, first_names(model)),
            unmatched=unmatched,
            adapters={name: LoraAdapter(layer, low_rank, dtype=self.dtype) for name, layer in layers.items()},
        )

    def _low_rank(self) -> LowRank:
        return LowRank(rank=self.rank, alpha=self.alpha, dropout=self.dropout, rank_stabilized=self.rank_stabilized)


def product_of(layer: nn.Module) -> Product | None:
    """How a layer that LoRA can adapt multiplies rows with its weight; `None` for any other module."""
    return F.linear if isinstance(layer, nn.Linear) else grouped_product(layer)
