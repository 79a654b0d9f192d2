#!/usr/bin/env bash
# torch: torch.compile fails at a slice of a weight whose gradient has another dtype.
# Expected: A parameter in bfloat16 with grad_dtype = float32, which sums gradients of microbatches exactly, compiles
#   whether or not it already has a gradient; no compiled forward reads the gradient.
# Happens: Code that receives a view of the parameter ends with an InternalTorchDynamoError as soon as .grad exists. Code
#   that uses the parameter itself is not compiled: a graph break, without a warning. Both happen only when code is
#   compiled again after the first microbatch, for example because its rows are shorter.
# Versions: torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-30.
# Output seen:
#   torch 2.15.0
#   parameter: graphs compiled {'first microbatch': 1, 'second microbatch': 0}
#   view: graphs compiled {'first microbatch': 1, 'second microbatch': 'InternalTorchDynamoError'}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" torch==2.15.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import torch
from torch import nn
from torch._dynamo.utils import counters

print("torch", torch.__version__.partition("+")[0])
seen = {}
for name, rows in (("parameter", slice(None)), ("view", slice(2))):
    torch._dynamo.reset()
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    product = torch.compile(lambda x, w: x @ w.T, backend="aot_eager", dynamic=False)
    seen[name] = {}
    for microbatch, length in (("first microbatch", 3), ("second microbatch", 2)):
        counters.clear()
        x = torch.ones(length, 4, dtype=torch.bfloat16)
        try:
            product(x, weight[rows] if name == "view" else weight).sum().backward()
            seen[name][microbatch] = counters["stats"]["unique_graphs"]
        except Exception as error:
            seen[name][microbatch] = type(error).__name__
    print(f"{name}: graphs compiled {seen[name]}")
expected = {"parameter": 0, "view": "InternalTorchDynamoError"}
assert {name: each["second microbatch"] for name, each in seen.items()} == expected, f"changed: {seen}"
assert all(each["first microbatch"] == 1 for each in seen.values()), f"changed: {seen}"
PYTHON
