#!/usr/bin/env bash
# torch: a distributed checkpoint loads into tensors of any dtype.
# Expected: Loading compares the dtype, as it compares the shape, or converts floating-point numbers only.
# Happens: Shapes are compared; a dtype is converted by copy_, without a warning: integers wrap, fractions and
#   imaginary parts are cut off. A Python number that was saved replaces the tensor in the dictionary, and the tensor
#   that was given keeps its value.
# Versions: torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-29.
# Output seen:
#   torch 2.15.0
#   [1.9, 300.0] loaded as int8: [1, 44]
#   (1+2j) loaded as float32: [1.0]
#   3 loaded into a tensor of 0.0: tensor 0.0, dictionary 3
#   a shape of 2 loaded as 3: error
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" torch==2.15.0 numpy==2.4.6
export FOLDER="$folder" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
"$folder/env/bin/python" - 2> /dev/null <<'PYTHON'
import os
import tempfile

import torch
import torch.distributed.checkpoint as dcp


def loaded(saved, into):
    checkpoint = tempfile.mkdtemp(dir=os.environ["FOLDER"])
    dcp.save({"x": saved}, checkpoint_id=checkpoint)
    state = {"x": into}
    dcp.load(state, checkpoint_id=checkpoint)
    return state["x"]


def check(found, right):
    if found != right:
        print("changed:", found)
        raise SystemExit(1)


print("torch", torch.__version__.split("+")[0])
values = loaded(torch.tensor([1.9, 300.0]), torch.zeros(2, dtype=torch.int8)).tolist()
print("[1.9, 300.0] loaded as int8:", values)
check(values, [1, 44])
values = loaded(torch.tensor([1 + 2j]), torch.zeros(1)).tolist()
print("(1+2j) loaded as float32:", values)
check(values, [1.0])
given = torch.zeros(1)
value = loaded(3, given)
print(f"3 loaded into a tensor of 0.0: tensor {given.item()}, dictionary {value}")
check((given.item(), value), (0.0, 3))
try:
    loaded(torch.zeros(2), torch.zeros(3))
except BaseException:  # CheckpointException is no Exception
    print("a shape of 2 loaded as 3: error")
else:
    check("no error", "an error")
PYTHON
