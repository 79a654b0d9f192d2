"""Replicated, fully sharded and hybrid sharded data parallelism, with gradients that are *summed*, not averaged.

Sharding is torch's FSDP2. Replication marks parameters as replicated DTensors; `d9d_dist.gradients.gradient_sync` sums
their gradients over ranks. By default FSDP divides gradients by the number of ranks, which is correct only if every
rank's loss is a mean over equally many elements. Here the sum over ranks is divided once, by the global weight of
the batch (`scale_gradients_`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from d9d_dist.collectives._mesh_axes import axes_of, axis_names, only_axis
from d9d_dist.data_parallel.embedding_rows import writes_to_rows
from d9d_dist.data_parallel.gathered_parameters import mark_as_kept_gathered
from d9d_dist.errors import UserError
from d9d_dist.gradients._local_parameters import (
    compute_locally,
    distribute_parameters,
    modules_apart,
    parameters_beside_fsdp,
    replicate_beside_fsdp,
)
from d9d_dist.gradients.grad_dtype import HAS_GRAD_DTYPE
from d9d_dist.precision import Precision
from d9d_dist.values._initial_values import agree_on_values
from d9d_dist.values.parameter_writes import refuse_writes, refuse_writes_in_first_forward


def parallelize_hsdp(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    shard_axis: str,
    precision: Precision | None = None,
    reshard_after_forward: bool = True,
    shard_dim: int | Callable[[nn.Parameter], int] = 0,
) -> None:
    """Shard a module's parameters over one axis of a mesh and replicate them over its other axes, in place.

    Parameters become DTensors: `Shard(shard_dim)` on the shard axis, `Replicate()` on other axes larger than 1.
    Tensor-parallel parameters become DTensors on all of these axes. Forward and backward all-gather parameters over the
    shard axis. Gradients are reduce-scattered over the shard axis and all-reduced over the other axes, as sums. Several
    replicate axes are merged into one, e.g. `dp_replicate_cp_replicate`. Call this function on inner blocks first and
    on the whole model last. On a mesh of one rank without `precision` the module is not changed.

    Parameters that FSDP cannot shard are replicated over all axes of the mesh, and `GradientSync` sums their gradients.
    These are empty and 0-dim parameters, weights of embeddings with `max_norm`, and trainable parameters whose dtype is
    not the most common one. To shard parameters of another dtype, call this function on their inner modules first.
    Sharded parameters become contiguous. Outputs that are parameters, or views of them, are copied.

    Parameters have values that are equal on all ranks of the mesh, or are on `meta` on all of them. The ranks compare
    the first values of each parameter: collective over each axis. The first call that merges several axes is collective
    over all ranks of the job: it creates their process group.

    Args:
        module: The module to parallelize. Parameters that an inner call has sharded are skipped, as are experts
            (`parallelize_experts`).
        mesh: Mesh with named axes, in any order, all of them data parallel for this module.
        shard_axis: Axis over which parameters are sharded.
        precision: dtypes of computation and reduction.
        reshard_after_forward: True to free the gathered parameters after forward and gather them again in backward.
            False to keep them until the step's last backward, which is faster for pipeline stages with several
            microbatches. After a forward without backward, call `module.reshard()`.
        shard_dim: Dim in which all parameters are sharded, or a function that returns the dim of a parameter. If the
            dim is not 0, the number of ranks must divide its size.

    Raises:
        UserError: If the mesh lacks the axis, or values differ between ranks. In backward with `create_graph=True`:
            FSDP frees the tensors that second derivatives need.
    """
    names = mesh.mesh_dim_names or ()
    if shard_axis not in names:
        raise UserError(f"got shard_axis = {shard_axis!r}; expected one of the mesh's axes: {', '.join(names)}.")
    if mesh.size() == 1 and precision is None:
        return
    dtypes = precision or Precision()
    agree_on_values(module, mesh, _managed_by_fsdp(module))
    replicate_beside_fsdp(
        module,
        mesh[tuple(name for name in names if name == shard_axis or mesh[name].size() > 1)],
        _unsupported_by_fsdp(module, _managed_by_fsdp(module)),
        compute_dtype=dtypes.compute,
        reduce_dtype=dtypes.reduce,
    )
    _fully_shard(
        module,
        _replicate_and_shard(mesh, shard_axis),
        dtypes,
        reshard_after_forward=reshard_after_forward,
        shard_dim=shard_dim,
    )


def _fully_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    dtypes: Precision,
    *,
    reshard_after_forward: bool,
    shard_dim: int | Callable[[nn.Parameter], int],
) -> None:
    """Apply FSDP, without its division of gradients, and with errors where it would be silently wrong."""
    for parameter in _managed_by_fsdp(module):
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.contiguous()  # FSDP2 supports no other strides, such as channels-last.
    # Registered before FSDP's hooks, one of which frees the parameters that these hooks compare and copy.
    refuse_writes_in_first_forward(module)
    module.register_forward_hook(_copy_returned_parameters)
    module.register_forward_hook(_pass_through_identity)
    try:
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=dtypes.compute,
                reduce_dtype=dtypes.reduce or _dtype_of_gradients(module),
                cast_forward_inputs=dtypes.cast_inputs,
            ),
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=(lambda each: Shard(shard_dim(each) if callable(shard_dim) else shard_dim))
            if shard_dim != 0
            else None,
            ignored_params={
                *(parameter for apart in modules_apart(module) for parameter in apart.parameters(recurse=False)),
                *parameters_beside_fsdp(module),
            },
        )
    except TypeError as error:
        if "__class__ assignment" not in str(error):
            raise
        raise UserError(
            f"{type(module).__name__} cannot be sharded, because FSDP changes the class of a module, and a base class "
            "with __slots__ forbids it; expected nn.Module as the first base class. Reorder the base classes."
        ) from error
    assert isinstance(module, FSDPModule)
    if not reshard_after_forward:
        mark_as_kept_gathered(module)
    module.register_forward_hook(_refuse_second_derivatives)
    module.set_gradient_divide_factor(1.0)
    # Otherwise FSDP applies the factor 1 as a pre-multiplied sum, which gloo does not support.
    module.set_force_sum_reduction_for_comms(True)


def parallelize_fsdp(module: nn.Module, mesh: DeviceMesh, *, precision: Precision | None = None) -> None:
    """Shard a module's parameters over all ranks of a one-axis mesh, in place; see `parallelize_hsdp`.

    Raises `UserError` if the mesh does not have exactly one named axis.
    """
    parallelize_hsdp(module, mesh, shard_axis=only_axis(mesh, example="dp_shard"), precision=precision)


def refuse_lost_writes(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context manager that raises `UserError` if its body writes to parameters that FSDP would shard.

    Run the forward on fake tensors: in-place operators are detected even if they do not change the values.
    """
    parameters = _managed_by_fsdp(module)
    sharded = set(parameters) - set(_unsupported_by_fsdp(module, parameters))
    return refuse_writes(module, {name: each for name, each in module.named_parameters() if each in sharded})


def parallelize_replicate(module: nn.Module, mesh: DeviceMesh, *, precision: Precision | None = None) -> None:
    """Replicate a module's parameters over all ranks of a one-axis mesh, in place.

    Parameters become DTensors, `Replicate()` on the axis; tensor-parallel parameters become DTensors on both axes.
    Forward computes with plain tensors. Gradients are `Partial()` on the axis: microbatches are accumulated without
    communication, and `GradientSync` sums them over ranks, in the dtype of `precision.reduce`. On a mesh of one rank
    without `precision` the module is not changed. The ranks compare the first values of each parameter: collective.

    Args:
        module: A whole model, on `meta` or equal on all ranks of the axis. Tied parameters stay tied.
        mesh: Mesh of one named axis.
        precision: dtypes of computation and reduction.

    Raises:
        UserError: If the mesh does not have exactly one named axis, or FSDP already manages the module. Also if values
            differ between ranks.
    """
    axis = only_axis(mesh, example="dp_replicate")
    for name, submodule in module.named_modules():
        if isinstance(submodule, FSDPModule):
            raise UserError(
                f"got a module whose submodule {name or 'itself'!r} is already sharded, by parallelize_hsdp or torch's "
                "fully_shard; expected an unsharded module. Replicate it with parallelize_hsdp, over a mesh of both "
                "axes."
            )
    if mesh.size() == 1 and precision is None:
        return
    dtypes = precision or Precision()
    agree_on_values(module, mesh, [each for each in module.parameters() if axis not in axes_of(each)])
    apart = set(modules_apart(module))
    distribute_parameters(module, mesh, {}, default=Replicate(), leave=apart)
    for submodule in module.modules():
        if submodule._parameters and submodule not in apart:
            compute_locally(submodule, partial_axes=(axis,), compute_dtype=dtypes.compute, reduce_dtype=dtypes.reduce)
    if dtypes.compute is not None and dtypes.cast_inputs:
        module.register_forward_pre_hook(partial(cast_inputs, dtypes.compute), prepend=True, with_kwargs=True)


def _dtype_of_gradients(module: nn.Module) -> torch.dtype | None:
    """Return the dtype in which FSDP reduces gradients by default: the parameters' dtype.

    Older versions of FSDP would accumulate and reduce gradients in the dtype of the computation. Returns `None` for
    newer ones, which use the `grad_dtype` of each parameter.
    """
    trainable = (each.dtype for each in _managed_by_fsdp(module) if each.requires_grad and each.numel() and each.ndim)
    return None if HAS_GRAD_DTYPE else next(trainable, None)


def _managed_by_fsdp(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that `fully_shard` of a module would manage, each once."""
    inner = {below for child in module.modules() if isinstance(child, FSDPModule) for below in child.modules()}
    left = inner | set(modules_apart(module))
    own = (parameter for part in module.modules() if part not in left for parameter in part.parameters(recurse=False))
    return list(dict.fromkeys(own))


def _unsupported_by_fsdp(module: nn.Module, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that FSDP2 cannot shard.

    These are empty and 0-dim parameters, trainable parameters whose dtype is not the most common one, and weights of
    embeddings with `max_norm`.
    """
    written = {each for part in module.modules() if writes_to_rows(part) for each in part.parameters(recurse=False)}
    num_elements = Counter[torch.dtype]()
    for parameter in parameters:
        if parameter.requires_grad:
            num_elements[parameter.dtype] += parameter.numel()
    most = num_elements.most_common(1)
    return [
        parameter
        for parameter in parameters
        if parameter in written
        or not parameter.ndim
        or not parameter.numel()
        or (parameter.requires_grad and parameter.dtype != most[0][0])
    ]


@final
class _WithoutBase(torch.autograd.Function):
    """Identity whose output shares the input's memory but is not a view for autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _copy_returned_parameters(module: nn.Module, args: Any, outputs: Any) -> Any:
    """Return copies of outputs that share memory with parameters, which FSDP frees after forward (forward hook)."""
    if torch.compiler.is_compiling():
        return None
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    if all(leaf.grad_fn is not None and leaf._base is None for leaf in leaves):
        return None  # all outputs are results of operators
    memory = {each.untyped_storage()._cdata for each in module.parameters() if not isinstance(each, DTensor)}
    if not any(leaf.untyped_storage()._cdata in memory for leaf in leaves):
        return None
    return pytree.tree_map_only(
        torch.Tensor, lambda leaf: leaf.clone() if leaf.untyped_storage()._cdata in memory else leaf, outputs
    )


def _pass_through_identity(module: nn.Module, args: Any, outputs: Any) -> Any:
    """Pass outputs that are views or have tensor hooks through an identity function (forward hook). Copies no memory.

    FSDP2 registers its pre-backward hook on the outputs. An in-place operation on a view replaces the view's node in
    the autograd graph, so the hook would be lost; on other tensors the hook stays. Tensor hooks that the module itself
    registered on its outputs may compute with the parameters. These hooks must run after FSDP's hook, which all-gathers
    the parameters.
    """
    leaves = pytree.tree_leaves(outputs)
    if torch.compiler.is_compiling() or not any(map(_is_view_or_hooked, leaves)):
        return None
    return pytree.tree_map(lambda leaf: _WithoutBase.apply(leaf) if _is_view_or_hooked(leaf) else leaf, outputs)


def _is_view_or_hooked(leaf: Any) -> bool:
    is_differentiable = isinstance(leaf, torch.Tensor) and leaf.requires_grad
    return is_differentiable and (leaf._base is not None or bool(leaf._backward_hooks))


def _refuse_second_derivatives(module: nn.Module, args: Any, outputs: Any) -> None:
    """Register hooks that raise if backward builds a graph (forward hook)."""
    for output in pytree.tree_leaves(outputs):
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(_check_no_graph)


def _check_no_graph(gradient: torch.Tensor) -> None:
    if torch.is_grad_enabled():  # inside backward this means create_graph=True
        raise UserError(
            "got a backward pass with create_graph=True through a module sharded by parallelize_hsdp; expected "
            "create_graph=False, because FSDP frees the gathered parameters that second derivatives need. For a "
            "gradient penalty, replicate the module instead (parallelize_replicate)."
        )


def cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast all floating-point tensors among the arguments (forward pre-hook)."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(cast, args), pytree.tree_map(cast, kwargs)


def _replicate_and_shard(mesh: DeviceMesh, shard_axis: str) -> DeviceMesh:
    """Return the mesh for FSDP2, [shard] or [replicate, shard], without axes of size 1.

    Several replicate axes are merged into one, whose process group torch creates once and caches with the mesh.
    """
    replicate = [name for name in axis_names(mesh) if name != shard_axis and mesh[name].size() > 1]
    if not replicate:
        return mesh[shard_axis]
    merged = mesh[replicate[0]] if len(replicate) == 1 else mesh[tuple(replicate)]._flatten()
    # A slice has the axis order of the mesh, but FSDP2 requires the replicate axis first.
    return DeviceMesh._concatenate([merged, mesh[shard_axis]])
