#!/usr/bin/env bash
# pyarrow: x != 1 drops the rows without a value, and 'not in [1]' keeps them.
# Expected: Both are null for a missing value, as in SQL, so that both drop the row.
# Happens: isin() is false for a missing value, never null; its negation is true. The two spellings of one
#   filter give different rows, in memory and from Parquet. isin([1, None]) finds missing values.
# Versions: pyarrow 26.0.1, Python 3.11; seen on 2026-11-28.
# Output seen:
#   pyarrow 26.0.1
#   x != 1:           [2]
#   not (x == 1):     [2]
#   x not in [1]:     [2, None]
#   x in [1, None]:   [1, None]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" pyarrow==26.0.1
"$folder/env/bin/python" - <<'PYTHON'
import pyarrow as pa
import pyarrow.compute as pc

print("pyarrow", pa.__version__)
table, x = pa.table({"x": [1, 2, None]}), pc.field("x")
cases = {
    "x != 1": (x != 1, [2]),
    "not (x == 1)": (~(x == 1), [2]),
    "x not in [1]": (~x.isin([1]), [2, None]),
    "x in [1, None]": (x.isin([1, None]), [1, None]),
}
for name, (condition, stated) in cases.items():
    seen = table.filter(condition)["x"].to_pylist()
    print(f"{name + ':':17}", seen)
    assert seen == stated, f"changed: {name}"
PYTHON
