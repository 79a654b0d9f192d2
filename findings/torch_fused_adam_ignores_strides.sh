#!/usr/bin/env bash
# torch: the fused AdamW on a CPU reads gradients in the order of their memory, not of their indices.
# Expected: A gradient whose strides differ from those of its parameter gives the step of the other implementations.
# Happens: With fused=True each element is updated by the gradient of another element. The separate operations
#   (foreach and the loop) give equal results. There is no error and no warning.
# Versions: torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-29.
# Output seen:
#   torch 2.15.0
#   one step from zero with the gradients [[1, -1], [1, -1]], which are stored by columns
#   loop     [[-0.1, 0.1], [-0.1, 0.1]]
#   foreach  [[-0.1, 0.1], [-0.1, 0.1]]
#   fused    [[-0.1, -0.1], [0.1, 0.1]]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" torch==2.15.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import torch

print("torch", torch.__version__.partition("+")[0])
print("one step from zero with the gradients [[1, -1], [1, -1]], which are stored by columns")
seen = {}
for name, options in (("loop", {"foreach": False}), ("foreach", {"foreach": True}), ("fused", {"fused": True})):
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.tensor([[1.0, 1.0], [-1.0, -1.0]]).T
    assert weight.grad.tolist() == [[1.0, -1.0], [1.0, -1.0]]
    torch.optim.AdamW([weight], lr=0.1, **options).step()
    seen[name] = [[round(value, 4) for value in row] for row in weight.tolist()]
    print(f"{name:8} {seen[name]}")
assert seen["loop"] == seen["foreach"] == [[-0.1, 0.1], [-0.1, 0.1]], "changed: separate operations"
assert seen["fused"] == [[-0.1, -0.1], [0.1, 0.1]], "changed: the fused implementation reads the strides"
PYTHON
