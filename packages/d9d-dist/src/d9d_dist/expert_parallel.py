"""Expert parallelism: experts are sharded over `ep_shard`, and replicated or sharded over `ep_replicate`.

The expert mesh consists of the ranks of data, context and tensor parallelism, which all have different tokens at the
expert layers. Each rank computes a partial gradient of its experts, which is summed over the ranks with the same
experts. This module does not dispatch tokens to experts.
"""

from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from d9d_dist.collectives._mesh_axes import axes_of, axis_names
from d9d_dist.data_parallel.parallelize import cast_inputs, parallelize_hsdp
from d9d_dist.errors import UserError
from d9d_dist.gradients._local_parameters import compute_locally, distribute_parameters, local_parameters_of
from d9d_dist.precision import Precision
from d9d_dist.shards import local_tensor
from d9d_dist.values._initial_values import agree_on_values

_AXES = ("ep_replicate", "ep_shard")


def parallelize_experts(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    shard_replicas: bool = True,
    precision: Precision | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Distribute parameters with one expert per index of dim 0 over the expert mesh, in place.

    Parameters become DTensors with their global shapes and names, `Shard(0)` on `ep_shard`, so checkpoints and exports
    do not depend on the degree. Over `ep_replicate` they are either sharded by `parallelize_hsdp` or replicated. The
    gradients of replicated experts are `Partial()` on `ep_replicate`, and `GradientSync` sums them. Forward computes
    with plain tensors of this rank's experts. Data parallelism of outer modules ignores these parameters.

    Call this function after `parallelize_tensor`, and before activation checkpointing and data parallelism. The ranks
    compare the first values of each parameter that is not on `meta`: collective over each axis.

    Args:
        module: Module whose parameters all have the experts on dim 0, on `meta` or equal on all ranks.
        mesh: `ctx.mesh_for("expert")["ep_replicate", "ep_shard"]`.
        shard_replicas: True to shard experts also over `ep_replicate`, each parameter in the first dim whose size the
            number of ranks divides. All are replicated if a parameter has no such dim. False to replicate experts.
        precision: dtypes of computation and reduction.
        reshard_after_forward: See `parallelize_hsdp`.

    Raises:
        UserError: If the mesh has other axes, `ep_shard` does not divide the number of experts, or a parameter is
            already sharded, or values differ between ranks. Nothing is changed then.
    """
    if axis_names(mesh) != _AXES:
        raise UserError(
            f"got a mesh with the axes ({', '.join(axis_names(mesh))}); expected ({', '.join(_AXES)}): "
            'ctx.mesh_for("expert")["ep_replicate", "ep_shard"].'
        )
    replicate, shard = (mesh[axis] for axis in _AXES)
    _check(module, shard)
    if mesh.size() == 1 and precision is None:
        return
    agree_on_values(module, mesh, list(module.parameters()))
    _unwrap_replicated_parameters(module)
    if shard.size() > 1:
        distribute_parameters(module, shard, {}, default=Shard(0))
    owners = [submodule for submodule in module.modules() if submodule._parameters]
    can_shard = all(_dims_to_shard(each, replicate.size()) for each in module.parameters())
    if shard_replicas and replicate.size() > 1 and can_shard:
        for owner in owners:
            compute_locally(owner)
        parallelize_hsdp(
            module,
            replicate,
            shard_axis="ep_replicate",
            precision=precision,
            reshard_after_forward=reshard_after_forward,
            shard_dim=lambda each: _dims_to_shard(each, replicate.size())[0],
        )
        return
    if replicate.size() > 1 or mesh.size() == 1:  # on a single rank too: the hooks cast only DTensors
        distribute_parameters(module, replicate, {}, default=Replicate())
    dtypes = precision or Precision()
    for owner in owners:
        hooks = compute_locally(
            owner, partial_axes=("ep_replicate",), compute_dtype=dtypes.compute, reduce_dtype=dtypes.reduce
        )
        hooks.is_apart = True
    if dtypes.compute is not None and dtypes.cast_inputs:  # as FSDP does above
        module.register_forward_pre_hook(partial(cast_inputs, dtypes.compute), prepend=True, with_kwargs=True)


def _check(module: nn.Module, shard: DeviceMesh) -> None:
    for name, parameter in module.named_parameters():
        if parameter.ndim == 0 or parameter.shape[0] % shard.size():
            num_experts = parameter.shape[0] if parameter.ndim else 1
            raise UserError(
                f"mesh.expert_parallel = {shard.size()} does not divide the {num_experts} experts of {name}. "
                f"Use a degree that divides {num_experts}."
            )
        is_whole = not isinstance(parameter, DTensor) or all(place.is_replicate() for place in parameter.placements)
        if not is_whole or set(axes_of(parameter)) - {"tp"}:
            raise UserError(
                f"{name} is already parallelized over ({', '.join(axes_of(parameter))}); expected unsharded experts "
                "on every rank. Call parallelize_experts after parallelize_tensor, whose plan must not name experts, "
                "and before parallelize_hsdp."
            )
    if any(isinstance(submodule, FSDPModule) for submodule in module.modules()):
        raise UserError(
            "the experts are already sharded, by parallelize_hsdp or torch's fully_shard; expected parallelize_experts "
            "to be called first."
        )


def _unwrap_replicated_parameters(module: nn.Module) -> None:
    """Make parameters replicated by `parallelize_tensor` plain again, because the expert mesh includes the tp ranks."""
    plain: dict[int, nn.Parameter] = {}
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            data = None if parameter is None else parameter.data
            if parameter is not None and isinstance(data, DTensor):
                local = nn.Parameter(data.to_local(), requires_grad=parameter.requires_grad)
                made = plain.setdefault(id(parameter), local)
                submodule._parameters[name] = made
        hooks = local_parameters_of(submodule)
        if hooks is not None:
            hooks.partial_axes.clear()


def _dims_to_shard(parameter: nn.Parameter, num_ranks: int) -> list[int]:
    """Return the dims of the local parameter whose sizes `num_ranks` divides."""
    return [dim for dim, size in enumerate(local_tensor(parameter).shape) if size % num_ranks == 0]
