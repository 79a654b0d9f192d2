#!/usr/bin/env bash
# peft: load_adapter under a name that exists takes the weights of the file and not its lora_alpha.
# Expected: The adapter of the file replaces the one in memory, with its own scale; or a configuration that
#   differs is an error, as another rank is.
# Happens: Weights are replaced and the scale stays that of the configuration in memory, without a warning:
#   the adapter that was saved with a scale of 2 runs with 50.
# Versions: peft 0.21.2, torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   peft 0.21.2
#   scale when saved: 2.0
#   scale after load_adapter(folder, 'default'): 50.0
#   scale after load_adapter(folder, 'other'): 2.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" peft==0.21.2 torch==2.15.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import tempfile
import warnings

import peft
from peft import LoraConfig, get_peft_model
from torch import nn

warnings.filterwarnings("ignore")
print("peft", peft.__version__)


def adapted(alpha):
    return get_peft_model(
        nn.ModuleDict({"q": nn.Linear(4, 4)}), LoraConfig(r=2, lora_alpha=alpha, target_modules=["q"])
    )


def scale(model, name):
    return model.base_model.model["q"].scaling[name]


with tempfile.TemporaryDirectory() as folder:
    saved = adapted(4)
    saved.save_pretrained(folder)
    model = adapted(100)
    model.load_adapter(folder, "default")
    model.load_adapter(folder, "other")
seen = scale(saved, "default"), scale(model, "default"), scale(model, "other")
print("scale when saved:", seen[0])
print("scale after load_adapter(folder, 'default'):", seen[1])
print("scale after load_adapter(folder, 'other'):", seen[2])
assert seen == (2.0, 50.0, 2.0), f"changed: {seen}"
PYTHON
