#!/usr/bin/env bash
# peft: Deleting the active adapter leaves different adapters active in different layers.
# Expected: Another adapter becomes the active one of the whole model, or none.
# Happens: Each layer picks the first adapter that it still holds. The model reports one active adapter, yet
#   layers that only a third adapter covers run and train this one: outputs are of a mixture that nobody asked
#   for.
# Versions: peft 0.21.2, torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   peft 0.21.2
#   the model says: ['default']
#   active in q: ['default']
#   active in k: ['third']
#   trainable: q.lora_A.default, q.lora_B.default, k.lora_A.third, k.lora_B.third
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" peft==0.21.2 torch==2.15.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import warnings

import peft
from peft import LoraConfig, get_peft_model
from torch import nn

warnings.filterwarnings("ignore")
print("peft", peft.__version__)
model = get_peft_model(
    nn.ModuleDict({"q": nn.Linear(2, 2), "k": nn.Linear(2, 2)}), LoraConfig(r=1, target_modules=["q"])
)
model.add_adapter("second", LoraConfig(r=1, target_modules=["q"]))
model.add_adapter("third", LoraConfig(r=1, target_modules=["k"]))
model.set_adapter("second")
model.delete_adapter("second")
layers = model.base_model.model
active = [model.active_adapters, layers["q"].active_adapters, layers["k"].active_adapters]
trained = [
    name.split("model.")[-1].removesuffix(".weight") for name, each in model.named_parameters() if each.requires_grad
]
print("the model says:", active[0])
print("active in q:", active[1])
print("active in k:", active[2])
print("trainable:", ", ".join(trained))
assert active == [["default"], ["default"], ["third"]], f"changed: {active}"
assert "k.lora_A.third" in trained and "q.lora_A.default" in trained, f"changed: {trained}"
PYTHON
