"""Symmetric memory: device buffers that the kernels of all ranks of a group can access, e.g. over NVLink."""

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist.collectives._mesh_axes import axis_names, only_axis
from d9d_dist.errors import UserError


def enable_symmetric_memory(mesh: DeviceMesh, *, setting: str) -> None:
    """Allow torch's kernels to use symmetric memory on a one-axis mesh. Collective over the axis; waits for the device.

    `setting` is the name of the setting that requires symmetric memory, for error messages.

    Raises:
        UserError: If torch has no symmetric memory for the devices, or a device cannot access another rank's memory.
    """
    only_axis(mesh, example="tp")
    (axis,), group, device = axis_names(mesh), mesh.get_group(), torch.device(mesh.device_type)
    advice = f"Expected devices connected by NVLink. Remove {setting}."
    if symmetric_memory._SymmetricMemory.get_backend(device) is None:
        raise UserError(
            f"{setting}: kernels must access the memory of the other ranks of the {axis} axis, which torch does not "
            f"support for devices of the type {device.type}. {advice}"
        )
    if not symmetric_memory.is_symm_mem_enabled_for_group(
        group.group_name
    ):  # newer versions of torch enable every group
        symmetric_memory.enable_symm_mem_for_group(group.group_name)  # ty: ignore[deprecated]
    try:
        symmetric_memory.rendezvous(symmetric_memory.empty([1], device=device), group)
    except RuntimeError as error:
        raise UserError(
            f"{setting}: kernels cannot access the memory of the other ranks of the {axis} axis: {error}. {advice}"
        ) from error
