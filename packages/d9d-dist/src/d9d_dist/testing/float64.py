"""Float64 runs of a reference implementation that computes some parts in float32."""

import copy
from typing import Any, final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


@final
class KeepFloat64(TorchDispatchMode):
    """Context in which a conversion from float64 to float32 keeps float64, in forward and backward.

    Many models convert to float32 in norms, routers and softmax. In float64 the conversion would lose precision, so
    a comparison could not be tighter than 1e-7. Conversions from integers, such as positions, are not changed.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, with the output dtype of a conversion changed to float64 if the input is float64."""
        kwargs = kwargs or {}
        is_conversion = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.float32
        if is_conversion and args[0].dtype == torch.float64:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def in_float64(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the output of a float64 copy of a reference model, under `KeepFloat64`, without gradients."""
    with torch.no_grad(), KeepFloat64():
        return copy.deepcopy(model).double()(*args, **kwargs)
