#!/usr/bin/env bash
# peft: layers_to_transform=[0] picks expert 0 of all layers in a bare decoder of experts.
# Expected: The number is that of the decoder layer, the first list in the path, with or without an outer
#   module.
# Happens: With an outer module, as in a causal language model, it is. In the bare decoder the path starts with
#   the list, layers.0.experts.0.q, the search skips it, and the number of the expert counts: the adapter is on
#   expert 0 of every layer. layers_pattern='layers' finds the layer there too.
# Versions: peft 0.21.2, torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   peft 0.21.2
#   with an outer module: layers.0.experts.0.q, layers.0.experts.1.q
#   bare decoder: layers.0.experts.0.q, layers.1.experts.0.q
#   bare decoder, layers_pattern='layers': layers.0.experts.0.q, layers.0.experts.1.q
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


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        experts = [nn.ModuleList([nn.ModuleDict({"q": nn.Linear(2, 2)}) for _ in range(2)]) for _ in range(2)]
        self.layers = nn.ModuleList([nn.ModuleDict({"experts": each}) for each in experts])


def targets(model, **options):
    config = LoraConfig(r=1, target_modules=["q"], layers_to_transform=[0], **options)
    names = [name for name, _ in get_peft_model(model, config).named_parameters() if "lora_A" in name]
    return ", ".join("layers." + name.split("layers.")[1].split(".lora_A")[0] for name in names)


wrapped, bare = targets(nn.ModuleDict({"model": Decoder()})), targets(Decoder())
print("with an outer module:", wrapped)
print("bare decoder:", bare)
assert wrapped == "layers.0.experts.0.q, layers.0.experts.1.q", "changed: with an outer module"
assert bare == "layers.0.experts.0.q, layers.1.experts.0.q", "changed: bare decoder"
pattern = targets(Decoder(), layers_pattern="layers")
print("bare decoder, layers_pattern='layers':", pattern)
assert pattern == wrapped, "changed: with a pattern"
PYTHON
