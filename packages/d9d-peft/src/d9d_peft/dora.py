r"""DoRA: a low-rank update of the direction of each weight row, and a trained magnitude of each row.

Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation" (https://arxiv.org/abs/2402.09353), equation 5:
$W' = m \frac{W + s B A}{\lVert W + s B A \rVert}$, with a magnitude $m$ and a norm per row (output feature). As in the
paper's section 4.3, backward treats the norm as a constant.

There are two differences from the paper. First, the trained parameter is the offset $d$ of
$m = \lVert W \rVert + d$. It starts at zero, so its initialization does not need the weight. Its gradient equals the
gradient of $m$, but weight decay pulls $m$ to its initial value. Second, dropout is applied only to the input of $B A$,
as in LoRA.

Shape legend: O output features, I input features.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.nn import functional as F

from d9d_dist import reduce_from_axis
from d9d_peft._sharded import local_region, row_norms, whole
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
class DoraAdapter(Adapter):
    """Adapter that updates the direction and the magnitude of the weight rows of a linear layer.

    The initial adapter has no effect, because `lora_b` and `magnitude_offset` are zero.

    Attributes:
        lora_a: $A$ [rank, in].
        lora_b: $B$ [out, rank].
        magnitude_offset: $d$ [out]: magnitude of each row minus the norm of the base weight's row.
        low_rank: Rank, scale and dropout.
    """

    def __init__(self, layer: nn.Linear, low_rank: LowRank, *, dtype: torch.dtype | None = None) -> None:
        """Create an adapter on the device of the layer's weight.

        Args:
            layer: Layer with the forward of `nn.Linear`.
            low_rank: Rank, scale and dropout.
            dtype: dtype of the adapter's parameters; `None` for the dtype of the weight, but at least float32.
        """
        super().__init__()
        self.low_rank = low_rank
        dtype = adapter_dtype(layer.weight, dtype)
        self.lora_a, self.lora_b = new_factors(layer.weight, low_rank.rank, dtype)
        self.magnitude_offset = nn.Parameter(layer.weight.new_empty(layer.out_features, dtype=dtype))
        self._row_mesh: DeviceMesh | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw A uniformly from ±1 / sqrt(in), as `nn.Linear` does its weight, and set B and d to zero."""
        reset_factors(self.lora_a, self.lora_b)
        nn.init.zeros_(self.magnitude_offset)

    def forward(self, layer: nn.Module, inner: Callable[..., Tensor], *args: Any) -> Tensor:
        """Compute `m / ||W + s B A|| * (W x + s B A x)` plus the bias; see `Adapter.forward`.

        If tensor parallelism splits the input features: one all-reduce of the squared norms [2, out].
        """
        (x,) = args
        weight_OI, bias_O = layer._parameters["weight"], layer._parameters["bias"]
        assert weight_OI is not None
        dropped = F.dropout(x.to(self.lora_a.dtype), self.low_rank.dropout, self.training)
        update = F.linear(F.linear(dropped, self.lora_a), self.lora_b)
        base = F.linear(x, weight_OI)
        y = self._row_scale(weight_OI).to(update.dtype) * (base + self.low_rank.scaling * update)
        return (y if bias_O is None else y + bias_O).to(base.dtype)

    def _row_scale(self, weight_OI: Tensor) -> Tensor:
        """Compute `m / ||W + s B A||` [out], in at least float32."""
        base_O, updated_O = self._norms(weight_OI)
        return (base_O + self.magnitude_offset) / updated_O

    @torch.no_grad()
    def _norms(self, weight_OI: Tensor) -> tuple[Tensor, ...]:
        """Compute the norms of the rows of W [out] and of W + s B A [out], in at least float32."""
        updated_OI = weight_OI + self.low_rank.scaling * (self.lora_b @ self.lora_a)
        dtype = torch.promote_types(updated_OI.dtype, torch.float32)
        norms_2O = torch.stack([torch.linalg.vector_norm(w, dim=1, dtype=dtype) for w in (weight_OI, updated_OI)])
        if self._row_mesh is not None:
            norms_2O = reduce_from_axis(norms_2O.square(), self._row_mesh).sqrt()
        return norms_2O.unbind()

    @torch.no_grad()
    def merge_(self, layer: nn.Module) -> None:
        """Set the weight to `W'`, computed in at least float32, and set B and `d` to zero; see `Adapter.merge_`."""
        weight_OI = layer._parameters["weight"]
        assert weight_OI is not None
        local, (rows, _) = local_region(weight_OI)
        magnitude_O = self.magnitude(layer)
        updated = low_rank_part(weight_OI, self.lora_a, self.lora_b).mul_(self.low_rank.scaling).add_(local)
        scale_O = magnitude_O / row_norms(weight_OI, updated)
        local.copy_(updated.mul_(scale_O[rows, None]))
        self.lora_b.zero_()
        self.magnitude_offset.zero_()

    def magnitude(self, layer: nn.Module) -> Tensor:
        """Return the full magnitudes $m$ [out], in at least float32. Collective if parameters are sharded."""
        weight_OI = layer._parameters["weight"]
        assert weight_OI is not None
        return row_norms(weight_OI) + whole(self.magnitude_offset)

    def tensor_placements(self, weight: Placement) -> Mapping[str, Placement]:
        """See `factor_placements`; `magnitude_offset` is split with the rows of the weight."""
        factors = factor_placements(weight, 2)
        return {**factors, "magnitude_offset": weight} if "lora_b" in factors else factors

    def prepare_tensor(self, weight: Placement, mesh: DeviceMesh) -> None:
        """Store the mesh axis if it splits the rows' elements, to sum squared norms over it."""
        if isinstance(weight, Shard) and weight.dim == 1:
            self._row_mesh = mesh

    def extra_repr(self) -> str:
        """Return the rank, scale and dropout for `print(model)`."""
        return str(self.low_rank)


@final
@dataclass(frozen=True, slots=True)
class DoRA:
    """Method that puts a `DoraAdapter` into each linear layer that a target matches.

    Attributes:
        target: Regular expression, searched in the qualified names of the model's modules, or module types such as
            `nn.Linear`. Matches that are not `nn.Linear`, or that override its forward, are skipped.
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
        check_target(self.target, "DoRA")
        self._low_rank().check("DoRA")
        check_dtype(self.dtype, "DoRA")

    def plan(self, model: nn.Module) -> Plan:
        """Plan a `DoraAdapter` for each layer that matches; see `PeftMethod.plan`."""
        layers, unmatched = find_layers(model, self.target, _is_plain_linear, method="DoRA", expected="nn.Linear")
        low_rank = self._low_rank()
        return Plan(
            claimed=claims(layers, first_names(model)),
            unmatched=unmatched,
            adapters={
                name: DoraAdapter(layer, low_rank, dtype=self.dtype)
                for name, layer in layers.items()
                if isinstance(layer, nn.Linear)
            },
        )

    def _low_rank(self) -> LowRank:
        return LowRank(rank=self.rank, alpha=self.alpha, dropout=self.dropout, rank_stabilized=self.rank_stabilized)


def _is_plain_linear(module: nn.Module) -> bool:
    """Return True for an `nn.Linear` that does not override its forward."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
