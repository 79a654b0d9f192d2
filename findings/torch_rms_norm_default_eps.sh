#!/usr/bin/env bash
# torch: RMSNorm without eps uses the epsilon of float32 for bfloat16 inputs.
# Expected: eps=None stands for torch.finfo(x.dtype).eps, as the documentation says: 0.0078 for bfloat16.
# Happens: The computation is in float32, and so is its epsilon, 1.2e-7. With inputs of 0.01 the results are
#   1.0, where the documented epsilon gives 0.11. An own implementation by the documentation differs from
#   torch by a factor of nine there.
# Versions: torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   torch 2.15.0
#   bfloat16 inputs of 0.01: torch 1.0, with finfo(bfloat16).eps 0.11, with finfo(float32).eps 1.0
#   float64 inputs of 1e-7: torch 0.989, with finfo(float64).eps 0.989
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" torch==2.15.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import torch

print("torch", torch.__version__.split("+")[0])


def formula(x, dtype):
    wide = x.double()
    return (wide * torch.rsqrt(wide.square().mean() + torch.finfo(dtype).eps))[0].item()


x = torch.full((4,), 0.01, dtype=torch.bfloat16)
seen = torch.nn.RMSNorm(4, dtype=torch.bfloat16)(x)[0].item()
low, single = formula(x, torch.bfloat16), formula(x, torch.float32)
print(
    f"bfloat16 inputs of 0.01: torch {seen}, with finfo(bfloat16).eps {low:.2f}, with finfo(float32).eps {single:.1f}"
)
assert abs(seen - single) < 0.01 and low < 0.2, "changed: the epsilon of bfloat16"
x = torch.full((4,), 1e-7, dtype=torch.float64)
seen, double = torch.nn.RMSNorm(4, dtype=torch.float64)(x)[0].item(), formula(x, torch.float64)
print(f"float64 inputs of 1e-7: torch {seen:.3f}, with finfo(float64).eps {double:.3f}")
assert abs(seen - double) < 1e-6, "changed: the epsilon of float64"
PYTHON
