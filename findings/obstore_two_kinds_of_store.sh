#!/usr/bin/env bash
# obstore: The local and the memory store list in other orders, and only one of them can delete what is not
#   there.
# Expected: All stores of the interface list keys in lexical order, as object stores do, and delete without an
#   error.
# Happens: The memory store is sorted; the local one lists as the file system does, so that the last key is
#   not the newest step, also with offset, which compares keys. Deleting a key that does not exist raises in
#   the local store alone. In both, a prefix matches whole parts of a key: 'step-1' finds step-1/x and not the
#   ten keys of step-10 to step-19.
# Versions: obstore 0.12.1, Python 3.11; seen on 2026-11-28.
# Output seen:
#   obstore 0.12.1
#   memory: sorted True, prefix step-1 finds 1, deleting nothing: no error
#   local: sorted False, prefix step-1 finds 1, deleting nothing: FileNotFoundError
#   with offset step-50: 54 of 100 keys in both
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" obstore==0.12.1
"$folder/env/bin/python" - <<'PYTHON'
import importlib.metadata
import random
import tempfile

import obstore
from obstore.store import LocalStore, MemoryStore

print("obstore", importlib.metadata.version("obstore"))
keys = [f"step-{number}/x" for number in range(100)]
random.Random(0).shuffle(keys)


def listed(store, **options):
    return [each["path"] for batch in obstore.list(store, **options) for each in batch]


with tempfile.TemporaryDirectory() as folder:
    results = []
    for name, store in (("memory", MemoryStore()), ("local", LocalStore(folder))):
        for key in keys:
            obstore.put(store, key, b"x")
        found = listed(store)
        error = "no error"
        try:
            obstore.delete(store, "nothing")
        except FileNotFoundError:
            error = "FileNotFoundError"
        assert sorted(found) == sorted(keys), f"changed: the keys of {name}"
        results.append(
            (found == sorted(found), len(listed(store, prefix="step-1")), error, len(listed(store, offset="step-50")))
        )
        print("{}: sorted {}, prefix step-1 finds {}, deleting nothing: {}".format(name, *results[-1]))
above = sum(key > "step-50" for key in keys)
print(f"with offset step-50: {above} of 100 keys in both")
assert results == [(True, 1, "no error", above), (False, 1, "FileNotFoundError", above)], f"changed: {results}"
PYTHON
