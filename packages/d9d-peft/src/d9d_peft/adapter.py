"""Adapters: modules that change the output of a layer with parameters of their own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from d9d_dist import canonical_name

ADAPTER = "adapter"
"""Name of the child module."""


class Adapter(nn.Module, ABC):
    """Base class of modules that change the output of a layer with parameters of their own.

    The layer is an argument of the methods, not an attribute, so its parameters are not registered twice.
    """

    @abstractmethod
    def forward(self, layer: nn.Module, inner: Callable[..., Tensor], *args: Any) -> Tensor:
        """Compute the output of the layer with the adapter; replaces the layer's forward.

        Args:
            layer: The layer. Its parameters are plain tensors here: full tensors under FSDP, this rank's shards under
                tensor parallelism.
            inner: Original forward of the layer.
            args: Arguments of the call.

        Returns:
            The adapted output, with the shape and dtype of the layer's output.
        """

    @abstractmethod
    def reset_parameters(self) -> None:
        """Initialize all parameters in place such that the adapter has no effect."""

    @abstractmethod
    def merge_(self, layer: nn.Module) -> None:
        """Merge the adapter into the materialized layer's parameters, in place, and reset it to have no effect.

        Collective if parameters are sharded.
        """

    def tensor_placements(self, weight: Placement) -> Mapping[str, Placement]:
        """Return the adapter's placements under tensor parallelism of the layer; see `d9d_dist.FollowsWeight`."""
        return {}

    def prepare_tensor(self, weight: Placement, mesh: DeviceMesh) -> None:
        """Prepare the adapter after tensor parallelism has sharded the layer; see `d9d_dist.FollowsWeight`."""


@final
@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """Layer and its adapter."""

    layer: nn.Module
    adapter: Adapter


def attach(adapter: Adapter, layer: nn.Module) -> None:
    """Add an adapter to a layer, in place."""
    layer.add_module(ADAPTER, adapter)
    # The instance attribute shadows the class's forward. The adapter is called as a module, so its own hooks run.
    layer.forward = partial(_adapted_forward, layer, layer.forward)


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLayer]:
    """Return the layers with adapters by name in the whole model, also if `model` is a pipeline stage."""
    names = {id(parameter): canonical_name(name) for name, parameter in model.named_parameters()}
    layers: dict[str, AdaptedLayer] = {}
    for layer in model.modules():
        adapter = layer._modules.get(ADAPTER)
        if isinstance(adapter, Adapter):
            name, parameter = next(iter(adapter.named_parameters()))
            layers[names[id(parameter)].removesuffix(f"{ADAPTER}.{name}").removesuffix(".")] = AdaptedLayer(
                layer, adapter
            )
    return layers


def _adapted_forward(layer: nn.Module, inner: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Call the adapter of a layer, in place of the layer's forward."""
    adapter = layer._modules[ADAPTER]
    assert adapter is not None
    return adapter(layer, inner, *args, **kwargs)
