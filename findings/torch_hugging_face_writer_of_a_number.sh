#!/usr/bin/env bash
# torch: HuggingFaceStorageWriter saves a number into a file that safetensors cannot read.
# Expected: a state with a value that is no tensor raises, because safetensors files hold tensors only.
# Happens: the save returns metadata as usual, and the file, which also has the tensors, cannot be read.
# Versions: torch 2.15.0, safetensors 0.8.0, numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   torch 2.15.0
#   saved: Metadata
#   SafetensorError: Error while deserializing header: header too large
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" torch==2.15.0 numpy==2.4.6 safetensors==0.8.0
export STORE="$folder/store" FOLDER="$folder/saved" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
"$folder/env/bin/python" - <<'PYTHON'
import os

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open

folder = os.environ["FOLDER"]
print("torch", torch.__version__.split("+")[0])
metadata = dcp.save({"weight": torch.ones(2), "step": 3}, storage_writer=dcp.HuggingFaceStorageWriter(folder))
print("saved:", type(metadata).__name__)
try:
    with safe_open(f"{folder}/model-00001-of-00001.safetensors", "pt") as file:
        raise SystemExit(f"changed: the file has {file.keys()}")
except SafetensorError as error:
    print(f"SafetensorError: {error}")
PYTHON
