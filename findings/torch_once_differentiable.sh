#!/usr/bin/env bash
# torch: a second derivative through a function marked `once_differentiable` is wrong, without an error.
# Expected: The decorator makes a second derivative an error: the backward pass below it builds no graph.
# Happens: It raises the error only if an incoming gradient requires a gradient. That of `loss.sum()` is a constant, so
#   the first gradient is returned without a graph through the saved tensors, and their part of the second is missing.
# Versions: torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-30.
# Output seen:
#   torch 2.15.0
#   second derivative of tanh(w)^3 at 0.7: -0.8407 with once_differentiable, 0.6203 with torch's operators
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" torch==2.15.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import torch
from torch.autograd.function import once_differentiable

print("torch", torch.__version__.partition("+")[0])


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient * 3 * ctx.saved_tensors[0] ** 2


def second(cube):
    weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(cube(torch.tanh(weight)), weight, create_graph=True)
    return torch.autograd.grad(first, weight)[0].item()


marked, plain = second(Cube.apply), second(lambda x: x**3)
print(f"second derivative of tanh(w)^3 at 0.7: {marked:.4f} with once_differentiable, {plain:.4f} with torch's operators")
assert abs(marked - plain) > 0.1, "changed: it is equal"
PYTHON
