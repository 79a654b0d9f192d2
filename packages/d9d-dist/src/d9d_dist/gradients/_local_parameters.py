"""Hooks that let a module whose parameters are DTensors compute with plain tensors, without changes to its code.

The forward of a replicated or tensor-parallel module gets this rank's shard of each DTensor parameter as a plain
tensor. So all operators and kernels work, without DTensor's overhead per operator. The gradient is a DTensor again:
`Partial` on axes whose ranks compute different parts. `d9d_dist.gradients.gradient_sync` reduces partial gradients.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from d9d_dist.collectives._mesh_axes import axes_of, axis_names
from d9d_dist.gradients._owned_gradient import own_gradient


class LocalParameters:
    """Forward hooks of one module, which replace its DTensor parameters by local tensors during forward.

    Adding another mesh axis extends the existing hooks.

    Attributes:
        partial_axes: Names of mesh axes whose ranks compute different parts of a replicated parameter's gradient.
        compute_dtype: dtype of floating-point parameters in forward; `None` keeps their own dtype.
        reduce_dtype: dtype in which gradients are reduced; `None` keeps their own dtype.
        is_apart: True if the parameters are on a separate mesh, as expert parameters are. FSDP of an outer module
            ignores such parameters.
        beside_fsdp: Names of parameters that are replicated although FSDP shards the module's other parameters.
    """

    def __init__(self) -> None:
        self.partial_axes: set[str] = set()
        self.compute_dtype: torch.dtype | None = None
        self.reduce_dtype: torch.dtype | None = None
        self.is_apart = False
        self.beside_fsdp: set[str] = set()
        self._outside: list[dict[str, nn.Parameter | None]] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        """Replace the module's own parameters by their local tensors (forward pre-hook)."""
        parameters = module._parameters
        self._outside.append(dict(parameters))
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                parameters[name] = self._local(parameter)  # ty: ignore[invalid-assignment]  (forward only reads it)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Restore the parameters, even if forward raised (forward hook)."""
        module._parameters.update(self._outside.pop())

    def gradient_placements(self, parameter: DTensor) -> tuple[Placement, ...]:
        """Return the placements of a parameter's gradient before it is reduced."""
        mesh = parameter.device_mesh
        return tuple(
            Partial() if placement.is_replicate() and name in self.partial_axes and mesh.size(axis) > 1 else placement
            for axis, (name, placement) in enumerate(zip(axis_names(mesh), parameter.placements, strict=True))
        )

    def _local(self, parameter: DTensor) -> torch.Tensor:
        local = own_gradient(parameter.to_local(grad_placements=self.gradient_placements(parameter)))
        if self.compute_dtype is None or not local.is_floating_point():
            return local
        return local.to(self.compute_dtype)


def compute_locally(
    module: nn.Module,
    *,
    partial_axes: Iterable[str] = (),
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> LocalParameters:
    """Make a module's own parameters (not its children's) plain tensors in its forward; return the hooks.

    Gradients of replicated parameters are partial over `partial_axes` and are reduced in `reduce_dtype`. Repeated calls
    extend the options.
    """
    hooks = local_parameters_of(module)
    if hooks is None:
        hooks = LocalParameters()
        module.register_forward_pre_hook(hooks.enter)
        module.register_forward_hook(hooks.leave, prepend=True, always_call=True)
        if isinstance(module, nn.MultiheadAttention):  # reads the parameters of out_proj without calling it
            _enter_with(module, module.out_proj, compute_locally(module.out_proj))
    hooks.partial_axes.update(partial_axes)
    hooks.compute_dtype = compute_dtype or hooks.compute_dtype
    hooks.reduce_dtype = reduce_dtype or hooks.reduce_dtype
    return hooks


def local_parameters_of(module: nn.Module) -> LocalParameters | None:
    """Return the hooks that `compute_locally` registered on a module; `None` if there are none."""
    for hook in module._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, LocalParameters):
            return owner
    return None


class PartialParameter(NamedTuple):
    """Parameter whose gradient is partial.

    `placements` are those of the gradient before the reduction. `reduce_dtype` is `None` for the gradient's own dtype.
    """

    parameter: DTensor
    placements: tuple[Placement, ...]
    reduce_dtype: torch.dtype | None


def partial_parameters(model: nn.Module) -> Iterator[PartialParameter]:
    """Yield the trainable parameters with partial gradients, each once, in the order of the model.

    FSDP's parameters are skipped: FSDP reduces their gradients.
    """
    seen: set[int] = set()
    outside = set(modules_outside_fsdp(model))
    for module in model.modules():
        hooks = local_parameters_of(module)
        if hooks is None:
            continue
        for name, parameter in module._parameters.items():
            if module not in outside and name not in hooks.beside_fsdp:
                continue
            if not isinstance(parameter, DTensor) or not parameter.requires_grad or id(parameter) in seen:
                continue
            placements = hooks.gradient_placements(parameter)
            if any(placement.is_partial() for placement in placements):
                seen.add(id(parameter))
                yield PartialParameter(parameter, placements, hooks.reduce_dtype)


def modules_outside_fsdp(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and its descendants that FSDP does not manage, parents first.

    Below an FSDP module, only modules whose parameters are on a separate mesh (`is_apart`) are yielded.
    """
    if isinstance(module, FSDPModule):
        yield from modules_apart(module)
        return
    yield module
    for child in module.children():
        yield from modules_outside_fsdp(child)


def modules_apart(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the submodules, `module` included, whose parameters are on a separate mesh and not managed by FSDP."""
    for submodule in module.modules():
        hooks = local_parameters_of(submodule)
        if hooks is not None and hooks.is_apart:
            yield submodule


def parameters_beside_fsdp(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters below a module that `replicate_beside_fsdp` has replicated."""
    for submodule in module.modules():
        hooks = local_parameters_of(submodule)
        for name in hooks.beside_fsdp if hooks else ():
            parameter = submodule._parameters[name]
            assert parameter is not None
            yield parameter


def distribute_parameters(
    model: nn.Module,
    mesh: DeviceMesh,
    placements: Mapping[int, Placement],
    *,
    default: Placement,
    leave: Collection[nn.Module] = (),
) -> None:
    """Make every parameter of a model a DTensor on one more mesh axis, in place. No collectives.

    Tied parameters stay tied. The new axis becomes the first axis of a DTensor; parameters that are already on the axis
    are unchanged. Parameter values must be equal on all ranks of the axis, or on `meta`. `placements` maps the `id` of
    a parameter to its placement on the axis. The modules in `leave` keep their own parameters.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if module in leave:
            continue
        for name, parameter in module._parameters.items():
            if parameter is None or axis_names(mesh)[0] in axes_of(parameter):
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _distribute(parameter, mesh, placements.get(id(parameter), default))
            module._parameters[name] = made[id(parameter)]


def replicate_beside_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    parameters: Collection[nn.Parameter],
    *,
    compute_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> None:
    """Replicate `parameters`, which FSDP cannot shard, over all axes of FSDP's mesh, in place. No collectives.

    Parameter values must be equal on all ranks or on `meta`. `compute_dtype` is for forward, `reduce_dtype` for the
    reduction of gradients.
    """
    axes = axis_names(mesh)
    made: dict[int, nn.Parameter] = {}
    for parameter in parameters:
        spread = parameter
        for axis in reversed(axes):
            spread = _distribute(spread, mesh[axis], Replicate())
        made[id(parameter)] = spread
    for module in model.modules():
        names = [name for name, parameter in module._parameters.items() if id(parameter) in made]
        if names:
            hooks = compute_locally(module, partial_axes=axes, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype)
            hooks.beside_fsdp.update(names)
            for name in names:
                module._parameters[name] = made[id(module._parameters[name])]
            if module is not model:
                _enter_with(model, module, hooks)


def _enter_with(model: nn.Module, module: nn.Module, hooks: LocalParameters) -> None:
    """Make a module's parameters plain tensors during the whole forward of `model`, which may use them directly."""
    model.register_forward_pre_hook(lambda _, args: hooks.enter(module, args))
    model.register_forward_hook(
        lambda _, args, output: hooks.leave(module, args, output), prepend=True, always_call=True
    )


def _distribute(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    data = parameter.data
    if isinstance(data, DTensor):
        assert placement.is_replicate(), "a sharded parameter can only be replicated over another axis"
        whole = DeviceMesh._concatenate([mesh, data.device_mesh])
        spread = DTensor.from_local(
            data.to_local(),
            whole,
            (placement, *data.placements),
            run_check=False,
            shape=data.shape,
            stride=data.stride(),
        )
    else:
        spread = _take_part(data, mesh, placement)
    return nn.Parameter(spread, requires_grad=parameter.requires_grad)


def _take_part(full: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """Return this rank's shard as a copy, so that the full tensor can be freed."""
    local = full
    if isinstance(placement, Shard):
        local = full.chunk(mesh.size(), dim=placement.dim)[mesh.get_local_rank()].clone()
    return DTensor.from_local(local, mesh, (placement,), run_check=False, shape=full.shape, stride=full.stride())
