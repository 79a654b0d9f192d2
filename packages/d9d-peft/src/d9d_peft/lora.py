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
    """Adapter that adds a low-rank update to the output of a layer.

    The initial adapter has no effect, because `lora_b` is zero.

    Attributes:
        lora_a: $A$ [rank, in]; [groups, rank, in] in a grouped layer.
        lora_b: $B$ [out, rank]; [groups, out, rank] in a grouped layer.
        low_rank: Rank, scale and dropout.
    """

    def __init__(self, layer: nn.Module, low_rank: LowRank, *, dtype: torch.dtype | None = None) -> None:
        """Create an adapter on the device of the layer's weight.

        Args:
            layer: An `nn.Linear` or a `d9d_moe.GroupedLinear`.
            low_rank: Rank, scale and dropout.
            dtype: dtype of A and B; `None` for the dtype of the weight, but at least float32.
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
        """Draw A uniformly from ±1 / sqrt(in), as `nn.Linear` does its weight, and set B to zero."""
        reset_factors(self.lora_a, self.lora_b)

    def forward(self, layer: nn.Module, inner: Callable[..., Tensor], *args: Any) -> Tensor:
        """Compute `inner(x) + s B A x`, where `x` is the first argument; see `Adapter.forward`.

        The update is computed in the dtype of A. In a grouped layer it is computed in the dtype of `x`, as in `peft`
        for experts. The sum is computed in the wider of the dtypes of `inner(x)` and the update, and is cast to the
        dtype of `inner(x)`.
        """
        x, *rest = args
        dtype = x.dtype if self.lora_a.ndim == 3 else self.lora_a.dtype
        dropped = F.dropout(x.to(dtype), self.low_rank.dropout, self.training)
        update = self._product(self._product(dropped, self.lora_a.to(dtype), *rest), self.lora_b.to(dtype), *rest)
        y = inner(x, *rest)
        return (y + self.low_rank.scaling * update).to(y.dtype)

    @torch.no_grad()
    def merge_(self, layer: nn.Module) -> None:
        """Add s B A, computed in at least float32, to the weight and set B to zero; see `Adapter.merge_`."""
        weight = layer._parameters["weight"]
        assert weight is not None
        local_region(weight)[0].add_(low_rank_part(weight, self.lora_a, self.lora_b), alpha=self.low_rank.scaling)
        self.lora_b.zero_()

    def tensor_placements(self, weight: Placement) -> Mapping[str, Placement]:
        """See `factor_placements`."""
        return factor_placements(weight, self.lora_a.ndim)

    def extra_repr(self) -> str:
        """Return the rank, scale and dropout for `print(model)`."""
        return str(self.low_rank)


@final
@dataclass(frozen=True, slots=True)
class LoRA:
    """Method that puts a `LoraAdapter` into each linear layer and each layer of grouped experts that a target matches.

    Attributes:
        target: Regular expression, searched in the qualified names of the model's modules (`r"attn.[qkvo]_proj$"`), or
            module types such as `nn.Linear`. Matches that are neither `nn.Linear` nor `d9d_moe.GroupedLinear` are
            skipped.
        rank: Rank of each update.
        alpha: Numerator of the scale alpha / rank of each update.
        dropout: Probability that an input element of an update is zeroed in training.
        rank_stabilized: Scale updates by alpha / sqrt(rank) instead of alpha / rank; see `LowRank`.
        dtype: dtype of the adapters; `None` for the dtype of each layer's weight, but at least float32.
    """

    target: Target
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    rank_stabilized: bool = False
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            UserError: If a number is out of range, the target is neither a regular expression nor module types, or the
                dtype is not a floating-point dtype.
        """
        check_target(self.target, "LoRA")
        self._low_rank().check("LoRA")
        check_dtype(self.dtype, "LoRA")

    def plan(self, model: nn.Module) -> Plan:
        """Plan a `LoraAdapter` for each layer that matches; see `PeftMethod.plan`."""
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
    """Return the function that computes the product of a layer; `None` if LoRA does not support the module."""
    return F.linear if isinstance(layer, nn.Linear) else grouped_product(layer)
