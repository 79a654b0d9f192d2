#!/usr/bin/env bash
# torch: Flattening a tensor that is sharded by columns keeps it sharded, in an order that is not contiguous.
# Expected: flatten() of Shard(1) gathers, since no contiguous shard of the result is local; or it raises.
# Happens: It returns a private placement, _StridedShard: values are right, but the placement is not Shard(0),
#   and the local part of rank 0 is every other run of columns. reshape to another matrix of the same tensor
#   gathers. Code that looks for Shard, and saves or steps by local offsets, reads the wrong rows.
# Versions: torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   torch 2.15.0
#   flatten: _StridedShard isinstance Shard: False
#   local part of rank 0: [0, 1, 4, 5, 8, 9, 12, 13]
#   reshape(2, 8): Replicate
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" torch==2.15.0 numpy==2.4.6
export STORE="$folder/store" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
"$folder/env/bin/python" - <<'PYTHON'
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

rank = 0 if os.fork() else 1  # two ranks, and one import
dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))


def say(*words):
    if rank == 0:
        print(*words)


say("torch", torch.__version__.split("+")[0])
x = distribute_tensor(torch.arange(16).view(4, 4), mesh, [Shard(1)])
flat = x.flatten()
placement = flat.placements[0]
local = flat.to_local().tolist()
say("flatten:", type(placement).__name__, "isinstance Shard:", isinstance(placement, Shard))
say("local part of rank 0:", local)
assert flat.full_tensor().tolist() == list(range(16)), "changed: the values"
assert type(placement).__name__ == "_StridedShard" and not isinstance(placement, Shard), f"changed: {placement}"
assert rank or local == [0, 1, 4, 5, 8, 9, 12, 13], f"changed: {local}"
reshaped = type(x.reshape(2, 8).placements[0]).__name__
say("reshape(2, 8):", reshaped)
assert reshaped == "Replicate", f"changed: {reshaped}"

dist.destroy_process_group()
if rank == 0:
    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
PYTHON
