#!/usr/bin/env bash
# pyarrow: A filter on a Parquet file loses the rows with NaN that it finds in memory.
# Expected: Reading with a filter equals reading all and filtering: is_nan() finds the NaN in the file, and so
#   does x != 3.
# Happens: Statistics of a row group leave NaN out. If the other values of the group all fail the filter, the
#   group is skipped with its NaN, and if all pass, count_rows() counts the NaN too. Filters for NaN or for
#   other values than one thus find nothing; a group of NaN alone has no statistics and is read.
# Versions: pyarrow 26.0.1, Python 3.11; seen on 2026-11-28.
# Output seen:
#   pyarrow 26.0.1, the column is 3, nan, 3
#   is_nan():       1 row in memory, 0 from the file
#   x != 3:         1 row in memory, 0 from the file
#   x < 4:          2 rows from the file, count_rows() says 3
#   only NaN, is_nan(): 2 rows in memory, 2 from the file
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" pyarrow==26.0.1
"$folder/env/bin/python" - <<'PYTHON'
import tempfile

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

print("pyarrow", pa.__version__ + ", the column is 3, nan, 3")
x = pc.field("x")


def rows(values, condition):
    table = pa.table({"x": values})
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/x.parquet"
        pq.write_table(table, path)
        counted = ds.dataset(path).count_rows(filter=condition)
        return table.filter(condition).num_rows, pq.read_table(path, filters=condition).num_rows, counted


mixed, alone = [3.0, float("nan"), 3.0], [float("nan")] * 2
is_nan, unequal, less = rows(mixed, x.is_nan()), rows(mixed, x != 3.0), rows(mixed, x < 4.0)
print("is_nan():       {} row in memory, {} from the file".format(*is_nan))
print("x != 3:         {} row in memory, {} from the file".format(*unequal))
print("x < 4:          {1} rows from the file, count_rows() says {2}".format(*less))
assert is_nan == unequal == (1, 0, 0), f"changed: {is_nan}, {unequal}"
assert less == (2, 2, 3), f"changed: {less}"
only = rows(alone, x.is_nan())
print("only NaN, is_nan(): {} rows in memory, {} from the file".format(*only))
assert only == (2, 2, 2), f"changed: {only}"
PYTHON
