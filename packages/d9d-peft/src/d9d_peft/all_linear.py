"""Linear layers of a model, and the `Conv1D` of `transformers`, a linear layer with a transposed weight."""

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn


def linear_layers(model: nn.Module) -> list[str]:
    """Return the names of all layers that are linear, see `is_linear`; the heads and no grouped experts."""
    return [name for name, module in model.named_modules() if name and is_linear(module)]


@torch.no_grad()
def is_linear(layer: nn.Module) -> bool:
    """Return True for `nn.Linear`, the `Conv1D` of `transformers`, and a subclass whose forward computes the same."""
    forward: Any = type(layer).forward
    if not isinstance(layer, nn.Linear) or forward is nn.Linear.forward or type(layer.weight) is not nn.Parameter:
        return isinstance(layer, nn.Linear) or is_conv1d(layer)
    probe, x, weight = copy.copy(layer), *torch.tensor([[[1.0, -2], [-3, 0.5]], [[0.5, -1], [2, -0.25]]], device="cpu")
    probe._parameters = {"weight": nn.Parameter(weight), "bias": None}
    try:
        return torch.equal(forward(probe, x), nn.functional.linear(x, weight))
    except Exception:  # its forward needs the layer's own sizes
        return False


def is_conv1d(layer: nn.Module) -> bool:
    """Return True for a `Conv1D` of `transformers`, whose weight is [in, out]. Does not import `transformers`."""
    module: Any = sys.modules.get("transformers.pytorch_utils")
    return module is not None and isinstance(layer, module.Conv1D)


def weight_of(layer: nn.Module) -> Tensor:
    """Return the weight [..., out, in] of a layer; a view of the parameter.

    Parallelism may have replaced the parameter by a plain tensor while the layer runs.
    """
    weight = layer._parameters["weight"]
    assert weight is not None
    return weight.T if is_conv1d(layer) else weight
