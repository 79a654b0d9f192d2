"""Experts that every token passes through, beside those that a router chooses."""

from typing import final

from torch import Tensor, nn

from d9d_modules import Linear, SwiGLU


@final
class SharedExperts(nn.Module):
    """A `SwiGLU` for all tokens ("DeepSeekMoE", arXiv:2401.06066, section 3.2), with a gate if asked for.

    Several shared experts are one of their joint size.

    Args:
        hidden_size: Size of the last dim of input and output.
        intermediate_size: Size of the gated space of all shared experts together.
        is_gated: Whether the output is multiplied by `sigmoid(x @ gate.T)`, one number for each token (Qwen2-MoE).
        init_std: Standard deviation of the initial weights.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, is_gated: bool = False, init_std: float = 0.02
    ) -> None:
        super().__init__()
        self.experts = SwiGLU(hidden_size, intermediate_size, init_std=init_std)
        self.gate = Linear(hidden_size, 1, init_std=init_std) if is_gated else None

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [..., hidden_size] to the same shape and dtype."""
        y = self.experts(x)
        return y if self.gate is None else y * self.gate(x).sigmoid()
