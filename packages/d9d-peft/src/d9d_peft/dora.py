r"""DoRA: a low-rank update of the direction of each weight row, and a trained magnitude of each row.

Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation" (https://arxiv.org/abs/2402.09353), equation 5: $W' = m
\frac{W + s B A}{\lVert W + s B A \rVert}$, with a magnitude $m$ and a norm per row (output feature). As in the paper's
section 4.3, backward treats the norm as a constant.

There are two differences from the paper. First, the trained parameter is the offset $d$ of $m = \lVert W \rVert + d$.
It starts at zero, so its initialization does not need the weight. The gradients of $d$ and $m$ are equal, but weight
decay pulls $m$ to its initial value. Second, dropout is applied only to the input of $B A$, as in LoRA.

Shape legend: O output features, I input features. A grouped layer (experts) has weights [G, O, I]: each expert has a
matrix of its own. N input rows of all groups.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.nn import functional as F

from d9d_dist import full_tensor, local_region, local_tensor, reduce_from_axis
from d9d_dist.values.parameter_role import ParameterRole
from d9d_peft._grouped import Product, grouped_product
from d9d_peft.all_linear import is_linear, weight_of
from d9d_peft.low_rank import LowRank, LowRankAdapter, LowRankMethod


@final
class DoraAdapter(LowRankAdapter):
    """Adapter that updates direction and magnitude of a layer's weight rows, initially without effect.

    In a grouped layer, all parameters have a leading dim of groups.

    Attributes:
        lora_a: $A$ [rank, in].
        lora_b: $B$ [out, rank], initially zero.
        magnitude_offset: $d$ [out]: magnitude of each row minus the norm of the base weight's row; initially zero.
    """

    parameter_roles: ClassVar[Mapping[str, ParameterRole]] = MappingProxyType({"magnitude_offset": "vector"})

    def __init__(self, layer: nn.Module, low_rank: LowRank, *, dtype: torch.dtype | None = None) -> None:
        """Create an adapter for a layer that `DoRA` supports, on the device of the layer's weight.

        `dtype` is the dtype of the adapter's parameters; `None` for the dtype of the weight, but at least float32.
        """
        weight = weight_of(layer)
        super().__init__(weight, low_rank, dtype)
        self.magnitude_offset = nn.Parameter(self.lora_b.new_empty(weight.shape[:-1]))
        self._row_mesh: DeviceMesh | None = None
        self.reset_parameters()

    def forward(self, layer: nn.Module, inner: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Compute `m / ||W + s B A|| * (W x + s B A x)` plus the bias; see `Adapter.forward`.

        If tensor parallelism splits the input features: one all-reduce of squared norms [2, out].
        """
        (x, *rest) = args
        weight_OI, bias_O = weight_of(layer), layer._parameters.get("bias")
        product = grouped_product(layer)
        if product is not None:
            return self._grouped(product, weight_OI, x, *rest)
        dropped = F.dropout(x.to(self.lora_a.dtype), self.low_rank.dropout, self.training)
        update = F.linear(F.linear(dropped, self.lora_a), self.lora_b)
        base = F.linear(x, weight_OI)
        y = self._row_scale(weight_OI).to(update.dtype) * (base + self.low_rank.scaling * update)
        return (y if bias_O is None else y + bias_O).to(base.dtype)

    def _grouped(self, product: Product, weight_GOI: Tensor, x_NI: Tensor, counts_G: Tensor) -> Tensor:
        dropped = F.dropout(x_NI, self.low_rank.dropout, self.training)
        reduced = product(dropped, self.lora_a.to(x_NI.dtype), counts_G)
        update = product(reduced, self.lora_b.to(x_NI.dtype), counts_G)
        base = product(x_NI, weight_GOI, counts_G)
        scale_NO = self._row_scale(weight_GOI).repeat_interleave(counts_G, dim=0, output_size=len(x_NI))
        return (scale_NO * (base + self.low_rank.scaling * update)).to(base.dtype)

    def _row_scale(self, weight_OI: Tensor) -> Tensor:
        """Compute `m / ||W + s B A||` [out], in at least float32."""
        base_O, updated_O = self._norms(weight_OI)
        return _quotient(base_O + self.magnitude_offset, updated_O)

    @torch.no_grad()
    def _norms(self, weight_OI: Tensor) -> tuple[Tensor, ...]:
        """Compute the norms of the rows of W [out] and of W + s B A [out], in at least float32."""
        updated_OI = weight_OI + self.low_rank.scaling * (self.lora_b @ self.lora_a)
        dtype = torch.promote_types(updated_OI.dtype, torch.float32)
        norms_2O = torch.stack([torch.linalg.vector_norm(w, dim=-1, dtype=dtype) for w in (weight_OI, updated_OI)])
        if self._row_mesh is not None:
            norms_2O = reduce_from_axis(norms_2O.square(), self._row_mesh).sqrt()
        return norms_2O.unbind()

    @torch.no_grad()
    def merge_(self, layer: nn.Module) -> None:
        """Set the weight to `W'`, computed in at least float32, and set B and `d` to zero; see `Adapter.merge_`."""
        weight_OI = weight_of(layer)
        local, (*rows, _) = local_tensor(weight_OI), local_region(weight_OI).slices
        updated = self._update_part(weight_OI).mul_(self.low_rank.scaling).add_(local)
        scale_O = _quotient(self.magnitude(layer), row_norms(weight_OI, updated))
        local.copy_(updated.mul_(scale_O[tuple(rows)].unsqueeze(-1)))
        self.lora_b.zero_()
        self.magnitude_offset.zero_()

    def magnitude(self, layer: nn.Module) -> Tensor:
        """Return the full magnitudes $m$ [out], in at least float32. Collective if parameters are sharded."""
        return row_norms(weight_of(layer)) + full_tensor(self.magnitude_offset)

    def prepare_tensor(self, weight: Placement, mesh: DeviceMesh) -> None:
        """Keep the mesh axis if it splits the input features: squared norms are then summed over the axis."""
        if isinstance(weight, Shard) and weight.dim == self.lora_a.ndim - 1:
            self._row_mesh = mesh


@final
@dataclass(frozen=True, slots=True)
class DoRA(LowRankMethod):
    """Method that puts a `DoraAdapter` into each linear layer and each layer of experts that a target matches.

    Attributes:
        target: Regular expression, searched in the qualified names of the model's modules, or module types such as
            `nn.Linear`. Matches that are neither `nn.Linear`, the `Conv1D` of `transformers` nor
            `d9d_moe.GroupedLinear`, or that compute anything else than `nn.Linear`, are skipped.
        rank, alpha, dropout, rank_stabilized, dtype: See `LoRA`.
    """

    _make_adapter = DoraAdapter
    _expected = "nn.Linear or d9d_moe.GroupedLinear"

    def _supports(self, layer: nn.Module) -> bool:
        return is_linear(layer) or grouped_product(layer) is not None


def _quotient(magnitude_O: Tensor, norm_O: Tensor) -> Tensor:
    """Return magnitude / norm; 1 for rows of zeros, such as the initial ones of a gate, so that they can be trained."""
    return (magnitude_O / norm_O.where(norm_O > 0, 1.0)).where(norm_O > 0, 1.0)


@torch.no_grad()
def row_norms(weight_OI: Tensor, part: Tensor | None = None) -> Tensor:
    """Compute the norms [..., O] of the full rows of a weight [..., O, I] on all ranks, in at least float32.

    `part` replaces the values of this rank's part of the weight. Collective over the mesh of a sharded weight: one
    all-reduce of [..., O] per mesh axis that shards it.
    """
    values, (*rows, _) = local_tensor(weight_OI) if part is None else part, local_region(weight_OI).slices
    dtype = torch.promote_types(values.dtype, torch.float32)
    squares_O = torch.zeros(weight_OI.shape[:-1], dtype=dtype, device=values.device)
    squares_O[tuple(rows)] = torch.linalg.vector_norm(values, dim=-1, dtype=dtype).square()
    if isinstance(weight_OI, DTensor):
        for axis, placement in enumerate(weight_OI.placements):
            if not placement.is_replicate():
                dist.all_reduce(squares_O, group=weight_OI.device_mesh.get_group(axis))
    return squares_O.sqrt()
