"""What stands inside a layer and computes with it, such as a low-rank adapter, is split as the layer's weight is.

A plan for `parallelize_tensor` names layers. It knows nothing of what a fine-tuning method has put into them, and need
not: whatever is put there says itself how it follows the weight.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

WEIGHT = "weight"
"""The name of the parameter that is followed."""


@runtime_checkable
class FollowsWeight(Protocol):
    """A module, child of a layer that a tensor-parallel style splits, whose parameters have to be split with it."""

    def tensor_placements(self, weight: Placement) -> Mapping[str, Placement]:
        """How its own parameters are placed on the mesh axis, by name; those left out are replicated.

        Args:
            weight: How the layer's weight is placed.
        """
        ...

    def prepare_tensor(self, weight: Placement, mesh: DeviceMesh) -> None:
        """Learn that the layer is split, once its parameters are.

        Args:
            weight: How the layer's weight is placed.
            mesh: The mesh axis, of more than one rank.
        """
        ...


def followers(layer: nn.Module) -> Iterator[tuple[str, nn.Module, FollowsWeight]]:
    """The children of a layer that follow its weight: name, the child, and the same as what it is here."""
    for name, child in layer.named_children():
        if isinstance(child, FollowsWeight):
            yield name, child, child
