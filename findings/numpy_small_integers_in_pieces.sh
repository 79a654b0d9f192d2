#!/usr/bin/env bash
# numpy: Drawing 8-bit integers or booleans in pieces does not continue the stream.
# Expected: A generator is a stream: two draws of three numbers equal one draw of six.
# Happens: This holds for 32- and 64-bit integers and for floats. Each call for uint8, uint16 or bool splits
#   32-bit words and throws the rest of its last word away, so that the numbers depend on the size of the
#   calls. A run that resumes with another batch size draws other masks.
# Versions: numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   numpy 2.4.6
#   uint8 in pieces: [74, 101, 151, 161, 183, 11]
#   uint8 at once:   [74, 101, 151, 169, 161, 183]
#   int64, uint32, float32 and normal: the pieces equal one draw
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import numpy as np

print("numpy", np.__version__)


def draw(sizes, function):
    generator = np.random.default_rng(0)
    return np.concatenate([function(generator, size) for size in sizes]).tolist()


def uint8(generator, size):
    return generator.integers(0, 200, size, dtype=np.uint8)


pieces, once = draw([3, 3], uint8), draw([6], uint8)
print("uint8 in pieces:", pieces)
print("uint8 at once:  ", once)
assert pieces[:3] == once[:3] and pieces[3:] != once[3:], "uint8: the pieces continue the stream now"
narrow = {
    "uint16": lambda generator, size: generator.integers(0, 200, size, dtype=np.uint16),
    "bool": lambda generator, size: generator.integers(0, 2, size, dtype=bool),
}
for name, function in narrow.items():
    assert draw([3, 13], function) != draw([16], function), f"{name}: the pieces continue the stream now"
streams = {
    "int64": lambda generator, size: generator.integers(0, 200, size),
    "uint32": lambda generator, size: generator.integers(0, 200, size, dtype=np.uint32),
    "float32": lambda generator, size: generator.random(size, dtype=np.float32),
    "normal": lambda generator, size: generator.standard_normal(size),
}
for name, function in streams.items():
    assert draw([3, 3], function) == draw([6], function), f"{name}: the pieces do not continue the stream any more"
print("int64, uint32, float32 and normal: the pieces equal one draw")
PYTHON
