"""Protocol of modules inside a layer, such as low-rank adapters, that are split in the same way as the layer's weight.

A plan for `parallelize_tensor` names only layers. Modules that a fine-tuning method adds to a layer define their own
placements.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

WEIGHT = "weight"
"""Name of the layer's parameter whose placement is followed."""


@runtime_checkable
class FollowsWeight(Protocol):
    """Child of a layer that tensor parallelism splits together with the layer's weight."""

    def tensor_placements(self, weight: Placement) -> Mapping[str, Placement]:
        """Return the placements of this module's own parameters on the mesh axis, by name; others are replicated.

        `weight` is the placement of the layer's weight.
        """
        ...

    def prepare_tensor(self, weight: Placement, mesh: DeviceMesh) -> None:
        """Prepare this module's forward, after the layer's parameters are distributed over an axis larger than 1."""
        ...


def followers(layer: nn.Module) -> Iterator[tuple[str, nn.Module, FollowsWeight]]:
    """Yield each child that follows the layer's weight: name, the child as a module, and as a `FollowsWeight`."""
    for name, child in layer.named_children():
        if isinstance(child, FollowsWeight):
            yield name, child, child
