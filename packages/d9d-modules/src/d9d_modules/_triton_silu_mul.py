"""`silu(gate) * up` as one fused Triton kernel forward and one backward; each element is read and written once.

Arithmetic is in float32; 16-bit dtypes are used only for loads and stores. Forward saves only its two inputs.
"""

# Kernel arguments are positional pointers and numbers without Python types.
# ruff: noqa: ANN001, ANN202, PLR0917

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from d9d_dist.gradients.first_derivative import first_derivative_only
from d9d_modules.triton_jit import jit

_BLOCK = 4096
"""Number of elements per program."""


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `silu(gate) * up` for tensors of equal shape and dtype (float32, bfloat16, float16), with any strides."""
    product: Tensor = _SiluMul.apply(gate, up)
    return product


class _SiluMul(torch.autograd.Function):
    """`silu(gate) * up`; without weights, a split backward has nothing to defer."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        if out.numel():
            _forward_kernel[_grid(out)](gate, up, out, out.numel(), BLOCK=_BLOCK, num_warps=8)
        return out

    @staticmethod
    @first_derivative_only("the Triton kernel of SiLU")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        if gate.numel():
            _backward_kernel[_grid(gate)](
                gradients[0].contiguous(), gate, up, grad_gate, grad_up, gate.numel(), BLOCK=_BLOCK, num_warps=8
            )
        return grad_gate, grad_up


def _grid(x: Tensor) -> tuple[int]:
    return (-(-x.numel() // _BLOCK),)


@jit
def _forward_kernel(gate_ptr, up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    # 32-bit offsets would overflow for tensors of 2 ** 31 elements or more.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _backward_kernel(grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    # d silu(g) / dg = sigmoid(g) * (1 + g * (1 - sigmoid(g)))
    grad_gate = grad * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(grad_gate_ptr + offsets, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=mask)
    tl.store(grad_up_ptr + offsets, (grad * silu).to(grad_up_ptr.dtype.element_ty), mask=mask)
