#!/usr/bin/env bash
# torch: a distributed checkpoint that is overwritten can have the values of two steps.
# Expected: a save into the folder of an older checkpoint that does not end leaves the older one, or a folder that
#   does not load.
# Happens: after one of two ranks is killed during the save, the folder has the new file of the other rank, the old
#   file of this rank, and the old metadata, which fits both. It loads without an error.
# Versions: torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   torch 2.15.0
#   the second save: RuntimeError
#   loaded: [2.0, 2.0, 1.0, 1.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" torch==2.15.0 numpy==2.4.6
export STORE="$folder/store" FOLDER="$folder/saved" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
"$folder/env/bin/python" - <<'PYTHON'
import logging
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

logging.disable(logging.CRITICAL)
folder = os.environ["FOLDER"]
rank = 0 if (child := os.fork()) else 1  # two ranks, and one import
dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))


class Killed(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        if rank == 1:
            os._exit(137)  # as by SIGKILL
        return super().write_data(plan, planner)


def state(step):
    return {"weight": distribute_tensor(torch.full((4,), float(step)), mesh, [Shard(0)])}


dcp.save(state(1), checkpoint_id=folder)
try:
    dcp.save(state(2), storage_writer=Killed(folder))
except Exception as error:
    print("torch", torch.__version__.split("+")[0])
    print("the second save:", type(error).__name__)
if rank == 1:
    os._exit(1)
os.waitpid(child, 0)
dist.destroy_process_group()
loaded = {"weight": torch.zeros(4)}
dcp.load(loaded, checkpoint_id=folder)
print("loaded:", loaded["weight"].tolist())
assert loaded["weight"].tolist() == [2.0, 2.0, 1.0, 1.0], f"changed: {loaded}"
os._exit(0)
PYTHON
