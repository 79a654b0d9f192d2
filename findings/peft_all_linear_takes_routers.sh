#!/usr/bin/env bash
# peft: target_modules="all-linear" adapts routers that return a tuple, and the first forward raises an error.
# Expected: "all-linear" chooses layers whose output is the product with their weight, so that the update can be added.
# Happens: It chooses each subclass of nn.Linear. The routers of Phi-3.5-MoE and Llama 4 are such subclasses, and return
#   scores and logits. get_peft_model raises no error; the first forward raises one that names neither layer nor setting.
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.15.0, Python 3.11; seen on 2026-11-30.
# Output seen:
#   peft 0.21.2 transformers 5.23.0
#   phimoe: 1 adapted routers; the forward: 'tuple' object has no attribute 'dtype'
#   llama4_text: 1 adapted routers; the forward: 'tuple' object has no attribute 'dtype'
#   mixtral: 0 adapted routers; the forward: computes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" peft==0.21.2 transformers==5.23.0 torch==2.15.0
"$folder/env/bin/python" - <<'PYTHON'
import warnings

import peft
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

warnings.filterwarnings("ignore")
print("peft", peft.__version__, "transformers", transformers.__version__)
sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
seen = {}
for kind, more in (("phimoe", {}), ("llama4_text", {"head_dim": 8, "intermediate_size_mlp": 24}), ("mixtral", {})):
    config = AutoConfig.for_model(kind, **sizes, **more)
    model = AutoModelForCausalLM.from_config(config)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    routers = [name for name, _ in model.named_modules() if name.endswith("router.lora_A")]
    try:
        model(input_ids=torch.arange(6)[None])
        seen[kind] = "computes"
    except (AttributeError, TypeError) as error:
        seen[kind] = str(error)
    print(f"{kind}: {len(routers)} adapted routers; the forward: {seen[kind]}")
message = "'tuple' object has no attribute 'dtype'"
assert seen == {"phimoe": message, "llama4_text": message, "mixtral": "computes"}, f"changed: {seen}"
PYTHON
