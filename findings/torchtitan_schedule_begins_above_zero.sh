#!/usr/bin/env bash
# torchtitan: its warm-up and decay are one step ahead of those of transformers.
# Expected: 2 warm-up steps of 8 and a cosine give the learning rates of get_cosine_schedule_with_warmup.
# Happens: the warm-up begins at 1/2 and reaches the peak a step earlier, which then lasts for two steps; the decays are
#   equal.
# Versions: torchtitan 0.3.0, transformers 5.23.0, torch 2.15.0, Python 3.11; seen on 2026-11-28.
# Output seen:
#   torchtitan   [0.5, 1.0, 1.0, 0.933, 0.75, 0.5, 0.25, 0.067]
#   transformers [0.0, 0.5, 1.0, 0.933, 0.75, 0.5, 0.25, 0.067]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" --no-deps torchtitan==0.3.0
uv pip install --quiet --python "$folder/env/bin/python" torch==2.15.0 numpy==2.4.6 transformers==5.23.0 \
    tyro spmd_types==0.3.1 torch_checkpointing==0.1.1 torch_remat==0.2.2 einops
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
"$folder/env/bin/python" - <<'PYTHON'
import torch
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from transformers import get_cosine_schedule_with_warmup


def rates(build):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule, seen = build(optimizer), []
    for _ in range(8):
        seen.append(round(optimizer.param_groups[0]["lr"], 3))
        optimizer.step()
        schedule.step()
    return seen


config = LRSchedulersContainer.Config(warmup_steps=2, decay_type="cosine")
titan = rates(lambda optimizer: config.build(optimizers=[optimizer], training_steps=8))
faces = rates(lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 2, 8))
print("torchtitan  ", titan)
print("transformers", faces)
assert titan == [0.5, 1.0, 1.0, 0.933, 0.75, 0.5, 0.25, 0.067], "changed"
assert faces == [0.0, 0.5, *titan[2:]], "changed"
PYTHON
