#!/usr/bin/env bash
# datasets: The state of a streamed dataset names its epoch, and is ignored by a dataset of another epoch.
# Expected: load_state_dict restores the position, and with it the epoch that the state holds.
# Happens: The epoch is compared and not restored. Without set_epoch before the iteration the new dataset
#   starts at its own first row, in the order of epoch 0, without an error.
# Versions: datasets 5.2.0, Python 3.11; seen on 2026-11-28.
# Output seen:
#   datasets 5.2.0
#   epoch of the state: 1
#   rest of epoch 1:        9, 2, 6, 10, 3, 7, 11
#   loaded, with set_epoch: 9, 2, 6, 10, 3, 7, 11
#   loaded alone:           12 rows of epoch 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" datasets==5.2.0
"$folder/env/bin/python" - <<'PYTHON'
import logging

import datasets
from datasets import Dataset

logging.disable(logging.WARNING)
print("datasets", datasets.__version__)


def stream():
    rows = Dataset.from_dict({"x": list(range(12))})
    return rows.to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=1)


def values(data):
    return [row["x"] for row in data]


whole = stream()
whole.set_epoch(1)
rest = values(whole)[5:]
rows = iter(whole)
for _ in range(5):
    next(rows)
state = whole.state_dict()
with_epoch, alone = stream(), stream()
with_epoch.set_epoch(1)
with_epoch.load_state_dict(state)
alone.load_state_dict(state)
seen = values(with_epoch), values(alone)
print("epoch of the state:", state["epoch"])
print("rest of epoch 1:       ", ", ".join(map(str, rest)))
print("loaded, with set_epoch:", ", ".join(map(str, seen[0])))
print(f"loaded alone:           {len(seen[1])} rows of epoch 0")
assert state["epoch"] == 1 and seen[0] == rest, "changed: with set_epoch"
assert seen[1] == values(stream()), "changed: without set_epoch"
PYTHON
