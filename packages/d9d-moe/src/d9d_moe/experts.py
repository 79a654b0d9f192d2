"""Routed experts of a layer: SwiGLU blocks computed with grouped matrix products."""

from typing import final

from torch import Tensor, nn

from d9d_modules import silu_mul
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
