"""Gated feed-forward blocks: SwiGLU (Llama) and GeGLU (Gemma, ModernBERT)."""

from abc import ABC, abstractmethod
from typing import Literal, TypeAlias, final

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from d9d_dist import ColumnParallel, RowParallel, TensorRegion, TensorStyle, UserError
from d9d_dist.errors import check_choice
from d9d_modules.kernel_choice import has_kernel
from d9d_modules.linear import Linear

GeluForm: TypeAlias = Literal["tanh", "none"]
"""GELU with the tanh approximation, or exact; named as in `torch.nn.functional.gelu`."""


class GatedBlock(nn.Module, ABC):
    """Feed-forward block with a gate, `down(gated(gate(x), up(x)))`. Base class of the blocks below."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False, init_std: float = 0.02) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=bias, init_std=init_std)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias, init_std=init_std)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, init_std=init_std)

    @abstractmethod
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine the outputs of both input projections."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to `x` [..., hidden_size]; the shape is unchanged."""
        return self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)))

    def tensor_plan(self, name: str, *, sequence_parallel: bool = False) -> dict[str, TensorStyle]:
        """See `HasTensorPlan`; by intermediate features."""
        activation = Shard(1) if sequence_parallel else Replicate()
        return {
            name: TensorRegion(input=activation),
            f"{name}.gate_proj": ColumnParallel(input=None),
            f"{name}.up_proj": ColumnParallel(input=None),
            f"{name}.down_proj": RowParallel(output=activation),
        }


@final
class SwiGLU(GatedBlock):
    """SwiGLU block `down(silu(gate(x)) * up(x))` ("GLU Variants Improve Transformer", arXiv:2002.05202, equation 6)."""

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `silu_mul`."""
        return silu_mul(gate, up)


@final
class GeGLU(GatedBlock):
    """GeGLU block `down(gelu(gate(x)) * up(x))` (arXiv:2002.05202, equation 6).

    Args:
        approximate: Form of GELU: "tanh" (Gemma) or "none" (ModernBERT).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        approximate: GeluForm = "tanh",
        bias: bool = False,
        init_std: float = 0.02,
    ) -> None:
        check_choice("approximate", approximate, GeluForm)
        super().__init__(hidden_size, intermediate_size, bias=bias, init_std=init_std)
        self.approximate: GeluForm = approximate

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute `gelu(gate) * up`."""
        return F.gelu(gate, approximate=self.approximate) * up


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `silu(gate) * up` of two tensors of the same shape and floating-point dtype.

    On accelerators forward and backward are one fused Triton kernel each, computed in float32 and rounded once.

    Raises:
        UserError: If shapes or dtypes differ.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise UserError(
            f"gate has shape {tuple(gate.shape)} and dtype {gate.dtype}, up has {tuple(up.shape)} and {up.dtype}; "
            "expected the same shape and dtype."
        )
    if has_kernel(gate):
        from d9d_modules import _triton_silu_mul  # noqa: PLC0415  (Triton is optional)

        return _triton_silu_mul.silu_mul(gate, up)
    return F.silu(gate) * up
