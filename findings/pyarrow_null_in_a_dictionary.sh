#!/usr/bin/env bash
# pyarrow: A null in the values of a dictionary array is null for one half of the functions.
# Expected: A row that points at a null value is a null row everywhere.
# Happens: is_null(), is_valid() and fill_null() take it for null; null_count, count() and drop_null() look at
#   the indices alone. So drop_null() leaves a None, and null_count of the same rows as strings is another.
# Versions: pyarrow 26.0.1, Python 3.11; seen on 2026-11-28.
# Output seen:
#   pyarrow 26.0.1, rows 'a', null value, null index
#   null_count 1, is_null [False, True, True], is_valid [True, False, False]
#   drop_null ['a', None]
#   null_count as strings 2
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" pyarrow==26.0.1
"$folder/env/bin/python" - <<'PYTHON'
import pyarrow as pa

print("pyarrow", pa.__version__ + ", rows 'a', null value, null index")
array = pa.DictionaryArray.from_arrays([0, 1, None], ["a", None])
seen = array.null_count, array.is_null().to_pylist(), array.is_valid().to_pylist()
print("null_count {}, is_null {}, is_valid {}".format(*seen))
dropped, as_strings = array.drop_null().to_pylist(), array.cast(pa.string()).null_count
print("drop_null", dropped)
print("null_count as strings", as_strings)
assert seen == (1, [False, True, True], [True, False, False]), f"changed: {seen}"
assert dropped == ["a", None] and as_strings == 2, f"changed: {dropped}, {as_strings}"
PYTHON
