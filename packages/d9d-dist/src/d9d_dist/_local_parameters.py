"""Lets a module whose parameters are DTensors compute with plain tensors: its own code stays as it is.

A module that is replicated or tensor parallel holds DTensors, whose placements say how they are split. Its forward gets
this rank's part of each as a plain tensor, so any operator and any kernel works, at no cost per operator. The gradient
goes back as a DTensor: on an axis over which the ranks compute different things it is `Partial`, a sum that is yet to
be taken; `d9d_dist.gradient_sync` looks for exactly that placement.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from d9d_dist._mesh_axes import axes_of, axis_names
from d9d_dist._owned_gradient import own_gradient


class LocalParameters:
    """The hooks of one module; found again among them when another axis is added.

    Attributes:
        partial_axes: Names of mesh axes over which this module's ranks compute different parts of a replicated
            parameter's gradient.
        compute_dtype: What floating-point parameters are cast to for forward; `None` keeps their own dtype.
        reduce_dtype: What their gradients are cast to while ranks add them up; `None` keeps their own dtype.
        is_apart: Whether the module's parameters live on a mesh of their own, as those of experts do: FSDP of a module
            around it leaves them alone.
        beside_fsdp: Names of parameters that are replicated though FSDP shards the module's others.
    """

    def __init__(self) -> None:
        self.partial_axes: set[str] = set()
        self.compute_dtype: torch.dtype | None = None
        self.reduce_dtype: torch.dtype | None = None
        self.is_apart = False
        self.beside_fsdp: set[str] = set()
        self._outside: list[dict[str, nn.Parameter | None]] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        """Put this rank's parts in the place of the module's own parameters."""
        parameters = module._parameters
        self._outside.append(dict(parameters))
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                parameters[name] = self._local(parameter)  # ty: ignore[invalid-assignment]  (forward only reads it)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Put the parameters back, also if forward failed."""
        module._parameters.update(self._outside.pop())

    def gradient_placements(self, parameter: DTensor) -> tuple[Placement, ...]:
        """How the gradient of one of the module's parameters is spread before ranks add it up."""
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
) -> None:
    """Let a module's own parameters, not its children's, be plain tensors in its forward.

    Args:
        module: Owns the DTensors. Called again, it adds to what was said before.
        partial_axes: Axes over which the gradient of what is replicated is a part of a sum.
        compute_dtype: What parameters are cast to for forward.
        reduce_dtype: What gradients are cast to while ranks add them up.
    """
    hooks = local_parameters_of(module)
    if hooks is None:
        hooks = LocalParameters()
        module.register_forward_pre_hook(hooks.enter)
        module.register_forward_hook(hooks.leave, prepend=True, always_call=True)
    hooks.partial_axes.update(partial_axes)
    hooks.compute_dtype = compute_dtype or hooks.compute_dtype
    hooks.reduce_dtype = reduce_dtype or hooks.reduce_dtype


def local_parameters_of(module: nn.Module) -> LocalParameters | None:
    """The hooks that `compute_locally` gave a module, if it did."""
    for hook in module._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, LocalParameters):
            return owner
    return None


class PartialParameter(NamedTuple):
    """A parameter whose gradient is a part of a sum.

    Attributes:
        parameter: The parameter, a DTensor.
        placements: How its gradient is spread before the sum is taken.
        reduce_dtype: The dtype to take the sum in; `None` for the gradient's own.
    """

    parameter: DTensor
    placements: tuple[Placement, ...]
    reduce_dtype: torch.dtype | None


def partial_parameters(model: nn.Module) -> Iterator[PartialParameter]:
    """The trainable parameters whose gradients are parts of sums, each once, in the model's order.

    Those that FSDP manages are left out: FSDP reduces their gradients by itself.
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
    """A module and all below it, parents first, without those that FSDP manages; what lies apart is not among them."""
    if isinstance(module, FSDPModule):
        yield from modules_apart(module)
        return
    yield module
    for child in module.children():
        yield from modules_outside_fsdp(child)


def modules_apart(module: nn.Module) -> Iterator[nn.Module]:
    """The modules at or below one whose parameters live on a mesh of their own, and that FSDP does not manage."""
    for submodule in module.modules():
        hooks = local_parameters_of(submodule)
        if hooks is not None and hooks.is_apart:
            yield submodule


def parameters_beside_fsdp(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters at or below a module that `replicate_beside_fsdp` has replicated."""
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
    """Make every parameter of a model a DTensor on one more mesh axis, in place; no collectives.

    Parameters that are shared between modules stay shared. What is a DTensor on another axis already becomes one on
    both, this axis first.

    Args:
        model: Its parameters hold equal values on all ranks of the axis, or are on `meta`.
        mesh: A mesh of one named axis.
        placements: How to place parameters on the axis, by their `id`.
        default: How to place all others; those that are on the axis already stay as they are.
        leave: Modules whose own parameters stay as they are.
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
    """Replicate parameters that FSDP cannot shard over all axes of its mesh, in place; no collectives.

    Args:
        model: Holds them, on `meta` or with equal values on all ranks.
        mesh: FSDP's mesh, of one or more named axes.
        parameters: Which to replicate; FSDP is going to shard the model's others.
        compute_dtype: What they are cast to for forward.
        reduce_dtype: What their gradients are cast to while ranks add them up.
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
            compute_locally(module, partial_axes=axes, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype)
            hooks = local_parameters_of(module)
            assert hooks is not None, "compute_locally has just made them"
            hooks.beside_fsdp.update(names)
            for name in names:
                module._parameters[name] = made[id(module._parameters[name])]
            if module is not model:
                _enter_with(model, module, hooks)


def _enter_with(model: nn.Module, module: nn.Module, hooks: LocalParameters) -> None:
    """Let a module's parameters be plain tensors in all of a model's forward, which may use them without the module."""
    model.register_forward_pre_hook(lambda _, args: hooks.enter(module, args))
    model.register_forward_hook(
        lambda _, args, output: hooks.leave(module, args, output), prepend=True, always_call=True
    )


def _distribute(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    data = parameter.data
    if isinstance(data, DTensor):
        assert placement.is_replicate(), "what is split already can only be replicated over another axis"
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
    """This rank's part of a tensor that every rank has whole; a copy, so that the whole one can be freed."""
    local = full
    if isinstance(placement, Shard):
        local = full.chunk(mesh.size(), dim=placement.dim)[mesh.get_local_rank()].clone()
    return DTensor.from_local(local, mesh, (placement,), run_check=False, shape=full.shape, stride=full.stride())
