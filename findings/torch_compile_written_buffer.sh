#!/usr/bin/env bash
# torch: compiled gradients are wrong if forward reads a buffer that it also writes in place under `no_grad`.
# Expected: Compiled code has the gradients of the module that is not compiled.
# Happens: Backward reads the buffer itself, which has another value by then: a running scale that is halved gives half
#   of the gradient, with inductor and with aot_eager. The losses are right. It does not matter if forward reads the
#   buffer before or after the write, or a clone. A module that assigns a new tensor to the buffer has right gradients.
# Versions: torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-30. inductor needs a C++ compiler.
# Output seen:
#   torch 2.15.0
#   writes the buffer: {None: 8.0, 'aot_eager': 4.0, 'inductor': 4.0}
#   assigns a new tensor: {None: 8.0, 'aot_eager': 8.0, 'inductor': 8.0}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" torch==2.15.0 numpy==2.4.6
cat > "$folder/script.py" <<'PYTHON'
import torch
from torch import nn

print("torch", torch.__version__.partition("+")[0])


class Scaled(nn.Module):
    def __init__(self, writes):
        super().__init__()
        torch.manual_seed(0)
        self.writes, self.linear = writes, nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        y = self.linear(x) * self.scale.clone()
        with torch.no_grad():
            if self.writes:
                self.scale.mul_(0.5)
            else:
                self.scale = self.scale * 0.5
        return y


def norm(backend, writes):
    torch._dynamo.reset()
    module = Scaled(writes)
    run = module if backend is None else torch.compile(module, backend=backend)
    run(torch.ones(2, 4)).sum().backward()
    return round(module.linear.weight.grad.norm().item(), 4)


written, assigned = ({each: norm(each, writes) for each in (None, "aot_eager", "inductor")} for writes in (True, False))
print("writes the buffer:", written)
print("assigns a new tensor:", assigned)
assert set(assigned.values()) == {8.0}, "changed: a new tensor"
assert written == {None: 8.0, "aot_eager": 4.0, "inductor": 4.0}, "changed: a write"
PYTHON
"$folder/env/bin/python" "$folder/script.py" 2> /dev/null
