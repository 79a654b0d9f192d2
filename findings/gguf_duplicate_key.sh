#!/usr/bin/env bash
# gguf: Adding a key twice overwrites it; adding a tensor twice raises.
# Expected: Both are errors of the same kind and raise, or both overwrite.
# Happens: The second value of a key replaces the first with a line in the log, also with a value of another
#   type. A tensor of the same name raises ValueError. An array whose items differ in type is accepted by
#   add_array and fails only when the file is written.
# Versions: gguf 0.19.0, numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   gguf 0.19.0
#   key: 2 of type UINT32
#   tensor: ValueError
#   mixed array: added, and ValueError when written
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" gguf==0.19.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import importlib.metadata
import logging
import tempfile

import numpy as np
from gguf import GGUFReader, GGUFWriter

logging.disable(logging.WARNING)
print("gguf", importlib.metadata.version("gguf"))


def write(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


with tempfile.TemporaryDirectory() as folder:
    writer = GGUFWriter(f"{folder}/a.gguf", "llama")
    writer.add_string("size", "one")
    writer.add_uint32("size", 2)
    writer.add_tensor("x", np.ones(2, np.float32))
    raises = False
    try:
        writer.add_tensor("x", np.ones(2, np.float32))
    except ValueError:
        raises = True
    write(writer)
    field = GGUFReader(f"{folder}/a.gguf").fields["size"]
    print("key:", field.contents(), "of type", field.types[0].name)
    assert (field.contents(), field.types[0].name) == (2, "UINT32"), "changed: the key"
    print("tensor: ValueError")
    assert raises, "changed: the tensor"
    writer = GGUFWriter(f"{folder}/b.gguf", "llama")
    writer.add_array("mixed", [1, 2.5])
    try:
        write(writer)
    except ValueError:
        print("mixed array: added, and ValueError when written")
    else:
        raise SystemExit("changed: the mixed array is written")
PYTHON
