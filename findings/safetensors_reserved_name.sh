#!/usr/bin/env bash
# safetensors: A tensor may be saved under the name of the metadata, and the file cannot be opened.
# Expected: save() raises for the one name that the format reserves.
# Happens: save() writes the file. Every reader then fails on the header, and all other tensors of the file
#   are lost with it.
# Versions: safetensors 0.8.0, numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   safetensors 0.8.0
#   saved 2 tensors
#   load: SafetensorError: Error while deserializing: invalid JSON in header: invalid type: sequence, expected a string
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" safetensors==0.8.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import numpy as np
import safetensors
from safetensors.numpy import load, save

print("safetensors", safetensors.__version__)
content = save({"weight": np.ones(2), "__metadata__": np.ones(2)})
print("saved 2 tensors")
try:
    load(content)
except safetensors.SafetensorError as error:
    print("load: SafetensorError:", str(error).split(" at line")[0])
else:
    raise SystemExit("changed: the file loads")
PYTHON
