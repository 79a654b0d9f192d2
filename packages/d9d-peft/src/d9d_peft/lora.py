r"""LoRA: low-rank updates of linear layers, grouped experts, embeddings and language-model heads.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (https://arxiv.org/abs/2106.09685), equation 3:
$h = W x + \frac{\alpha}{r} B A x$ with a frozen $W$.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist import local_tensor
from d9d_dist.tensor_parallel.vocab import HasTokenLoss
from d9d_peft._grouped import grouped_product
from d9d_peft.all_linear import is_linear, weight_of
from d9d_peft.low_rank import LowRank, LowRankAdapter, LowRankMethod


@final
class LoraAdapter(LowRankAdapter):
    """Adapter that adds a low-rank update to the output of a layer, initially without effect.

    Attributes:
        lora_a: $A$ [rank, in]; [groups, rank, in] in a grouped layer.
        lora_b: $B$ [out, rank]; [groups, out, rank] in a grouped layer. Initially zero. For an embedding the weight
            [vocabulary, features] is [out, in].
    """

    def __init__(self, layer: nn.Module, low_rank: LowRank, *, dtype: torch.dtype | None = None) -> None:
        """Create an adapter for a layer that `LoRA` supports, on the device of the layer's weight.

        `dtype` is the dtype of A and B; `None` for the dtype of the weight, but at least float32.
        """
        update = update_of(layer)
        assert update is not None
        super().__init__(weight_of(layer), low_rank, dtype)
        self._update = update
        self.reset_parameters()

    @property
    def is_embedding(self) -> bool:
        """True if the layer is an embedding: rows of B [vocabulary, rank] are multiplied by A [rank, features]."""
        return self._update is _adapted_embedding

    def forward(self, layer: nn.Module, inner: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Compute `inner(x) + s B A x`, where `x` is the first argument; see `Adapter.forward`.

        The update is computed in the dtype of A; in grouped layers in the dtype of `x`, as in `peft`. The sum is
        computed in the wider dtype of both addends, then cast to the dtype of `inner(x)`. A head computes the product
        with B in the dtype of its weight.
        """
        return self._update(self, layer, inner, *args, **kwargs)

    @torch.no_grad()
    def merge_(self, layer: nn.Module) -> None:
        """Add `s B A`, computed in at least float32, to the weight and set B to zero; see `Adapter.merge_`."""
        weight = weight_of(layer)
        local_tensor(weight).add_(self._update_part(weight), alpha=self.low_rank.scaling)
        self.lora_b.zero_()


@final
@dataclass(frozen=True, slots=True)
class LoRA(LowRankMethod):
    """Method that puts a `LoraAdapter` into each layer that a target matches.

    Attributes:
        target: Regular expression, searched in the qualified names of the model's modules (`r"attn.[qkvo]_proj$"`), or
            module types such as `nn.Linear`. Supported are `nn.Linear`, also a subclass that computes the same, the
            `Conv1D` of `transformers`, `d9d_moe.GroupedLinear`, `nn.Embedding` without `max_norm`, also a subclass that
            multiplies the rows by `embed_scale`, and language-model heads with one `weight`: modules with a
            `token_loss` (`d9d_dist.HasTokenLoss`) that use their input only in `x @ weight.T`. Other matches are
            skipped.
        rank: Rank of each update.
        alpha: Numerator of the scale alpha / rank of each update.
        dropout: Probability that an input element of an update is zeroed in training.
        rank_stabilized: True to scale updates by alpha / sqrt(rank) instead of alpha / rank; see `LowRank`.
        dtype: dtype of the adapters; `None` for the dtype of each layer's weight, but at least float32.
    """

    _make_adapter = LoraAdapter
    _expected = "nn.Linear, nn.Embedding, d9d_moe.GroupedLinear or a language-model head"

    def _supports(self, layer: nn.Module) -> bool:
        return update_of(layer) is not None


class Update(Protocol):
    """Function that computes the output of a layer with a LoRA adapter."""

    def __call__(
        self, adapter: LoraAdapter, layer: nn.Module, inner: Callable[..., Tensor], *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return the adapted output; arguments as in `Adapter.forward`."""
        ...


def update_of(layer: nn.Module) -> Update | None:
    """Return the function that computes a layer with an adapter. `None` if LoRA does not support the layer."""
    if is_linear(layer):
        return _adapted_linear
    if isinstance(layer, nn.Embedding):
        forward: Any = type(layer).forward
        is_other = forward is not nn.Embedding.forward and not hasattr(layer, "embed_scale")
        # With max_norm, the lookup itself changes the weight.
        return None if is_other or layer.max_norm is not None else _adapted_embedding
    if isinstance(layer, HasTokenLoss) and layer._parameters.get("weight") is not None:
        return _adapted_head
    return _adapted_groups if grouped_product(layer) is not None else None


def _adapted_linear(adapter: LoraAdapter, layer: nn.Module, inner: Callable[..., Tensor], x: Tensor) -> Tensor:
    dropped = F.dropout(x.to(adapter.lora_a.dtype), adapter.low_rank.dropout, adapter.training)
    return _sum(inner(x), F.linear(F.linear(dropped, adapter.lora_a), adapter.lora_b), adapter.low_rank)


def _adapted_groups(
    adapter: LoraAdapter, layer: nn.Module, inner: Callable[..., Tensor], x: Tensor, *rest: Any
) -> Tensor:
    product = grouped_product(layer)
    assert product is not None
    dropped = F.dropout(x, adapter.low_rank.dropout, adapter.training)
    reduced = product(dropped, adapter.lora_a.to(x.dtype), *rest)
    return _sum(inner(x, *rest), product(reduced, adapter.lora_b.to(x.dtype), *rest), adapter.low_rank)


def _adapted_embedding(adapter: LoraAdapter, layer: nn.Module, inner: Callable[..., Tensor], ids: Tensor) -> Tensor:
    """Add the rows of `s B A`, times `embed_scale` if there is one, to those of the table; no dropout, as in `peft`."""
    assert isinstance(layer, nn.Embedding)
    rows = F.embedding(ids, adapter.lora_b, layer.padding_idx, scale_grad_by_freq=layer.scale_grad_by_freq)
    update = rows @ adapter.lora_a
    scale = getattr(layer, "embed_scale", 1.0)
    update = update * (scale.to(layer.weight.dtype) if isinstance(scale, Tensor) else scale)
    return _sum(inner(ids), update, adapter.low_rank)


def _adapted_head(
    adapter: LoraAdapter, layer: nn.Module, inner: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Call a head, which computes losses from its weight in chunks, with [x, s A x] and the weight [W, B].

    The product of both is `W x + s B A x`, so the head never needs the full logits or `W + s B A`.
    """
    weight = layer._parameters["weight"]
    assert weight is not None
    dropped = F.dropout(x.to(adapter.lora_a.dtype), adapter.low_rank.dropout, adapter.training)
    reduced = adapter.low_rank.scaling * F.linear(dropped, adapter.lora_a)
    # Replace the parameter only while forward runs, as parallelism does.
    layer._parameters["weight"] = torch.cat((weight, adapter.lora_b.to(weight.dtype)), dim=1)  # ty: ignore[invalid-assignment]
    try:
        return inner(torch.cat((x, reduced.to(x.dtype)), dim=-1), *args, **kwargs)
    finally:
        layer._parameters["weight"] = weight


def _sum(y: Tensor, update: Tensor, low_rank: LowRank) -> Tensor:
    return torch.add(y, update, alpha=low_rank.scaling).to(y.dtype)
