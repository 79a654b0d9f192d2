#!/usr/bin/env bash
# safetensors: The numpy writer saves other numbers than those of a transposed or strided array.
# Expected: It copies the array or raises, as the torch writer does for a tensor that is not contiguous.
# Happens: It writes the bytes of the buffer in memory order under the shape of the view, without an error: a
#   transposed matrix comes back scrambled, and x[::2] comes back as the first half of x.
# Versions: safetensors 0.8.0, numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   safetensors 0.8.0 numpy 2.4.6
#   saved  [[0, 3], [1, 4], [2, 5]]
#   loaded [[0, 1], [2, 3], [4, 5]]
#   saved  [0, 2, 4]
#   loaded [0, 1, 2]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" safetensors==0.8.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import numpy as np
import safetensors
from safetensors.numpy import load, save

print("safetensors", safetensors.__version__, "numpy", np.__version__)
for array in (np.arange(6).reshape(2, 3).T, np.arange(6)[::2]):
    loaded = load(save({"x": array}))["x"]
    print("saved ", array.tolist())
    print("loaded", loaded.tolist())
    assert loaded.shape == array.shape and not np.array_equal(loaded, array), "the array comes back right now"
    contiguous = load(save({"x": np.ascontiguousarray(array)}))["x"]
    assert np.array_equal(contiguous, array), "a contiguous copy does not come back right any more"
PYTHON
