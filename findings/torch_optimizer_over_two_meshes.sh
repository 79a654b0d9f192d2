#!/usr/bin/env bash
# torch: AdamW steps over parameters of two meshes at once, and gradient clipping of the same list fails.
# Expected: Both work on lists of tensors (foreach), so both raise for DTensors of different meshes, or both
#   work.
# Happens: AdamW(foreach=True) is right, because no operation combines two parameters. clip_grad_norm_ raises
#   when it stacks the norms, even with foreach=False; plain tensors among DTensors fail in the same place.
# Versions: torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   torch 2.15.0
#   AdamW: 0.9 and 0.9
#   clip_grad_norm_(foreach=True): must have the same mesh
#   clip_grad_norm_(foreach=False): must have the same mesh
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
square = init_device_mesh("cpu", (1, 2))
parameters = []
for each, placements in ((mesh, [Shard(0)]), (square, [Replicate(), Shard(0)])):
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4), each, placements))
    parameter.grad = distribute_tensor(torch.ones(4), each, placements)
    parameters.append(parameter)
torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.0, foreach=True).step()
stepped = [round(each.full_tensor()[0].item(), 4) for each in parameters]
say("AdamW: {} and {}".format(*stepped))
assert stepped == [0.9, 0.9], f"changed: {stepped}"
for foreach in (True, False):
    try:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=foreach)
    except RuntimeError as error:
        assert "must have the same mesh" in str(error), f"changed: {error}"
        say(f"clip_grad_norm_(foreach={foreach}): must have the same mesh")
    else:
        raise SystemExit("changed: clip_grad_norm_ works over two meshes")

dist.destroy_process_group()
if rank == 0:
    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
PYTHON
