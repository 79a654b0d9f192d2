"""Regional compilation: `torch.compile` for each layer of a model."""

from typing import Any

from torch import nn


def compile_layers(layers: nn.ModuleDict, **options: Any) -> None:
    """Compile each layer in place with the given options of `torch.compile`; parameter names stay the same.

    Identical layers share one compiled graph, so compile time does not grow with the number of layers. FSDP can
    all-gather the parameters of the next layer between graphs. Call this function after `parallelize_tensor` and
    `checkpoint_layers`, before `parallelize_hsdp`.
    """
    for layer in layers.values():
        layer.compile(**options)
