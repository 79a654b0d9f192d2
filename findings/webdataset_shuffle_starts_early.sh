#!/usr/bin/env bash
# webdataset: shuffle(1000) yields its first sample after 100 and is a small shuffle at the start.
# Expected: A shuffle buffer is filled before it yields, as in datasets, TensorFlow and torchdata.
# Happens: It yields from the 100 samples of its second argument on, and grows by one sample for each that it
#   yields. The first 50 samples of a shard set all come from its first 200, in every epoch and every worker.
# Versions: webdataset 1.0.2, numpy 2.4.6, PyYAML 6.0.3, Python 3.11; seen on 2026-11-28.
# Output seen:
#   webdataset 1.0.2
#   read before the first sample: 100
#   origin of the first 50 samples: all below 200
#   with initial=1000: read before the first sample: 1000
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" webdataset==1.0.2 numpy==2.4.6 PyYAML==6.0.3
"$folder/env/bin/python" - <<'PYTHON'
import importlib.metadata
import random

from webdataset import filters

print("webdataset", importlib.metadata.version("webdataset"))


def first_samples(**options):
    read = []

    def source():
        for number in range(3000):
            read.append(number)
            yield {"__key__": number}

    samples = filters.shuffle(1000, rng=random.Random(0), **options)(source())
    first = next(samples)["__key__"]
    return len(read), [first] + [next(samples)["__key__"] for _ in range(49)]


num_read, samples = first_samples()
print("read before the first sample:", num_read)
print("origin of the first 50 samples: all below 200")
assert num_read == 100 and max(samples) < 200, f"changed: {num_read}, {max(samples)}"
num_read, _ = first_samples(initial=1000)
print("with initial=1000: read before the first sample:", num_read)
assert num_read == 1000, f"changed: {num_read}"
PYTHON
