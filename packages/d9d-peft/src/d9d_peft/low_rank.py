r"""Low-rank update $s B A$ of a weight (LoRA), or of the direction of its rows (DoRA).

Shape legend: O output features, I input features, R rank. A weight [..., O, I] has factors A [..., R, I] and
B [..., O, R]; leading dims are groups, such as experts.
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
    r"""Rank, scale and dropout of a low-rank update.

    Attributes:
        rank: $r$, the number of rows of A and of columns of B.
        alpha: $\alpha$, numerator of the scale $\alpha / r$.
        dropout: Probability that an input element of the update is zeroed in training.
        rank_stabilized: Use the scale $\alpha / \sqrt r$ instead of $\alpha / r$, which keeps updates of high ranks
            from vanishing (Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA",
            arXiv:2312.03732).
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    rank_stabilized: bool = False

    @property
    def scaling(self) -> float:
        """Scale $s$ of the update."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def check(self, method: str) -> None:
        """Validate the fields.

        Args:
            method: Name of the method, for messages.

        Raises:
            UserError: If a field is out of range.
        """
        if not isinstance(self.rank, int) or self.rank < 1:
            raise UserError(f"{method} got rank = {self.rank!r}; expected an integer of at least 1.")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"{method} got dropout = {self.dropout}; expected 0 <= dropout < 1.")
        if not math.isfinite(self.alpha):
            raise UserError(f"{method} got alpha = {self.alpha}; expected a finite number.")

    def __str__(self) -> str:
        stabilized = ", rank_stabilized=True" if self.rank_stabilized else ""
        return f"rank={self.rank}, alpha={self.alpha}, dropout={self.dropout}{stabilized}"


def adapter_dtype(weight: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of an adapter's parameters: `dtype` if given, else that of the weight, but at least float32.

    In bfloat16, optimizer updates that are small relative to a parameter are lost to rounding.
    """
    return dtype or (torch.float32 if weight.dtype.itemsize < torch.float32.itemsize else weight.dtype)


def check_dtype(dtype: torch.dtype | None, method: str) -> None:
    """Check the dtype of a method's adapters.

    Raises:
        UserError: If it is not a floating-point dtype.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UserError(f"{method} got dtype = {dtype!r}; expected a floating-point dtype, such as torch.float32.")


def new_factors(weight: Tensor, rank: int, dtype: torch.dtype) -> tuple[nn.Parameter, nn.Parameter]:
    """Allocate uninitialized A [..., R, I] and B [..., O, R] for a weight [..., O, I], on its device."""
    *groups, num_outputs, num_inputs = weight.shape
    a_RI = weight.new_empty(*groups, rank, num_inputs, dtype=dtype)
    b_OR = weight.new_empty(*groups, num_outputs, rank, dtype=dtype)
    return nn.Parameter(a_RI), nn.Parameter(b_OR)


def reset_factors(a_RI: Tensor, b_OR: Tensor) -> None:
    """Draw A uniformly from ±1 / sqrt(I), as `nn.Linear` does its weight, and set B to zero, in place."""
    bound = 1 / math.sqrt(a_RI.shape[-1])
    nn.init.uniform_(a_RI, -bound, bound)
    nn.init.zeros_(b_OR)


def factor_placements(weight: Placement, num_dims: int) -> Mapping[str, Placement]:
    """Return the placements of `lora_a` and `lora_b` on a mesh axis, given that of a weight [..., O, I].

    If the weight is split along O, so is B. If it is split along I, so is A, and the update is a partial sum, as is the
    output of the layer. If it is split along groups, so are A and B. A factor without an entry is replicated.

    Args:
        weight: Placement of the weight.
        num_dims: Number of dims of the weight.
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
    """Compute this rank's part of B A for its part of a weight, in at least float32.

    Collective if A and B are sharded: gathers both.
    """
    *groups, rows, columns = local_region(weight)[1]
    a_RI, b_OR = whole(a_RI), whole(b_OR)
    dtype = torch.promote_types(torch.promote_types(weight.dtype, a_RI.dtype), torch.float32)
    return b_OR[(*groups, rows)].to(dtype) @ a_RI[(*groups, slice(None), columns)].to(dtype)
