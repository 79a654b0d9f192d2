"""`torch.compile` for each layer of a model by itself."""

from typing import Any

from torch import nn


def compile_layers(layers: nn.ModuleDict, **options: Any) -> None:
    """Compile each layer in place, so the names of parameters stay.

    Layers that are alike share one compiled graph, so a model of a hundred layers compiles as fast as one of two; and
    between them FSDP can gather the next layer's parameters. Call it after `parallelize_tensor` and
    `checkpoint_layers`, before `parallelize_hsdp`.

    Args:
        layers: The layers.
        **options: Those of `torch.compile`, such as `backend` or `dynamic`.
    """
    for layer in layers.values():
        layer.compile(**options)
