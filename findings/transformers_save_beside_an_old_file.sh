#!/usr/bin/env bash
# transformers: after a second `save_pretrained` into a folder, in shards, `from_pretrained` reads the first save.
# Expected: The folder holds the model that was saved last; old files are removed or not read.
# Happens: save_pretrained removes old shards, but not an old model.safetensors, and from_pretrained prefers that file to
#   the new index. The new weights are in the folder, and are not read. There is no message.
# Versions: transformers 5.23.0, torch 2.15.0, Python 3.11; seen on 2026-11-30.
# Output seen:
#   transformers 5.23.0
#   model-00001-of-00003.safetensors
#   model-00002-of-00003.safetensors
#   model-00003-of-00003.safetensors
#   model.safetensors
#   model.safetensors.index.json
#   saved last: 2.0; read: 1.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" transformers==5.23.0 torch==2.15.0
"$folder/env/bin/python" - "$folder/model" 2> /dev/null <<'PYTHON'
import sys
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

folder = Path(sys.argv[1])
print("transformers", transformers.__version__)
config = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
for value, options in ((1.0, {}), (2.0, {"max_shard_size": "8KB"})):
    model = LlamaForCausalLM(config)
    torch.nn.init.constant_(model.lm_head.weight, value)
    model.save_pretrained(folder, **options)
print(*sorted(file.name for file in folder.glob("model*")), sep="\n")
read = LlamaForCausalLM.from_pretrained(folder).lm_head.weight[0, 0].item()
print(f"saved last: 2.0; read: {read}")
assert read == 1.0, f"changed: {read}"
PYTHON
