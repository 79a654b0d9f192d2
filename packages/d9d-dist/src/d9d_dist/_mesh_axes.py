"""Axis names of meshes and parameters."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from d9d_dist.errors import UserError


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the axis names of a mesh. All meshes of a `DistributedContext` have names."""
    assert mesh.mesh_dim_names is not None, "expected a mesh with named axes"
    return mesh.mesh_dim_names


def axes_of(parameter: torch.Tensor) -> tuple[str, ...]:
    """Return the names of the mesh axes of a DTensor; an empty tuple for a plain tensor."""
    return axis_names(parameter.device_mesh) if isinstance(parameter, DTensor) else ()


def only_axis(mesh: DeviceMesh, *, example: str) -> str:
    """Return the axis name of a one-axis mesh; raise `UserError`, with `example` as the expected axis, for others."""
    names = mesh.mesh_dim_names or ()
    if len(names) != 1:
        raise UserError(
            f"got a mesh with the axes ({', '.join(names)}); expected exactly one. Slice it: mesh[{example!r}]."
        )
    return names[0]
