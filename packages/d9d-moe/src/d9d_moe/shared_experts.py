"""Shared experts, which every token passes through in addition to its routed experts."""

from typing import final

from torch import Tensor, nn

from d9d_modules import Linear, SwiGLU


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
