#!/usr/bin/env bash
# numpy: Seed lists that end in zero, and long ones, collide with other seeds.
# Expected: default_rng([seed, rank]) gives every rank an own stream, other than default_rng(seed) and than
#   its spawned children.
# Happens: Missing words count as zero: rank 0 of [seed, rank] draws exactly the numbers of default_rng(seed),
#   which another part of the program may use. A list of four words and an index equals the spawned child of
#   that index.
# Versions: numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   numpy 2.4.6
#   [5, 0] equals 5: True
#   [5, 1] equals 5: False
#   [1, 0, 0, 0, 2] equals child 2 of seed 1: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import numpy as np

print("numpy", np.__version__)


def first(seed):
    return np.random.default_rng(seed).random()


child = np.random.SeedSequence(1).spawn(3)[2]
facts = {
    "[5, 0] equals 5": (first([5, 0]) == first(5), True),
    "[5, 1] equals 5": (first([5, 1]) == first(5), False),
    "[1, 0, 0, 0, 2] equals child 2 of seed 1": (first([1, 0, 0, 0, 2]) == first(child), True),
}
for name, (seen, stated) in facts.items():
    print(f"{name}: {seen}")
    assert seen is stated, f"changed: {name}"
PYTHON
