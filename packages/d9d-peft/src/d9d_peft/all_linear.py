"""Linear layers of a model, and the `Conv1D` of `transformers`, a linear layer with a transposed weight."""

import sys

from torch import Tensor, nn


def linear_layers(model: nn.Module) -> list[str]:
    """Return the names of all linear layers, as `target_modules="all-linear"` of peft matches, heads included.

    These are `nn.Linear` and the `Conv1D` of `transformers`. Grouped experts are not linear layers.
    """
    return [
        name for name, module in model.named_modules() if name and (isinstance(module, nn.Linear) or is_conv1d(module))
    ]


def is_conv1d(layer: nn.Module) -> bool:
    """Return True for a `Conv1D` of `transformers`, whose weight is [in, out]. Does not import `transformers`."""
    if "transformers" not in sys.modules:
        return False
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, Conv1D)


def weight_of(layer: nn.Module) -> Tensor:
    """Return the weight [..., out, in] of a layer; a view of the parameter.

    Parallelism may have replaced the parameter by a plain tensor while the layer runs.
    """
    weight = layer._parameters["weight"]
    assert weight is not None
    return weight.T if is_conv1d(layer) else weight
