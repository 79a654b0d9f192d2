"""The contract of an adapter: a module inside a layer, as its child `adapter`, that has a say in the layer's forward.

The layer stays what it was: the same object, with the same parameters under the same names. So what was known of the
model holds still: plans for tensor parallelism, mappers of checkpoints, tied weights, initial values.
"""

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
"""The name of the child."""


class Adapter(nn.Module, ABC):
    """Changes what a layer computes, by parameters of its own; derive from it to make one for a method of your own.

    It does not hold the layer: it is given it, so that the layer's parameters belong to the layer alone.
    """

    @abstractmethod
    def forward(self, layer: nn.Module, inner: Callable[..., Tensor], *args: Any) -> Tensor:
        """Take the place of the layer's forward.

        Args:
            layer: The layer. Its parameters are plain tensors here: where it is sharded, whole or this rank's part.
            inner: The forward whose place is taken.
            args: What the layer was called with.

        Returns:
            What the layer would return, changed.
        """

    @abstractmethod
    def reset_parameters(self) -> None:
        """Set every parameter in place such that the layer computes as it would without the adapter."""

    @abstractmethod
    def merge_(self, layer: nn.Module) -> None:
        """Fold what it does into the layer's weight, in place, and reset itself so that it does nothing any more.

        Collective where parameters are sharded.

        Args:
            layer: The layer, materialised.
        """

    def tensor_placements(self, weight: Placement) -> Mapping[str, Placement]:
        """How its parameters are split where tensor parallelism splits the layer; see `d9d_dist.FollowsWeight`."""
        return {}

    def prepare_tensor(self, weight: Placement, mesh: DeviceMesh) -> None:
        """Learn that tensor parallelism has split the layer; see `d9d_dist.FollowsWeight`."""


@final
@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A layer and what stands in it."""

    layer: nn.Module
    adapter: Adapter


def attach(adapter: Adapter, layer: nn.Module) -> None:
    """Put an adapter into a layer, in place."""
    layer.add_module(ADAPTER, adapter)
    # The instance's forward hides the class's. Called as a module, the adapter has its own hooks around it.
    layer.forward = partial(_adapted, layer, layer.forward)


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLayer]:
    """The layers of a model that have an adapter, by their names in the whole model, also if this is a part of it."""
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


def _adapted(layer: nn.Module, inner: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """The forward of a layer with an adapter."""
    adapter = layer._modules[ADAPTER]
    assert adapter is not None
    return adapter(layer, inner, *args, **kwargs)
