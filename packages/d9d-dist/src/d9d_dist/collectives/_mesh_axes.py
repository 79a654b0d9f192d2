"""Axis names of meshes and parameters."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from d9d_dist.collectives.consensus import name_ranks
from d9d_dist.errors import UserError


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the axis names of a mesh. Axes of a mesh without names, as torch creates, get the names of their ranks."""
    if mesh.mesh_dim_names is not None:
        return mesh.mesh_dim_names
    return tuple(name_ranks(dist.get_process_group_ranks(mesh.get_group(axis))) for axis in range(mesh.ndim))


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
