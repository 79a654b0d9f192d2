#!/usr/bin/env bash
# torchdata: A state saved in the step of the last batch resumes with an empty epoch.
# Expected: A state after the last batch resumes at the next epoch, whether it was saved in the loop or after
#   it.
# Happens: Saved after the loop it does. Saved in the loop, as a checkpoint in each step is, it resumes with
#   an epoch of no batches, and then the next one. A loop that counts epochs trains one epoch less.
# Versions: torchdata 0.11.0, torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   torchdata 0.11.0
#   saved in the step of the last batch: epochs of 0, 5, 5 batches
#   saved after the loop: epochs of 5, 5, 5 batches
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" torchdata==0.11.0 torch==2.15.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import importlib.metadata

from torchdata.stateful_dataloader import StatefulDataLoader

print("torchdata", importlib.metadata.version("torchdata").split("+")[0])


def loader():
    return StatefulDataLoader(list(range(10)), batch_size=2)


def epochs_after(state):
    resumed = loader()
    resumed.load_state_dict(state)
    return [len(list(resumed)) for _ in range(3)]


first = loader()
for _batch in first:
    in_the_loop = first.state_dict()
after_it = first.state_dict()
cases = {
    "saved in the step of the last batch": (epochs_after(in_the_loop), [0, 5, 5]),
    "saved after the loop": (epochs_after(after_it), [5, 5, 5]),
}
for name, (seen, stated) in cases.items():
    print(f"{name}: epochs of {', '.join(map(str, seen))} batches")
    assert seen == stated, f"changed: {name}"
PYTHON
