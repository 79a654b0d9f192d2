#!/usr/bin/env bash
# transformers: the schedule "polynomial" with a warm-up of the whole training raises an error after its last step.
# Expected: A warm-up may be as long as the training, as in "linear" and "cosine": the rate rises to the end.
# Happens: The schedule is evaluated once more after the last step of the optimizer, at a step whose rate nobody
#   uses, and divides by zero there. The training is complete, and what follows it, such as a save, does not run.
# Versions: transformers 5.23.0, torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-30.
# Output seen:
#   transformers 5.23.0
#   linear: 4 steps of the optimizer and 4 of the schedule
#   cosine: 4 steps of the optimizer and 4 of the schedule
#   polynomial: 4 steps of the optimizer and 3 of the schedule: ZeroDivisionError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" transformers==5.23.0 torch==2.15.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import torch
import transformers

print("transformers", transformers.__version__)
for name in ("linear", "cosine", "polynomial"):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.01)
    schedule = transformers.get_scheduler(name, optimizer, num_warmup_steps=4, num_training_steps=4)
    steps, failure = [0, 0], ""
    for _ in range(4):
        optimizer.step()
        steps[0] += 1
        try:
            schedule.step()
            steps[1] += 1
        except ZeroDivisionError as error:
            failure = f": {type(error).__name__}"
    print(f"{name}: {steps[0]} steps of the optimizer and {steps[1]} of the schedule{failure}")
    assert (steps[1] == 3) == (name == "polynomial"), "changed"
PYTHON
