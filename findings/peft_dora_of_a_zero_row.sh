#!/usr/bin/env bash
# peft: DoRA on a layer whose weight has a row of zeros computes NaN before any training.
# Expected: Initial adapters change nothing: lora_B is zero, and the magnitudes are the norms of the rows. A row of
#   zeros, such as that of a gate that starts at zero, gives the bias.
# Happens: The row is divided by its norm, so the output is NaN there, and the gradient of each element of lora_A is
#   NaN: one step of an optimizer spoils the outputs of all rows. There is no warning.
# Versions: peft 0.21.2, torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-30.
# Output seen:
#   peft 0.21.2
#   DoRA: NaN in columns [2] of the output, in 16 of 16 elements of the gradient of lora_A
#   LoRA: NaN in columns [] of the output, in 0 of 16 elements of the gradient of lora_A
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" peft==0.21.2 torch==2.15.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import warnings

import peft
import torch
from torch import nn

warnings.filterwarnings("ignore")
print("peft", peft.__version__)
seen = {}
for name, use_dora in (("DoRA", True), ("LoRA", False)):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 4))
    with torch.no_grad():
        layers[0].weight[2] = 0
    model = peft.get_peft_model(layers, peft.LoraConfig(r=2, target_modules=["0"], use_dora=use_dora))
    output = model(torch.ones(1, 8))
    output.sum().backward()
    gradient = model.base_model.model[0].lora_A["default"].weight.grad
    columns = output[0].isnan().nonzero().flatten().tolist()
    seen[name] = columns, int(gradient.isnan().sum())
    print(
        f"{name}: NaN in columns {columns} of the output, in {seen[name][1]} of {gradient.numel()} elements of the "
        "gradient of lora_A"
    )
assert seen == {"DoRA": ([2], 16), "LoRA": ([], 0)}, f"changed: {seen}"
PYTHON
