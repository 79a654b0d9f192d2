#!/usr/bin/env bash
# datasets: a resumed stream with a shuffle buffer loses rows, and yields others twice.
# Expected: as documented, the rows in the buffer are lost, so that no row comes twice.
# Happens: rows are lost, and a row that was yielded comes again; with batch() after the shuffle, too.
# Versions: datasets 5.2.0, Python 3.11; seen on 2026-11-28.
# Output seen:
#   datasets 5.2.0
#   shuffle: 3 rows lost, 1 twice
#   shuffle, batch: 3 rows lost, 1 twice
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" datasets==5.2.0
"$folder/env/bin/python" - <<'PYTHON'
import logging
from itertools import islice

import datasets

logging.disable(logging.WARNING)
print("datasets", datasets.__version__)


def shuffled():
    return datasets.Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset().shuffle(seed=0, buffer_size=4)


def batched():
    return shuffled().batch(3)


def rows(stream):
    values = [row["x"] for row in stream]
    return [x for each in values for x in (each if isinstance(each, list) else [each])]


for name, make in (("shuffle", shuffled), ("shuffle, batch", batched)):
    first, second = make(), make()
    seen = rows(islice(first, 7))
    second.load_state_dict(first.state_dict())
    seen += rows(second)
    lost, twice = 40 - len(set(seen)), len(seen) - len(set(seen))
    print(f"{name}: {lost} rows lost, {twice} twice")
    assert lost > 0 and twice > 0, "changed"
PYTHON
