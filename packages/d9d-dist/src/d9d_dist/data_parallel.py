"""Replicated, fully sharded and hybrid sharded data parallelism: FSDP2 underneath, gradients always *summed*.

torch's FSDP divides gradients by the number of ranks. That is right only if every rank's loss is a mean over equally
many elements, so here nothing is divided on the way: ranks add their gradients up, and the sum is divided once by the
global weight (`scale_gradients_`).
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of the data-parallel machinery; `None` keeps the parameter's own dtype.

    Attributes:
        compute: What parameters are cast to for forward and backward.
        reduce: What gradients are cast to while ranks add them up.
        cast_inputs: Whether floating-point inputs of forward are cast to the compute dtype too. Inner blocks that take
            float32 tables beside their activations, such as rotary ones, want False.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    cast_inputs: bool = True


def parallelize_hsdp(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    shard_axis: str,
    precision: Precision | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Shard a module's parameters over one axis of a mesh and replicate them over its other axes, in place.

    Parameters become DTensors, `Shard(0)` on the shard axis, `Replicate()` on the others of more than one rank.
    Forward and backward all-gather them over the shard axis; gradients are reduce-scattered over it and all-reduced
    over the rest, as sums. Call it on inner blocks first and on the whole model last. On a mesh of one rank, and with
    no precision asked for, there is nothing to do, and the module is left as it is.

    Args:
        module: The module to parallelise; parameters that an inner call took already are left alone.
        mesh: A mesh with named axes, all of them data parallel for this module.
        shard_axis: The axis that shares the parameters out.
        precision: dtypes of computation and reduction.
        reshard_after_forward: Whether to free the gathered parameters after forward and gather them again in backward.

    Raises:
        ValueError: If the mesh has no axis of that name, or more than one axis to replicate over.
    """
    names = mesh.mesh_dim_names or ()
    if shard_axis not in names:
        raise ValueError(f"got shard_axis = {shard_axis!r}; expected one of the mesh's axes: {', '.join(names)}.")
    if mesh.size() == 1 and precision is None:
        return
    dtypes = precision or Precision()
    fully_shard(
        module,
        mesh=_replicate_and_shard(mesh, shard_axis),
        mp_policy=MixedPrecisionPolicy(
            param_dtype=dtypes.compute, reduce_dtype=dtypes.reduce, cast_forward_inputs=dtypes.cast_inputs
        ),
        reshard_after_forward=reshard_after_forward,
    )
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    # Otherwise a factor of 1 is applied by a pre-multiplying reduction, which gloo does not have.
    module.set_force_sum_reduction_for_comms(True)


def parallelize_fsdp(module: nn.Module, mesh: DeviceMesh, *, precision: Precision | None = None) -> None:
    """Shard a module's parameters over all ranks of a one-axis mesh, in place; see `parallelize_hsdp`.

    Raises:
        ValueError: If the mesh does not have exactly one named axis.
    """
    parallelize_hsdp(module, mesh, shard_axis=_only_axis(mesh), precision=precision)


def parallelize_replicate(module: nn.Module, mesh: DeviceMesh, *, precision: Precision | None = None) -> None:
    """Replicate a module's parameters over all ranks of a one-axis mesh, in place; see `parallelize_hsdp`.

    Raises:
        ValueError: If the mesh does not have exactly one named axis.
    """
    axis = _only_axis(mesh)
    if mesh.size() == 1 and precision is None:
        return
    # A replica is a shard among one: FSDP2 then has nothing to gather and only adds the gradients up.
    # torch has no public way to give a mesh an axis of one rank.
    alone = mesh._unflatten(0, (mesh.size(), 1), (axis, f"{axis}_alone"))
    parallelize_hsdp(module, alone, shard_axis=f"{axis}_alone", precision=precision, reshard_after_forward=False)


def _only_axis(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or ()
    if len(names) != 1:
        raise ValueError(
            f"got a mesh with the axes ({', '.join(names)}); expected exactly one. Slice it: mesh['axis']."
        )
    return names[0]


def _replicate_and_shard(mesh: DeviceMesh, shard_axis: str) -> DeviceMesh:
    """FSDP2's view of a mesh: [shard], or [replicate, shard]; axes of one rank do not count."""
    names = mesh.mesh_dim_names or ()
    replicate = [name for name in names if name != shard_axis and mesh[name].size() > 1]
    if not replicate:
        return mesh[shard_axis]
    if len(replicate) > 1 or names.index(replicate[0]) > names.index(shard_axis):
        raise ValueError(
            f"got a mesh with the axes ({', '.join(names)}) to replicate over {' and '.join(replicate)}; "
            "expected at most "
            f"one axis of more than one rank to replicate over, and before the shard axis {shard_axis!r}. "
            "Use one replicate degree only."
        )
    return mesh[replicate[0], shard_axis]
