"""Replicated, fully sharded and hybrid sharded data parallelism, with gradients that are always *summed*.

Sharding is torch's FSDP2; replication needs no more than parameters that are marked as replicated, and a sum over ranks
at the end (`d9d_dist.gradient_sync`). FSDP divides gradients by the number of ranks, which is right only if every
rank's loss is a mean over equally many elements, so here nothing is divided on the way: ranks add their gradients up,
and the sum is divided once by the global weight (`scale_gradients_`).
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from d9d_dist._local_parameters import (
    LocalParameters,
    compute_locally,
    distribute_parameters,
    local_parameters_of,
    modules_apart,
    modules_outside_fsdp,
)
from d9d_dist._mesh_axes import axis_names, only_axis
from d9d_dist.embedding_rows import writes_to_rows
from d9d_dist.errors import UserError
from d9d_dist.late_init import canonical_name


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
    shard_dim: int = 0,
) -> None:
    """Shard a module's parameters over one axis of a mesh and replicate them over its other axes, in place.

    Parameters become DTensors, `Shard(shard_dim)` on the shard axis, `Replicate()` on the others of more than one rank.
    Forward and backward all-gather them over the shard axis; gradients are reduce-scattered over it and all-reduced
    over the rest, as sums; several axes to replicate over count as one, e.g. `dp_replicate_cp_replicate`. Parameters
    that are tensor parallel already are DTensors on all of these axes. Call it on inner blocks first and on the whole
    model last. On a mesh of one rank, and with no precision asked for, there is nothing to do, and the module is left
    as it is.

    Collective over all ranks of the job the first time that several axes are merged: it makes their process group.

    Args:
        module: The module to parallelise; parameters that an inner call took already are left alone, and so are those
            of experts (`parallelize_experts`).
        mesh: A mesh with named axes, in any order, all of them data parallel for this module.
        shard_axis: The axis that shares the parameters out.
        precision: dtypes of computation and reduction.
        reshard_after_forward: Whether to free the gathered parameters after forward and gather them again in backward.
        shard_dim: The dim of all parameters that is shared out; if it is not the first, its size has to divide.

    Raises:
        UserError: If the mesh has no axis of that name.
    """
    names = mesh.mesh_dim_names or ()
    if shard_axis not in names:
        raise UserError(f"got shard_axis = {shard_axis!r}; expected one of the mesh's axes: {', '.join(names)}.")
    if mesh.size() == 1 and precision is None:
        return
    dtypes = precision or Precision()
    both = _replicate_and_shard(mesh, shard_axis)
    _replicate_what_fsdp_refuses(module, both, dtypes)
    fully_shard(
        module,
        mesh=both,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=dtypes.compute, reduce_dtype=dtypes.reduce, cast_forward_inputs=dtypes.cast_inputs
        ),
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=(lambda _: Shard(shard_dim)) if shard_dim else None,
        ignored_params={parameter for apart in modules_apart(module) for parameter in apart.parameters(recurse=False)},
    )
    assert isinstance(module, FSDPModule)
    _check_first_forward(module)
    module.set_gradient_divide_factor(1.0)
    # Otherwise a factor of 1 is applied by a pre-multiplying reduction, which gloo does not have.
    module.set_force_sum_reduction_for_comms(True)


def parallelize_fsdp(module: nn.Module, mesh: DeviceMesh, *, precision: Precision | None = None) -> None:
    """Shard a module's parameters over all ranks of a one-axis mesh, in place; see `parallelize_hsdp`.

    Raises:
        UserError: If the mesh does not have exactly one named axis.
    """
    parallelize_hsdp(module, mesh, shard_axis=only_axis(mesh, example="dp_shard"), precision=precision)


def parallelize_replicate(module: nn.Module, mesh: DeviceMesh, *, precision: Precision | None = None) -> None:
    """Replicate a module's parameters over all ranks of a one-axis mesh, in place. No collectives.

    Parameters become DTensors, `Replicate()` on the axis; those that are tensor parallel already are DTensors on both.
    Forward computes with plain tensors. Their gradients are `Partial()` on the axis: microbatches add up without
    traffic, and `GradientSync` takes the sum over ranks, also in the dtype that `precision` asks for. On a mesh of one
    rank, and with no precision asked for, there is nothing to do, and the module is left as it is.

    Args:
        module: On `meta`, or with equal values on all ranks of the axis; shared parameters stay shared. Call it on a
            whole model: what is inside follows.
        mesh: A mesh of one named axis.
        precision: dtypes of computation and reduction.

    Raises:
        UserError: If the mesh does not have exactly one named axis, or FSDP manages the module already.
    """
    axis = only_axis(mesh, example="dp_replicate")
    _check_no_fsdp(module)
    if mesh.size() == 1 and precision is None:
        return
    dtypes = precision or Precision()
    apart = set(modules_apart(module))
    distribute_parameters(module, mesh, {}, default=Replicate(), leave=apart)
    for submodule in module.modules():
        if submodule._parameters and submodule not in apart:
            compute_locally(submodule, partial_axes=(axis,), compute_dtype=dtypes.compute, reduce_dtype=dtypes.reduce)
    if dtypes.compute is not None and dtypes.cast_inputs:
        module.register_forward_pre_hook(partial(cast_inputs, dtypes.compute), prepend=True, with_kwargs=True)


def _replicate_what_fsdp_refuses(module: nn.Module, mesh: DeviceMesh, dtypes: Precision) -> None:
    """Replicate modules that own what FSDP refuses, or whose forward writes to it; `GradientSync` sums gradients."""
    apart = set(modules_apart(module))
    free = [submodule for submodule in modules_outside_fsdp(module) if submodule not in apart]
    own = {submodule: [each for each in submodule._parameters.values() if each is not None] for submodule in free}
    trained = Counter[torch.dtype]()
    for parameter in {id(each): each for parameters in own.values() for each in parameters}.values():
        trained[parameter.dtype] += parameter.nbytes if parameter.requires_grad else 0
    dtype = max(trained, key=lambda each: trained[each], default=None)
    refused = {
        id(each)
        for owner, parameters in own.items()
        for each in parameters
        if writes_to_rows(owner) or not each.numel() or not each.ndim or (each.requires_grad and each.dtype != dtype)
    }
    owners: list[nn.Module] = []
    num_before = -1
    while len(refused) > num_before:  # What shares a parameter with an owner is one too.
        num_before = len(refused)
        owners = [submodule for submodule in free if any(id(each) in refused for each in own[submodule])]
        refused.update(id(each) for owner in owners for each in own[owner])
    names = axis_names(mesh)
    for name in reversed(names):
        distribute_parameters(
            module, mesh[name], {}, default=Replicate(), leave=[each for each in module.modules() if each not in owners]
        )
    for owner in owners:
        compute_locally(owner, partial_axes=names, compute_dtype=dtypes.compute, reduce_dtype=dtypes.reduce)
        hooks = local_parameters_of(owner)
        assert hooks is not None
        hooks.is_apart = True
        if owner is not module:
            _enter_with(module, owner, hooks)


def _enter_with(module: nn.Module, owner: nn.Module, hooks: LocalParameters) -> None:
    """Let a layer's parameters be plain tensors in all of a module's forward, which may use them without the layer."""
    module.register_forward_pre_hook(lambda _, args: hooks.enter(owner, args))
    module.register_forward_hook(
        lambda _, args, output: hooks.leave(owner, args, output), prepend=True, always_call=True
    )


def _check_first_forward(module: nn.Module) -> None:
    """Refuse a forward that replaces or writes to parameters: FSDP gathers them anew, and neither would be kept."""
    before: dict[str, tuple[torch.Tensor, int, int]] = {}

    def note(_module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # A trace has no versions.
        before.update({name: (each, each.data_ptr(), each._version) for name, each in _gathered(module)})

    def compare(_module: nn.Module, _args: Any, _output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for handle in handles:
            handle.remove()
        names = [
            canonical_name(name)
            for name, each in _gathered(module)
            if name in before and not _is_same(before[name], each)
        ]
        before.clear()
        if names:
            raise UserError(
                f"forward replaces or writes to {', '.join(names)}, such as by .to(dtype) or under no_grad; expected "
                "only reads, since sharded parameters are gathered anew in each forward. Give the parameters their "
                "dtype in build, or compute a new tensor from them."
            )

    handles = [
        module.register_forward_pre_hook(note),
        module.register_forward_hook(compare, prepend=True),
    ]


def _is_same(before: tuple[torch.Tensor, int, int], parameter: torch.Tensor) -> bool:
    tensor, pointer, version = before
    return tensor is parameter and pointer == parameter.data_ptr() and version == parameter._version


def _gathered(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, each) for name, each in module.named_parameters() if not isinstance(each, DTensor)]


def _check_no_fsdp(module: nn.Module) -> None:
    for name, submodule in module.named_modules():
        if isinstance(submodule, FSDPModule):
            raise UserError(
                f"got a module whose submodule {name or 'itself'!r} is sharded already, by parallelize_hsdp or torch's "
                "fully_shard; expected one that is not. Replicate it with parallelize_hsdp, over a mesh of both axes."
            )


def cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook: cast all floating-point tensors among the arguments."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(cast, args), pytree.tree_map(cast, kwargs)


def _replicate_and_shard(mesh: DeviceMesh, shard_axis: str) -> DeviceMesh:
    """FSDP2's view of a mesh: [shard], or [replicate, shard]; axes of one rank do not count.

    Several axes to replicate over become one, whose process group torch makes once and keeps with the mesh.
    """
    replicate = [name for name in axis_names(mesh) if name != shard_axis and mesh[name].size() > 1]
    if not replicate:
        return mesh[shard_axis]
    merged = mesh[replicate[0]] if len(replicate) == 1 else mesh[tuple(replicate)]._flatten()
    # A slice keeps the order of the mesh; FSDP2 wants the replicate axis first, whatever that order is.
    return DeviceMesh._concatenate([merged, mesh[shard_axis]])
