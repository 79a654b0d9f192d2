#!/usr/bin/env bash
# torch: checkpointed activations inside of torch.func.functional_call are recomputed with other weights.
# Expected: Activation checkpointing does not change gradients, also if a module runs with computed weights.
# Happens: Backward recomputes the block after functional_call has put the module's own parameters back, and with
#   these. All gradients of the block and of the code that computed its weights are those of another function; no
#   error, no warning.
# Versions: torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-30.
# Output seen:
#   torch 2.15.0
#   gradient norm without checkpoint 5.0237, with checkpoint 0.5366
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" torch==2.15.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, is_checkpointed):
        super().__init__()
        self.inner, self.is_checkpointed = nn.Linear(3, 3), is_checkpointed

    def forward(self, x):
        if self.is_checkpointed:
            return checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)

    def run(self, x):
        return torch.tanh(self.inner(x)).square()


print("torch", torch.__version__.partition("+")[0])
norms = []
for is_checkpointed in (False, True):
    torch.manual_seed(0)
    block, shift, x = Block(is_checkpointed).double(), torch.ones(1, dtype=torch.float64), torch.randn(5, 3).double()
    shift.requires_grad_()
    weights = {name: parameter + shift for name, parameter in block.named_parameters()}
    functional_call(block, weights, (x,)).sum().backward()
    norms.append(shift.grad.abs().item())
print(f"gradient norm without checkpoint {norms[0]:.4f}, with checkpoint {norms[1]:.4f}")
assert abs(norms[0] - norms[1]) > 0.1, "changed"
PYTHON
