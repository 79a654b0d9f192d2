"""Routed experts of a layer: SwiGLU blocks computed with grouped matrix products."""

from typing import final

from torch import Tensor, nn

from d9d_modules import silu_mul
from d9d_moe.grouped_linear import GroupedLinear


@final
class GroupedSwiGLU(nn.Module):
    """SwiGLU experts: `down(silu(gate(x)) * up(x))`, with the weights of the expert that each row is assigned to.

    Args:
        num_experts: Number of experts.
        hidden_size: Size of the last dim of input and output.
        intermediate_size: Intermediate size of each expert.
        init_std: Standard deviation of the initial weights.
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, *, init_std: float = 0.02) -> None:
        super().__init__()
        self.gate_proj = GroupedLinear(num_experts, hidden_size, intermediate_size, init_std=init_std)
        self.up_proj = GroupedLinear(num_experts, hidden_size, intermediate_size, init_std=init_std)
        self.down_proj = GroupedLinear(num_experts, intermediate_size, hidden_size, init_std=init_std)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply each row's expert.

        Args:
            rows: Rows [N, hidden_size], sorted by expert.
            counts: Number of rows per expert [num_experts], integer; the sum is N.

        Returns:
            Rows [N, hidden_size], in the same order and dtype.
        """
        return self.down_proj(silu_mul(self.gate_proj(rows, counts), self.up_proj(rows, counts)), counts)
