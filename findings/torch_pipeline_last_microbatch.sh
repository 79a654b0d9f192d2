#!/usr/bin/env bash
# torch: a pipeline that evaluates 5 rows in 2 microbatches returns 6 rows.
# Expected: The outputs are those of the rows that were given, or an error says that 2 does not divide 5.
# Happens: The schedule cuts 3 and 2 rows. The last stage receives both in a buffer of 3 rows, computes a row out of
#   what the buffer held before, and returns it behind the others, without a warning. Training raises an error, of
#   the loss or of the backward pass.
# Versions: torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-29.
# Output seen:
#   torch 2.15.0
#   6 rows in 2 microbatches: 6 rows of output, equal to one process: True
#   5 rows in 2 microbatches: 6 rows of output, the first 5 equal to one process: True
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
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

rank = 0 if os.fork() else 1  # two ranks, and one import
dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=2)


def say(*words):
    if rank == 1:  # the last stage has the outputs
        print(*words, flush=True)


say("torch", torch.__version__.split("+")[0])
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
rows = torch.randn(6, 3)
for number in (6, 5):
    schedule = ScheduleGPipe(PipelineStage(layers[rank], rank, 2, torch.device("cpu")), 2)
    with torch.no_grad():
        found = schedule.eval(rows[:number]) if rank == 0 else schedule.eval()
        right = layers(rows[:number])
    if rank == 1:
        assert len(found) == 6, f"changed: {len(found)} rows"
        equal = torch.allclose(found[:number], right)
        first = "" if number == 6 else "the first 5 "
        say(f"{number} rows in 2 microbatches: {len(found)} rows of output, {first}equal to one process: {equal}")
        assert equal, "changed: other outputs"

dist.barrier()
dist.destroy_process_group()
if rank == 0:
    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
PYTHON
