#!/usr/bin/env bash
# torch: mse_loss of sharded DTensors has a gradient that is too large by the number of ranks.
# Expected: mse_loss(x, y) of DTensors is (x - y).square().mean(), in value and gradient, as for plain tensors.
# Happens: Without a warning, each rank divides the gradient by its own number of elements instead of the number
#   of all. The value is the mean of the ranks' means: right only if all shards have one size. huber_loss,
#   smooth_l1_loss and soft_margin_loss behave alike, binary_cross_entropy_with_logits only in its value. l1_loss
#   and mean() are right.
# Versions: torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-29.
# Output seen:
#   torch 2.15.0
#   4 elements on 2 ranks, right: 5.5 [0.5, 0.5, 2.0, 1.0]
#     mse_loss: 5.5 [1.0, 1.0, 4.0, 2.0]
#     (x - y).square().mean(): 5.5 [0.5, 0.5, 2.0, 1.0]
#   3 elements on 2 ranks, right: 6.0 [0.6667, 0.6667, 2.6667]
#     mse_loss: 8.5 [1.0, 1.0, 8.0]
#     (x - y).square().mean(): 6.0 [0.6667, 0.6667, 2.6667]
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
from torch.nn.functional import mse_loss

rank = 0 if os.fork() else 1  # two ranks, and one import
dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))


def say(*words):
    if rank == 0:
        print(*words)


def written_out(x, y):
    return (x - y).square().mean()


def sharded(loss, values):
    x = distribute_tensor(torch.tensor(values), mesh, [Shard(0)]).requires_grad_()
    y = distribute_tensor(torch.zeros(len(values)), mesh, [Shard(0)])
    total = loss(x, y)
    total.backward()
    return round(total.full_tensor().item(), 4), [round(each, 4) for each in x.grad.full_tensor().tolist()]


say("torch", torch.__version__.split("+")[0])
for values in ([1.0, 1.0, 4.0, 2.0], [1.0, 1.0, 4.0]):
    x = torch.tensor(values, requires_grad=True)
    total = mse_loss(x, torch.zeros(len(values)))
    total.backward()
    right = round(total.item(), 4), [round(each, 4) for each in x.grad.tolist()]
    found = sharded(mse_loss, values)
    say(f"{len(values)} elements on 2 ranks, right:", *right)
    say("  mse_loss:", *found)
    assert found[1] != right[1], "changed: the gradient of mse_loss is right"
    found = sharded(written_out, values)
    say("  (x - y).square().mean():", *found)
    assert found == right, f"changed: {found}"

dist.destroy_process_group()
if rank == 0:
    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
PYTHON
