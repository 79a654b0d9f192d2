#!/usr/bin/env bash
# torch: The maximum and the infinity norm of a DTensor fail on the rank whose shard is empty, and on it
#   alone.
# Expected: Uneven shards are handled: sum, mean, median, sort and aminmax of the same tensor are right when a
#   rank holds no element.
# Happens: max(), min(), amax() and the infinity norm (also in clip_grad_norm_) raise the local tensor's error
#   on the rank with the empty shard, while the others go on to the next collective. max(0) and aminmax() are
#   right, as is the 2-norm.
# Versions: torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   torch 2.15.0
#   max: fails on ranks [1]
#   amax: fails on ranks [1]
#   infinity norm: fails on ranks [1]
#   aminmax 7.0, max(0) 7.0, 2-norm 7.0
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
x = distribute_tensor(torch.tensor([7.0]), mesh, [Shard(0)])


def failed_ranks(function):
    message = None
    try:
        function()
    except RuntimeError as error:
        message = str(error)
    messages = [None] * 2
    dist.all_gather_object(messages, message)
    return [each for each in range(2) if messages[each] is not None]


cases = {"max": x.max, "amax": x.amax, "infinity norm": lambda: torch.nn.utils.get_total_norm([x], float("inf"))}
for name, function in cases.items():
    failed = failed_ranks(function)
    say(f"{name}: fails on ranks {failed}")
    assert failed == [1], f"changed: {name}"
right = [each.full_tensor().item() for each in (x.aminmax()[1], x.max(0)[0], torch.nn.utils.get_total_norm([x]))]
say("aminmax {}, max(0) {}, 2-norm {}".format(*right))
assert right == [7.0] * 3, f"changed: {right}"

dist.destroy_process_group()
if rank == 0:
    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
PYTHON
