"""What meshes and parameters say about their axes: the names, and that there is only one where one is meant."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from d9d_dist.errors import UserError


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of a mesh's axes, which all meshes of a context have."""
    assert mesh.mesh_dim_names is not None, "expected a mesh with named axes"
    return mesh.mesh_dim_names


def axes_of(parameter: torch.Tensor) -> tuple[str, ...]:
    """The names of the mesh axes that a parameter is placed on."""
    return axis_names(parameter.device_mesh) if isinstance(parameter, DTensor) else ()


def only_axis(mesh: DeviceMesh, *, example: str) -> str:
    """The name of the axis of a mesh that has one.

    Args:
        mesh: Any mesh.
        example: The axis that the message shows how to slice to.

    Raises:
        UserError: If there is not exactly one named axis.
    """
    names = mesh.mesh_dim_names or ()
    if len(names) != 1:
        raise UserError(
            f"got a mesh with the axes ({', '.join(names)}); expected exactly one. Slice it: mesh[{example!r}]."
        )
    return names[0]
