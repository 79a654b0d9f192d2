#!/usr/bin/env bash
# pyarrow: The maximum leaves NaN out, and the mean does not.
# Expected: NaN is a value, so that max, min, sum and mean all give NaN, as in NumPy and torch.
# Happens: max, min, quantile and max over groups skip NaN wherever it stands; sum, mean and stddev give NaN.
#   A column of NaN alone has a maximum of NaN. A check of the maximum does not notice the rows that spoil the
#   mean.
# Versions: pyarrow 26.0.1, Python 3.11; seen on 2026-11-28.
# Output seen:
#   pyarrow 26.0.1
#   max 1.0, min 1.0, median 1.0
#   sum nan, mean nan, stddev nan
#   max of NaN alone: nan
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" pyarrow==26.0.1
"$folder/env/bin/python" - <<'PYTHON'
import math

import pyarrow as pa
import pyarrow.compute as pc

print("pyarrow", pa.__version__)
for values in ([math.nan, 1.0], [1.0, math.nan]):
    array = pa.array(values)
    skipping = pc.max(array).as_py(), pc.min(array).as_py(), pc.quantile(array, 0.5)[0].as_py()
    keeping = pc.sum(array).as_py(), pc.mean(array).as_py(), pc.stddev(array).as_py()
    assert skipping == (1.0, 1.0, 1.0), f"changed: {skipping}"
    assert all(map(math.isnan, keeping)), f"changed: {keeping}"
print("max {}, min {}, median {}".format(*skipping))
print("sum {}, mean {}, stddev {}".format(*keeping))
alone = pc.max(pa.array([math.nan])).as_py()
print("max of NaN alone:", alone)
assert math.isnan(alone), f"changed: {alone}"
PYTHON
