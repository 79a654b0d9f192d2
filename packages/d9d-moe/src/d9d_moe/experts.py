"""Experts of a layer: routed ones, computed with grouped matrix products, and shared ones."""

from typing import TypeAlias, final

from torch import Tensor, nn

from d9d_dist import UserError
from d9d_modules import Linear, SwiGLU, silu_mul
from d9d_moe.grouped_linear import GroupedLinear


@final
class GroupedSwiGLU(nn.Module):
    """SwiGLU experts: `down(silu(gate(x)) * up(x))`, with the weights of the expert that each row is assigned to."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, *, init_std: float = 0.02) -> None:
        super().__init__()
        self.gate_proj = GroupedLinear(num_experts, hidden_size, intermediate_size, init_std=init_std)
        self.up_proj = GroupedLinear(num_experts, hidden_size, intermediate_size, init_std=init_std)
        self.down_proj = GroupedLinear(num_experts, intermediate_size, hidden_size, init_std=init_std)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply the experts to rows [N, hidden_size] sorted by expert; shape and dtype are unchanged.

        `counts` [num_experts], integer, is the number of rows per expert; its sum is N.
        """
        return self.down_proj(silu_mul(self.gate_proj(rows, counts), self.up_proj(rows, counts)), counts)


@final
class GroupedClampedSwiGLU(nn.Module):
    """Experts of "gpt-oss" (arXiv:2508.10925), section 2.3: SwiGLU with clamped inputs, a residual, and biases.

    Rows 2 i and 2 i + 1 of `gate_up_proj` are gate and up of feature i, as in the checkpoint: separate parameters could
    only be read row by row.

    Args:
        alpha: Multiplier of the gate inside the sigmoid.
        limit: Largest gate, and largest magnitude of up; see `clamped_swiglu`.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        alpha: float = 1.702,
        limit: float = 7.0,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit
        self.gate_up_proj = GroupedLinear(num_experts, hidden_size, 2 * intermediate_size, bias=True, init_std=init_std)
        self.down_proj = GroupedLinear(num_experts, intermediate_size, hidden_size, bias=True, init_std=init_std)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply the experts to rows [N, hidden_size]; arguments and result as in `GroupedSwiGLU`."""
        gate, up = self.gate_up_proj(rows, counts).unflatten(-1, (-1, 2)).unbind(dim=-1)
        return self.down_proj(clamped_swiglu(gate, up, alpha=self.alpha, limit=self.limit), counts)


Experts: TypeAlias = GroupedSwiGLU | GroupedClampedSwiGLU
"""Experts that `MoELayer` supports."""


@final
class SharedExperts(nn.Module):
    """Shared experts as one `SwiGLU` ("DeepSeekMoE", arXiv:2401.06066, section 3.2), optionally with a sigmoid gate.

    Several shared experts are equal to one of their total intermediate size.

    Args:
        intermediate_size: Total intermediate size of all shared experts.
        is_gated: If True, multiply the output by `sigmoid(x @ gate.T)`, one number per token (Qwen2-MoE).
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, is_gated: bool = False, init_std: float = 0.02
    ) -> None:
        super().__init__()
        self.experts = SwiGLU(hidden_size, intermediate_size, init_std=init_std)
        self.gate = Linear(hidden_size, 1, init_std=init_std) if is_gated else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the shared experts to `x` [..., hidden_size]; the output has the same shape and dtype."""
        y = self.experts(x)
        return y if self.gate is None else y * self.gate(x).sigmoid()


def clamped_swiglu(gate: Tensor, up: Tensor, *, alpha: float, limit: float) -> Tensor:
    """Compute `(up + 1) * gate * sigmoid(alpha * gate)`, with `gate <= limit` and `-limit <= up <= limit`.

    Raises `UserError` if the shapes differ.
    """
    if gate.shape != up.shape:
        raise UserError(f"gate has shape {tuple(gate.shape)}, up has {tuple(up.shape)}; expected the same shape.")
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * (alpha * gate).sigmoid()
