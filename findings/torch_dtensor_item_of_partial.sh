#!/usr/bin/env bash
# torch: item() of a DTensor with a pending sum gives the number of this rank.
# Expected: item() must give one number of the whole tensor, so it sums first, as adding a number does; or it
#   raises.
# Happens: item(), float() and bool() return the local summand on every rank, without an error; adding zero
#   reduces and gives the sum.
# Versions: torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   torch 2.15.0
#   item 3.0, float 3.0, with + 0: 6.0, full_tensor 6.0
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
from torch.distributed.tensor import DTensor, Partial

rank = 0 if os.fork() else 1  # two ranks, and one import
dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))


def say(*words):
    if rank == 0:
        print(*words)


say("torch", torch.__version__.split("+")[0])
loss = DTensor.from_local(torch.tensor(3.0), mesh, [Partial()])
seen = loss.item(), float(loss), (loss + 0).item(), loss.full_tensor().item()
say("item {}, float {}, with + 0: {}, full_tensor {}".format(*seen))
assert seen == (3.0, 3.0, 6.0, 6.0), f"changed: {seen}"

dist.destroy_process_group()
if rank == 0:
    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
PYTHON
