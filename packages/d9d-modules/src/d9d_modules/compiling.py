"""Regional compilation: `torch.compile` for each layer of a model."""

from typing import Any

from torch import nn


def compile_layers(layers: nn.ModuleDict, **options: Any) -> None:
    """Compile each layer in place; parameter names stay the same.

    Identical layers share one compiled graph, so compile time does not grow with the number of layers. FSDP can
    all-gather the parameters of the next layer between graphs. Call it after `parallelize_tensor` and
    `checkpoint_layers`, before `parallelize_hsdp`.

    Args:
        layers: Layers to compile.
        **options: Options of `torch.compile`, such as `backend` or `dynamic`.
    """
    for layer in layers.values():
        layer.compile(**options)
