#!/usr/bin/env bash
# datasets: After load_state_dict, every later epoch of a streamed dataset begins at the loaded position.
# Expected: The state is used once: the epoch that resumes is shorter, and the next iteration starts at the
#   first row.
# Happens: The state stays in the dataset. Each iteration lacks the rows before the resume, until set_epoch
#   names another epoch. A state saved at the end of an epoch makes every further epoch empty.
# Versions: datasets 5.2.0, Python 3.11; seen on 2026-11-28.
# Output seen:
#   datasets 5.2.0
#   resumed after 5 of 8 rows: epochs of 3, 3, 3 rows
#   resumed after 8 of 8 rows: epochs of 0, 0, 0 rows
#   with set_epoch(1) after the first: epochs of 3, 8, 8 rows
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" datasets==5.2.0
"$folder/env/bin/python" - <<'PYTHON'
import datasets
from datasets import Dataset

print("datasets", datasets.__version__)


def stream():
    return Dataset.from_dict({"x": list(range(8))}).to_iterable_dataset()


def epochs_after(count, next_epoch=None):
    data = stream()
    rows = iter(data)
    for _ in range(count):
        next(rows)
    if count == 8:
        assert next(rows, None) is None
    resumed = stream()
    resumed.load_state_dict(data.state_dict())
    lengths = [len(list(resumed))]
    if next_epoch is not None:
        resumed.set_epoch(next_epoch)
    return lengths + [len(list(resumed)) for _ in range(2)]


cases = {
    "resumed after 5 of 8 rows": (epochs_after(5), [3, 3, 3]),
    "resumed after 8 of 8 rows": (epochs_after(8), [0, 0, 0]),
    "with set_epoch(1) after the first": (epochs_after(5, next_epoch=1), [3, 8, 8]),
}
for name, (seen, stated) in cases.items():
    print(f"{name}: epochs of {', '.join(map(str, seen))} rows")
    assert seen == stated, f"changed: {name}"
PYTHON
