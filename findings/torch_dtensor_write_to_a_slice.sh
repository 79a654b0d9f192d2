#!/usr/bin/env bash
# torch: Writing to a slice of a sharded DTensor is lost.
# Expected: x[1:3] = -1 writes the rows, or raises because the dimension is sharded.
# Happens: It writes nothing, without an error, as x[0].fill_(9) does: the slice is gathered into a new tensor
#   and that is written. The same code works on a replicated DTensor. So nn.Embedding.reset_parameters leaves
#   random numbers in its padding row once the weight is sharded.
# Versions: torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   torch 2.15.0
#   replicated: [9.0, -1.0, -1.0, 3.0]
#   sharded:    [0.0, 1.0, 2.0, 3.0]
#   padding row of a sharded embedding is zero: False
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
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

rank = 0 if os.fork() else 1  # two ranks, and one import
dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))


def say(*words):
    if rank == 0:
        print(*words)


say("torch", torch.__version__.split("+")[0])
results = []
for placement in (Replicate(), Shard(0)):
    x = distribute_tensor(torch.arange(4.0), mesh, [placement])
    x[0].fill_(9.0)
    x[1:3] = -1.0
    results.append(x.full_tensor().tolist())
say("replicated:", results[0])
say("sharded:   ", results[1])
assert results == [[9.0, -1.0, -1.0, 3.0], [0.0, 1.0, 2.0, 3.0]], f"changed: {results}"

embedding = torch.nn.Embedding(4, 2, padding_idx=1)
embedding.weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
embedding.reset_parameters()
is_zero = not embedding.weight.full_tensor()[1].any().item()
say("padding row of a sharded embedding is zero:", is_zero)
assert not is_zero, "changed: the padding row is zero"

dist.destroy_process_group()
if rank == 0:
    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
PYTHON
