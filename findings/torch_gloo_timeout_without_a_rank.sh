#!/usr/bin/env bash
# torch: a timeout of gloo names neither the rank that is late nor the collective.
# Expected: an all-reduce that times out says which rank did not arrive, as its receive has one peer.
# Happens: the message has the limit and a line of gloo's source.
# Versions: torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   torch 2.15.0
#   Timed out waiting 3000ms for recv operation to complete
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" torch==2.15.0 numpy==2.4.6
export STORE="$folder/store" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
"$folder/env/bin/python" - <<'PYTHON'
import os
from datetime import timedelta

import torch
import torch.distributed as dist

rank = 0 if (child := os.fork()) else 1  # two ranks, and one import
store = dist.FileStore(os.environ["STORE"], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=3))
dist.barrier()
if rank == 1:
    store.wait(["end"], timedelta(seconds=60))  # a rank that is late
    os._exit(0)
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError as error:
    said = str(error).splitlines()[0]
store.set("end", "")
os.waitpid(child, 0)
print("torch", torch.__version__.split("+")[0])
print(said.partition("] ")[2])
assert "Timed out waiting" in said, f"changed: {said}"
assert not any(word in said for word in ("rank", "peer", "reduce")), f"changed: {said}"
os._exit(0)
PYTHON
