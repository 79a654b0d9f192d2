#!/usr/bin/env bash
# torch: reading an optimizer's state before the first step changes the training.
# Expected: get_optimizer_state_dict reads. Before the first step it returns an empty state, or zeros.
# Happens: It takes a step with a learning rate of 0 and zero gradients, and keeps what that step did to the state.
#   The values of the model stay. Adam, AdamW, NAdam, RAdam and Adamax then correct their averages as in step 2, SGD
#   with dampening damps its first gradient, ASGD and Rprop begin with other sizes. So a run that builds the template
#   for a checkpoint and finds none trains otherwise than one that does not look.
# Versions: torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-29.
# Output seen:
#   torch 2.15.0
#   AdamW: steps 1.0, first update 0.1, after the reading 0.0744
#   RAdam: steps 1.0, first update 0.1, after the reading 0.0526
#   SGD with dampening: first update 0.1, after the reading 0.05
#   Adagrad: steps 0.0, first update 0.1, after the reading 0.1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" torch==2.15.0 numpy==2.4.6
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
"$folder/env/bin/python" - <<'PYTHON'
from functools import partial

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD, Adagrad, AdamW, RAdam


def first_update(optimizer_of, is_read):
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    optimizer = optimizer_of(model.parameters(), lr=0.1, weight_decay=0.0)
    state = get_optimizer_state_dict(model, optimizer)["state"] if is_read else {}
    steps = state["weight"]["step"].item() if "step" in state.get("weight", ()) else None
    assert model.weight.item() == before
    model.weight.grad = torch.ones(1, 1)
    optimizer.step()
    return round(before - model.weight.item(), 4), steps


print("torch", torch.__version__.split("+")[0])
damped = partial(SGD, momentum=0.9, dampening=0.5)
cases = {"AdamW": AdamW, "RAdam": RAdam, "SGD with dampening": damped, "Adagrad": Adagrad}
for name, optimizer_of in cases.items():
    (fresh, _), (read, steps) = (first_update(optimizer_of, is_read) for is_read in (False, True))
    counted = "" if steps is None else f"steps {steps}, "
    print(f"{name}: {counted}first update {fresh}, after the reading {read}")
    assert (fresh == read) == (name == "Adagrad"), f"changed: {name}"
PYTHON
