#!/usr/bin/env bash
# einops: repeat gives a view of a torch tensor and a copy of a NumPy array.
# Expected: repeat makes its own memory for the copies, in every backend.
# Happens: With torch a new axis is expanded, so that rows share memory with each other and with the input:
#   writing one element changes all rows and the input. In-place arithmetic raises. The same line with NumPy
#   copies.
# Versions: einops 0.8.2, torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   einops 0.8.2
#   torch: result [[9.0, 1.0], [9.0, 1.0]], input [9.0, 1.0]
#   numpy: result [[9.0, 1.0], [0.0, 1.0]], input [0.0, 1.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" einops==0.8.2 torch==2.15.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import einops
import numpy as np
import torch

print("einops", einops.__version__)
seen = {}
for name, x in (("torch", torch.arange(2.0)), ("numpy", np.arange(2.0))):
    y = einops.repeat(x, "a -> b a", b=2)
    y[0, 0] = 9.0
    seen[name] = y.tolist(), x.tolist()
    print(f"{name}: result {seen[name][0]}, input {seen[name][1]}")
assert seen["torch"] == ([[9.0, 1.0], [9.0, 1.0]], [9.0, 1.0]), "changed: torch"
assert seen["numpy"] == ([[9.0, 1.0], [0.0, 1.0]], [0.0, 1.0]), "changed: numpy"
PYTHON
