"""The gated feed-forward block of Llama-style decoders."""

from typing import final

from torch import Tensor, nn
from torch.nn import functional as F

from d9d_modules.linear import Linear


@final
class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))` ("GLU Variants Improve Transformer", arXiv:2002.05202, equation 6).

    Args:
        hidden_size: Size of the last dim of input and output.
        intermediate_size: Size of the gated space between.
        init_std: Standard deviation of the initial weights.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, init_std: float = 0.02) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, init_std=init_std)
        self.up_proj = Linear(hidden_size, intermediate_size, init_std=init_std)
        self.down_proj = Linear(intermediate_size, hidden_size, init_std=init_std)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [..., hidden_size] to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
