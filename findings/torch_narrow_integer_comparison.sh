#!/usr/bin/env bash
# torch: a comparison of integers with a number that their dtype does not hold wraps the number.
# Expected: Labels of uint8 are all less than 256, the number of classes, as NumPy says; or the number is an error,
#   as NumPy raises one for an addition of 256.
# Happens: The number is converted to the dtype of the tensor, without a warning: 256 is 0 in uint8 and 128 is -128
#   in int8, so no label is less. A check of labels against the number of classes refuses all of them. A tensor of
#   one element, torch.tensor([256]), is compared by its value.
# Versions: torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-30.
# Output seen:
#   torch 2.15.0 numpy 2.4.6
#   uint8 labels < 256: torch [False, False], numpy [True, True], tensor of one element [True, True]
#   int8 labels < 128: torch [False, False], numpy [True, True], tensor of one element [True, True]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" torch==2.15.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import numpy as np
import torch

print("torch", torch.__version__.split("+")[0], "numpy", np.__version__)
for dtype, count in ((torch.uint8, 256), (torch.int8, 128)):
    labels = torch.tensor([7, 120], dtype=dtype)
    found = (labels < count).tolist()
    others = (labels.numpy() < count).tolist(), (labels < torch.tensor([count])).tolist()
    name = str(dtype).removeprefix("torch.")
    print(f"{name} labels < {count}: torch {found}, numpy {others[0]}, tensor of one element {others[1]}")
    assert (found, *others) == ([False, False], [True, True], [True, True]), f"changed: {found}, {others}"
PYTHON
