r"""Low-rank adaptation of the direction of a linear layer's rows, with their lengths trained apart.

Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation" (https://arxiv.org/abs/2402.09353), equation 5:
$W' = m \frac{W + s B A}{\lVert W + s B A \rVert}$, with a length $m$ and a norm for each row (an output feature). As in
the paper's section 4.3 the norm counts as a constant in backward.

Two things differ. What is trained is $d$ of $m = \lVert W \rVert + d$, which starts at zero and so needs no weight to
start from: gradients are those of $m$, but weight decay pulls $m$ to the length it had. And dropout acts on the input
of $B A$ alone, as in LoRA.

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

from d9d_dist import sum_partial
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
    """Turns the rows of a linear layer's weight by a low-rank product, and changes their lengths.

    It starts as nothing, because `lora_b` and `magnitude_offset` start at zero.

    Attributes:
        lora_a: $A$, of shape [rank, in].
        lora_b: $B$, of shape [out, rank].
        magnitude_offset: $d$, of shape [out]: how much longer each row is than the base weight's.
        low_rank: Rank and scale.
    """

    def __init__(self, layer: nn.Linear, low_rank: LowRank, *, dtype: torch.dtype | None = None) -> None:
        """Make an adapter for a layer, on the device of the layer's weight.

        Args:
            layer: The layer, whose forward is that of `nn.Linear`.
            low_rank: Rank and scale.
            dtype: The dtype of its parameters; `None` for that of the weight, but float32 at least.
        """
        super().__init__()
        self.low_rank = low_rank
        dtype = adapter_dtype(layer.weight, dtype)
        self.lora_a, self.lora_b = new_factors(layer.weight, low_rank.rank, dtype)
        self.magnitude_offset = nn.Parameter(layer.weight.new_empty(layer.out_features, dtype=dtype))
        self._row_mesh: DeviceMesh | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set A as a linear layer's weight is set (uniform within 1 / sqrt(in)), B and the lengths' change to zero."""
        reset_factors(self.lora_a, self.lora_b)
        nn.init.zeros_(self.magnitude_offset)

    def forward(self, layer: nn.Module, inner: Callable[..., Tensor], *args: Any) -> Tensor:
        """`m / ||W + s B A|| * (W x + s B A x)` and the bias; see `Adapter.forward`.

        Where tensor parallelism splits inputs, norms are summed over ranks: one all-reduce of [2, out].
        """
        (x,) = args
        weight_OI, bias_O = layer._parameters["weight"], layer._parameters["bias"]
        assert weight_OI is not None
        dropped = F.dropout(x.to(self.lora_a.dtype), self.low_rank.dropout, self.training)
        update = F.linear(F.linear(dropped, self.lora_a), self.lora_b)
        straight = F.linear(x, weight_OI)
        y = self._stretch(weight_OI).to(update.dtype) * (straight + self.low_rank.scaling * update)
        return (y if bias_O is None else y + bias_O).to(straight.dtype)

    def _stretch(self, weight_OI: Tensor) -> Tensor:
        """`m / ||W + s B A||` [out], in float32 at least."""
        initial_O, turned_O = self._norms(weight_OI)
        return (initial_O + self.magnitude_offset) / turned_O

    @torch.no_grad()
    def _norms(self, weight_OI: Tensor) -> tuple[Tensor, ...]:
        """The norms of the rows of W and of W + s B A, in float32 at least."""
        turned_OI = weight_OI + self.low_rank.scaling * (self.lora_b @ self.lora_a)
        dtype = torch.promote_types(turned_OI.dtype, torch.float32)
        norms_2O = torch.stack([torch.linalg.vector_norm(w, dim=1, dtype=dtype) for w in (weight_OI, turned_OI)])
        if self._row_mesh is not None:
            norms_2O = sum_partial(norms_2O.square(), self._row_mesh).sqrt()
        return norms_2O.unbind()

    @torch.no_grad()
    def merge_(self, layer: nn.Module) -> None:
        """Make the weight `W'`, computed in float32 at least, and set B and `d` to zero; see `Adapter.merge_`."""
        weight_OI = layer._parameters["weight"]
        assert weight_OI is not None
        local, (rows, _) = local_region(weight_OI)
        magnitude_O = self.magnitude(layer)
        turned = low_rank_part(weight_OI, self.lora_a, self.lora_b).mul_(self.low_rank.scaling).add_(local)
        stretch_O = magnitude_O / row_norms(weight_OI, turned)
        local.copy_(turned.mul_(stretch_O[rows, None]))
        self.lora_b.zero_()
        self.magnitude_offset.zero_()

    def magnitude(self, layer: nn.Module) -> Tensor:
        """The lengths $m$ of the rows [out], whole, in float32 at least. Collective where parameters are sharded."""
        weight_OI = layer._parameters["weight"]
        assert weight_OI is not None
        return row_norms(weight_OI) + whole(self.magnitude_offset)

    def tensor_placements(self, weight: Placement) -> Mapping[str, Placement]:
        """See `factor_placements`; lengths are split with rows."""
        factors = factor_placements(weight, 2)
        return {**factors, "magnitude_offset": weight} if "lora_b" in factors else factors

    def prepare_tensor(self, weight: Placement, mesh: DeviceMesh) -> None:
        """Remember the ranks that each hold a part of every row."""
        if isinstance(weight, Shard) and weight.dim == 1:
            self._row_mesh = mesh

    def extra_repr(self) -> str:
        """What `print(model)` says."""
        return str(self.low_rank)


@final
@dataclass(frozen=True, slots=True)
class DoRA:
    """Trains a low-rank turn, and the lengths of the rows, of every linear layer that a target matches.

    Attributes:
        target: Regular expression, searched in the qualified names of the model's modules; or types of modules:
            `nn.Linear`. What matches and is no such layer is passed over, as are layers with a forward of their own.
        rank: Rank of each turn.
        alpha: Scale of each turn, times the rank or its square root.
        dropout: Probability that an input of a turn is zeroed while training.
        rank_stabilized: Whether turns are scaled by alpha / sqrt(rank), and not by alpha / rank; see `LowRank`.
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
        check_target(self.target, "DoRA")
        self._low_rank().check("DoRA")
        check_dtype(self.dtype, "DoRA")

    def plan(self, model: nn.Module) -> Plan:
        """Put a `DoraAdapter` into each layer that matches."""
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
    """Whether a module computes what DoRA takes the place of."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
