#!/usr/bin/env bash
# torch: An exponential average of a model with use_buffers=True stops its integer buffers.
# Expected: Integer buffers cannot be averaged, so AveragedModel copies them, or they follow within rounding.
# Happens: The average of num_batches_tracked is computed and cut to an integer in each update, so that it
#   never moves from its first value until the model is a thousand batches (1 / (1 - decay)) ahead. The equal-
#   weight average of the same class reports the mean, 25; without use_buffers the value is copied.
# Versions: torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   torch 2.15.0
#   model 40
#   decay 0.999, use_buffers: 10
#   equal weights, use_buffers: 25
#   decay 0.999, without use_buffers: 40
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" torch==2.15.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

print("torch", torch.__version__.split("+")[0])
print("model 40")


def tracked(**options):
    model = torch.nn.BatchNorm1d(1)
    average = AveragedModel(model, **options)
    for count in (10, 20, 30, 40):
        model.num_batches_tracked.fill_(count)
        average.update_parameters(model)
    return average.module.num_batches_tracked.item()


decay = {"multi_avg_fn": get_ema_multi_avg_fn(0.999)}
cases = {
    "decay 0.999, use_buffers": (tracked(use_buffers=True, **decay), 10),
    "equal weights, use_buffers": (tracked(use_buffers=True), 25),
    "decay 0.999, without use_buffers": (tracked(**decay), 40),
}
for name, (seen, stated) in cases.items():
    print(f"{name}: {seen}")
    assert seen == stated, f"changed: {name}"
PYTHON
