"""Adapters: modules that change the output of a layer with parameters of their own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from d9d_dist import canonical_name

DEFAULT_ADAPTER = "default"
"""Default name of the adapters that `inject` adds."""

_CHILD = "adapter"


class Adapter(nn.Module, ABC):
    """Base class of modules that change the output of a layer with parameters of their own.

    The layer is an argument of the methods, not an attribute, so its parameters are not registered twice.

    Attributes:
        is_active: True if the layer computes with this adapter; False if the adapter has no effect. Set by
            `use_adapter` and `adapters_off`. At most one adapter of a layer is active.
    """

    is_active: bool = True

    @abstractmethod
    def forward(self, layer: nn.Module, inner: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Compute the output of the layer with the adapter; replaces the layer's forward.

        Args:
            layer: The layer. Its parameters are plain tensors here: full tensors under FSDP, this rank's shards under
                tensor parallelism.
            inner: Original forward of the layer.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call. An adapter of layers without keyword arguments need not accept any.

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
        """Return the adapter's placements under tensor parallelism of the layer; see `FollowsWeight`."""
        return {}

    def prepare_tensor(self, weight: Placement, mesh: DeviceMesh) -> None:
        """Prepare the adapter after tensor parallelism has sharded the layer; see `FollowsWeight`."""


def child_name(adapter: str) -> str:
    """Return the name of the child module that holds a layer's adapter of this name: `adapter` or `adapter_<name>`."""
    return _CHILD if adapter == DEFAULT_ADAPTER else f"{_CHILD}_{adapter}"


def attach(adapter: Adapter, layer: nn.Module, name: str = DEFAULT_ADAPTER) -> None:
    """Add an adapter to a layer, in place, in the layer's mode (train or eval). Only the first adapter is active."""
    has_adapters = bool(adapters_of(layer))
    if adapter.training != layer.training:
        adapter.train(layer.training)
    adapter.is_active = not has_adapters
    layer.add_module(child_name(name), adapter)
    if not has_adapters:
        # The instance attribute shadows the class's forward. The adapter is called as a module, so its hooks run.
        layer.forward = partial(_adapted_forward, layer, layer.forward)


def adapters_of(layer: nn.Module) -> dict[str, Adapter]:
    """Return the adapters of a layer by name of the child module."""
    return {name: child for name, child in layer._modules.items() if isinstance(child, Adapter)}


def all_adapters(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """Yield the adapters of all names in a model, with the names of their child modules."""
    for layer in model.modules():
        yield from adapters_of(layer).items()


def adapter_parameters(model: nn.Module) -> set[int]:
    """Return the `id` of each parameter that belongs to an adapter of any name."""
    return {id(parameter) for _, adapter in all_adapters(model) for parameter in adapter.parameters()}


def adapted_layers(model: nn.Module, adapter: str = DEFAULT_ADAPTER) -> dict[str, tuple[nn.Module, Adapter]]:
    """Return the layers that have the named adapter, each with this adapter.

    Keys are layer names in the whole model, even if `model` is a pipeline stage.
    """
    names = {id(parameter): canonical_name(name) for name, parameter in model.named_parameters()}
    layers: dict[str, tuple[nn.Module, Adapter]] = {}
    for layer in model.modules():
        found = layer._modules.get(child_name(adapter))
        if isinstance(found, Adapter):
            name, parameter = next(iter(found.named_parameters()))
            of_layer = names[id(parameter)].removesuffix(f"{child_name(adapter)}.{name}").removesuffix(".")
            layers[of_layer] = layer, found
    return layers


def _adapted_forward(layer: nn.Module, inner: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Call the active adapter of a layer, or else the layer's own forward."""
    for child in layer._modules.values():
        if isinstance(child, Adapter) and child.is_active:
            return child(layer, inner, *args, **kwargs)
    return inner(*args, **kwargs)
