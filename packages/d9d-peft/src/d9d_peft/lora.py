r"""Low-rank adaptation of linear layers.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (https://arxiv.org/abs/2106.09685), equation 3:
$h = W x + \frac{\alpha}{r} B A x$, where $W$ stays as it is.
"""

import math
import re
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist import UserError
from d9d_peft._pattern import check_pattern, shorten
from d9d_peft.method import Plan, Replacement, first_names
from d9d_state import keep, parallel, rename


@final
class LoraLinear(nn.Module):
    """A linear layer with a trainable low-rank update beside it.

    It starts as the layer it wraps, because `lora_b` starts at zero.

    Attributes:
        base: The wrapped layer, `nn.Linear(in, out)`.
        lora_a: $A$, of shape [rank, in].
        lora_b: $B$, of shape [out, rank].
        rank: Rank of the update.
        alpha: What the update is scaled by, times the rank.
        dropout: Probability that an input of the update is zeroed while training.
    """

    def __init__(self, base: nn.Linear, *, rank: int, alpha: float, dropout: float = 0.0) -> None:
        """Wrap a layer; the new parameters are on its device and of its dtype.

        Args:
            base: The layer to wrap; it is kept, not copied.
            rank: Rank of the update.
            alpha: Scale of the update, times the rank.
            dropout: Probability that an input of the update is zeroed while training.
        """
        super().__init__()
        self.base = base
        self.rank = rank
        self.alpha = alpha
        self.dropout = dropout
        self.lora_a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_empty(base.out_features, rank))
        self.reset_parameters()

    @property
    def scaling(self) -> float:
        """The factor alpha / rank."""
        return self.alpha / self.rank

    def reset_parameters(self) -> None:
        """Set A as a linear layer's weight is set (uniform within 1 / sqrt(in)) and B to zero."""
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer and its update.

        Args:
            x: [..., in].

        Returns:
            [..., out].
        """
        low = F.linear(F.dropout(x, self.dropout, self.training), self.lora_a)
        return self.base(x) + self.scaling * F.linear(low, self.lora_b)

    @torch.no_grad()
    def merge_adapter(self) -> None:
        """Add the update to the base weight, in place, and set B to zero: the same function, but for rounding.

        The update is computed in float32 at least. Sharded parameters stay sharded; A is gathered for a moment.
        """
        dtype = torch.promote_types(self.lora_a.dtype, torch.float32)
        self.base.weight.add_(self.lora_b.to(dtype) @ self.lora_a.to(dtype), alpha=self.scaling)
        self.lora_b.zero_()

    def extra_repr(self) -> str:
        """What `print(model)` says."""
        return f"rank={self.rank}, alpha={self.alpha}, dropout={self.dropout}"


@final
@dataclass(frozen=True, slots=True)
class LoRA:
    """Trains a low-rank update of every linear layer whose name a pattern is found in.

    Attributes:
        pattern: Regular expression, searched in the qualified names of the model's modules: `r"attn.[qkvo]_proj$"`.
            Modules that are no `nn.Linear` are passed over.
        rank: Rank of each update.
        alpha: Scale of each update, times the rank.
        dropout: Probability that an input of an update is zeroed while training.
    """

    pattern: str
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            UserError: If a number is out of range or the pattern is no regular expression.
        """
        if self.rank < 1:
            raise UserError(f"LoRA got rank = {self.rank}; expected at least 1.")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"LoRA got dropout = {self.dropout}; expected 0 <= dropout < 1.")
        check_pattern(self.pattern, "LoRA")

    def plan(self, model: nn.Module) -> Plan:
        """Replace each linear layer that matches by a `LoraLinear` around it.

        Raises:
            UserError: If no linear layer matches, or the model has LoRA layers already.
        """
        injected = [name for name, module in model.named_modules() if isinstance(module, LoraLinear)]
        if injected:
            raise UserError(
                f"{injected[0]} is a LoRA layer already; inject one Stack of methods instead of two methods."
            )
        linears = self._matches(model)
        if not linears:
            raise UserError(self._matches_no_linear(model))
        wrapped = {id(linear): self._replacement(linear) for linear in linears.values()}
        first = first_names(model)
        return Plan(
            claimed=frozenset(
                first[f"{name}.{parameter}"]
                for name, linear in linears.items()
                for parameter, _ in linear.named_parameters()
            ),
            replacements={name: wrapped[id(linear)] for name, linear in linears.items()},
        )

    def _matches(self, model: nn.Module) -> dict[str, nn.Linear]:
        return {
            name: module
            for name, module in model.named_modules(remove_duplicate=False)
            # The model itself has no name, and nothing holds it in which it could be replaced.
            if name and isinstance(module, nn.Linear) and re.search(self.pattern, name)
        }

    def _replacement(self, linear: nn.Linear) -> Replacement:
        module = LoraLinear(linear, rank=self.rank, alpha=self.alpha, dropout=self.dropout)
        moved = [rename(name, f"base.{name}") for name in linear.state_dict(keep_vars=True)]
        new = ("lora_a", "lora_b")
        return Replacement(module=module, mapper=parallel(*moved, keep(*new)), trainable=new)

    def _matches_no_linear(self, model: nn.Module) -> str:
        modules = [(name, module) for name, module in model.named_modules() if name]
        others = [f"{name} ({type(module).__name__})" for name, module in modules if re.search(self.pattern, name)]
        linears = [name for name, module in modules if isinstance(module, nn.Linear)]
        found = f"only {shorten(others)}" if others else "no module"
        return (
            f"LoRA got the pattern {self.pattern!r}, which matches {found}; expected nn.Linear layers. "
            f"This model has {shorten(linears)}."
        )
