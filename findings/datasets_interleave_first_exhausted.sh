#!/usr/bin/env bash
# datasets: Interleaving of the same rows ends one row earlier when they are streamed.
# Expected: A dataset and its streamed form give the same rows: both stop when the first source is exhausted.
# Happens: The dataset with an index stops before the second source is ahead of the first, and the streamed
#   one when it asks the exhausted source for a row; with a shorter first source the last row of the second is
#   missing in the streamed form. The other two strategies agree.
# Versions: datasets 5.2.0, Python 3.11; seen on 2026-11-28.
# Output seen:
#   datasets 5.2.0
#   first_exhausted: indexed 0, 10, 1, 11, 2, 12
#   first_exhausted: streamed 0, 10, 1, 11, 2
#   all_exhausted: equal
#   all_exhausted_without_replacement: equal
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" datasets==5.2.0
"$folder/env/bin/python" - <<'PYTHON'
import datasets
from datasets import Dataset, interleave_datasets

print("datasets", datasets.__version__)
sources = [Dataset.from_dict({"x": values}) for values in ([0, 1, 2], [10, 11, 12, 13, 14])]
streams = [each.to_iterable_dataset() for each in sources]
for strategy in ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement"):
    indexed, streamed = (
        [row["x"] for row in interleave_datasets(each, stopping_strategy=strategy)] for each in (sources, streams)
    )
    if strategy == "first_exhausted":
        print(f"{strategy}: indexed", ", ".join(map(str, indexed)))
        print(f"{strategy}: streamed", ", ".join(map(str, streamed)))
        assert indexed == [0, 10, 1, 11, 2, 12] and streamed == indexed[:-1], "changed: first_exhausted"
    else:
        print(f"{strategy}: equal")
        assert indexed == streamed, f"changed: {strategy}"
PYTHON
