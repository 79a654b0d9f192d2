r"""Low-rank update $s B A$ of a weight (LoRA), or of the direction of its rows (DoRA).

Shape legend: O output features, I input features, R rank. A weight [..., O, I] has factors A [..., R, I] and
B [..., O, R]; leading dims are groups, such as experts.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard

from d9d_dist import UserError, full_tensor, local_region
from d9d_dist.errors import shorten
from d9d_peft._targets import Target, check_target, describe, is_target, refuse_layers
from d9d_peft.adapter import Adapter
from d9d_peft.method import Plan
from d9d_state.module_tensors import aliases


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    r"""Rank, scale and dropout of a low-rank update.

    Attributes:
        rank: $r$, the number of rows of A and of columns of B.
        alpha: $\alpha$, numerator of the scale $\alpha / r$.
        dropout: Probability that an input element of the update is zeroed in training.
        rank_stabilized: True for the scale $\alpha / \sqrt r$ instead of $\alpha / r$. Updates of high ranks then do
            not vanish (Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA",
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
        """Raise `UserError` if a field is out of range. `method` is the method's name, for the message."""
        if not isinstance(self.rank, int) or self.rank < 1:
            raise UserError(f"{method} got rank = {self.rank!r}; expected an integer of at least 1.")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"{method} got dropout = {self.dropout}; expected 0 <= dropout < 1.")
        if not math.isfinite(self.alpha):
            raise UserError(f"{method} got alpha = {self.alpha}; expected a finite number.")

    def __str__(self) -> str:
        stabilized = ", rank_stabilized=True" if self.rank_stabilized else ""
        return f"rank={self.rank}, alpha={self.alpha}, dropout={self.dropout}{stabilized}"


class LowRankAdapter(Adapter, ABC):
    """Base class of adapters with factors `lora_a` [..., R, I] and `lora_b` [..., O, R] for a weight [..., O, I]."""

    def __init__(self, weight: Tensor, low_rank: LowRank, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.low_rank, self.dropout = low_rank, low_rank.dropout
        if dtype is None:  # bfloat16 loses optimizer updates that are small relative to a parameter
            dtype = torch.float32 if weight.dtype.itemsize < torch.float32.itemsize else weight.dtype
        *groups, num_outputs, num_inputs = weight.shape
        device = weight.device
        self.lora_a = nn.Parameter(torch.empty(*groups, low_rank.rank, num_inputs, dtype=dtype, device=device))
        self.lora_b = nn.Parameter(torch.empty(*groups, num_outputs, low_rank.rank, dtype=dtype, device=device))

    def reset_parameters(self) -> None:
        """Draw A uniformly from ±1 / sqrt(I), like the weight of `nn.Linear`, and set the others to zero, in place."""
        for name, parameter in self._parameters.items():
            if parameter is None or parameter.is_meta:  # torch computes operators on meta tensors slowly, in Python
                continue
            if name == "lora_a":
                bound = 1 / math.sqrt(parameter.shape[-1])
                parameter.detach().uniform_(-bound, bound)  # faster than `no_grad` for few small parameters
            else:
                parameter.detach().zero_()

    def tensor_placements(self, weight: Placement) -> Mapping[str, Placement]:
        """Return the placements of the parameters on a mesh axis, given the placement of a weight [..., O, I].

        If the weight is split along O, so are B and other parameters. If the weight is split along I, so is A; the
        update and the layer's output are then partial sums. If the weight is split along groups, so are all. A
        parameter without an entry is replicated.
        """
        if not isinstance(weight, Shard):
            return {}
        names = [name for name, _ in self.named_parameters()]
        match weight.dim % self.lora_a.ndim - self.lora_a.ndim:
            case -2:
                names.remove("lora_a")
            case -1:
                names = ["lora_a"]
        return dict.fromkeys(names, weight)

    @torch.no_grad()
    def _update_part(self, weight: Tensor) -> Tensor:
        """Compute this rank's part of B A, in at least float32. Collective if A and B are sharded: all-gathers."""
        *groups, rows, columns = local_region(weight).slices
        a_RI, b_OR = full_tensor(self.lora_a), full_tensor(self.lora_b)
        dtype = torch.promote_types(torch.promote_types(weight.dtype, a_RI.dtype), torch.float32)
        return b_OR[(*groups, rows)].to(dtype) @ a_RI[(*groups, slice(None), columns)].to(dtype)

    @final
    def extra_repr(self) -> str:
        """Return the rank, scale and dropout for `print(model)`."""
        return str(self.low_rank)


@dataclass(frozen=True, slots=True)
class LowRankMethod(ABC):
    """Base class of the methods that put a low-rank adapter into each layer that a target matches; see `LoRA`."""

    _expected: ClassVar[str]
    """The supported layers, for messages."""

    _make_adapter: ClassVar[Callable[..., Adapter]]
    """Type of the adapters."""

    target: Target
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    rank_stabilized: bool = False
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Raise `UserError` if a field is invalid."""
        method = type(self).__name__
        check_target(self.target, method)
        self._low_rank().check(method)
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise UserError(
                f"{method} got dtype = {self.dtype!r}; expected a floating-point dtype, such as torch.float32."
            )

    @abstractmethod
    def _supports(self, layer: nn.Module) -> bool:
        """Return True if the method can adapt a layer."""

    def plan(self, model: nn.Module) -> Plan:
        """Plan an adapter for each matching layer; see `PeftMethod.plan`."""
        method, modules = type(self).__name__, dict(model.named_modules())
        first = aliases(dict(model.named_parameters(remove_duplicate=False)))
        found = {name: module for name, module in modules.items() if is_target(self.target, name, module)}
        layers = {name: module for name, module in found.items() if self._supports(module)}
        refuse_layers(layers, modules, method)
        own = [
            f"{name}.{each}".lstrip(".")
            for name, layer in layers.items()
            for each, value in layer._parameters.items()
            if value is not None
        ]
        make, low_rank = type(self)._make_adapter, self._low_rank()
        return Plan(
            claimed=frozenset(first[name] for name in own),
            unmatched=() if layers else (self._explain(found, modules),),
            adapters={name: make(layer, low_rank, dtype=self.dtype) for name, layer in layers.items()},
        )

    def _explain(self, found: Mapping[str, nn.Module], modules: Mapping[str, nn.Module]) -> str:
        others = shorten([f"{name} ({type(module).__name__})" for name, module in found.items()])
        fitting = shorten([name for name, module in modules.items() if self._supports(module)])
        return (
            f"{type(self).__name__} got {describe(self.target)}, which matches "
            f"{f'only {others}' if found else 'no module'}; expected {self._expected}. This model has {fitting}."
        )

    def _low_rank(self) -> LowRank:
        return LowRank(rank=self.rank, alpha=self.alpha, dropout=self.dropout, rank_stabilized=self.rank_stabilized)
