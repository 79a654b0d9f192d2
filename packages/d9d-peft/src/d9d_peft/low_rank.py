r"""A trained matrix of low rank, $s B A$: what LoRA adds to a weight, and DoRA to a weight's direction.

Shape legend: O output features, I input features, R rank. A weight [..., O, I] has factors A [..., R, I] and
B [..., O, R]; dims before are those of groups, such as experts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard

from d9d_dist import UserError
from d9d_peft._sharded import local_region, whole


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    r"""The size and the scale of a low-rank matrix.

    Attributes:
        rank: $r$, the number of rows of A and of columns of B.
        alpha: $\alpha$, what the matrix is scaled by, times `rank` or its square root.
        dropout: Probability that an input of the matrix is zeroed while training.
        rank_stabilized: Whether the scale is $\alpha / \sqrt r$, which keeps updates of high ranks from vanishing
            (Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", arXiv:2312.03732), and not
            $\alpha / r$.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    rank_stabilized: bool = False

    @property
    def scaling(self) -> float:
        """The scale $s$."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def check(self, method: str) -> None:
        """Refuse what cannot be.

        Raises:
            UserError: Naming the method and the number that is out of range.
        """
        if not isinstance(self.rank, int) or self.rank < 1:
            raise UserError(f"{method} got rank = {self.rank!r}; expected a whole number, at least 1.")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"{method} got dropout = {self.dropout}; expected 0 <= dropout < 1.")
        if not math.isfinite(self.alpha):
            raise UserError(f"{method} got alpha = {self.alpha}; expected a finite number.")

    def __str__(self) -> str:
        stabilized = ", rank_stabilized=True" if self.rank_stabilized else ""
        return f"rank={self.rank}, alpha={self.alpha}, dropout={self.dropout}{stabilized}"


def adapter_dtype(weight: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of an adapter's parameters: the one that was asked for, or that of the weight, but float32 at least.

    An update that is small against a parameter is lost when the parameter is rounded to bfloat16.
    """
    return dtype or (torch.float32 if weight.dtype.itemsize < torch.float32.itemsize else weight.dtype)


def check_dtype(dtype: torch.dtype | None, method: str) -> None:
    """Refuse a dtype that gradients cannot have.

    Raises:
        UserError: Naming the method and the dtype.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UserError(f"{method} got dtype = {dtype!r}; expected a floating-point dtype, such as torch.float32.")


def new_factors(weight: Tensor, rank: int, dtype: torch.dtype) -> tuple[nn.Parameter, nn.Parameter]:
    """A and B for a weight [..., O, I], unset, on its device."""
    *groups, num_outputs, num_inputs = weight.shape
    a_RI = weight.new_empty(*groups, rank, num_inputs, dtype=dtype)
    b_OR = weight.new_empty(*groups, num_outputs, rank, dtype=dtype)
    return nn.Parameter(a_RI), nn.Parameter(b_OR)


def reset_factors(a_RI: Tensor, b_OR: Tensor) -> None:
    """Set A as the weight of a linear layer is set, uniform within 1 / sqrt(I), and B to zero, in place."""
    bound = 1 / math.sqrt(a_RI.shape[-1])
    nn.init.uniform_(a_RI, -bound, bound)
    nn.init.zeros_(b_OR)


def factor_placements(weight: Placement, num_dims: int) -> Mapping[str, Placement]:
    """How `lora_a` and `lora_b` are split with a weight [..., O, I] of so many dims.

    Split on O, B is; split on I, A is, and what comes out is a part of a sum, as it is of the layer itself; split on
    groups, both are.
    """
    if not isinstance(weight, Shard):
        return {}
    match weight.dim % num_dims - num_dims:
        case -2:
            return {"lora_b": weight}
        case -1:
            return {"lora_a": weight}
        case _:
            return {"lora_a": weight, "lora_b": weight}


@torch.no_grad()
def low_rank_part(weight: Tensor, a_RI: Tensor, b_OR: Tensor) -> Tensor:
    """What of B A belongs to this rank's part of a weight, in float32 at least. Gathers A and B: collective."""
    *groups, rows, columns = local_region(weight)[1]
    a_RI, b_OR = whole(a_RI), whole(b_OR)
    dtype = torch.promote_types(torch.promote_types(weight.dtype, a_RI.dtype), torch.float32)
    return b_OR[(*groups, rows)].to(dtype) @ a_RI[(*groups, slice(None), columns)].to(dtype)
