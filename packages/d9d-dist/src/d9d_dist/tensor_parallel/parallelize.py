"""Tensor parallelism of a module by a plan, which maps names of submodules to styles."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Placement, Replicate, Shard

from d9d_dist.collectives._mesh_axes import axes_of, axis_names, only_axis
from d9d_dist.errors import UserError
from d9d_dist.gradients._local_parameters import compute_locally, distribute_parameters
from d9d_dist.tensor_parallel.follows_weight import WEIGHT, followers
from d9d_dist.tensor_parallel.styles import Replicated, TensorStyle
from d9d_dist.values._initial_values import agree_on_values


def parallelize_tensor(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, TensorStyle]) -> None:
    """Split a module's matrices over the ranks of a mesh axis, in place. All ranks must have the same samples.

    All parameters become DTensors on the axis: `Shard(0)` or `Shard(1)` if a style splits them, else `Replicate()`.
    Forward computes with plain tensors. Gradients of replicated parameters are summed where ranks compute different
    parts of them (by `GradientSync`, or by FSDP for its parameters). Modules that a fine-tuning method has added to a
    layer are split with it (`FollowsWeight`). Call this function before activation checkpointing, compiling and data
    parallelism. On a mesh of one rank it only checks the plan. The ranks compare the first values of each parameter
    that is not on `meta`: collective.

    Args:
        module: Module on `meta` or equal on all ranks. Tied parameters stay tied if `module` holds all of them.
        mesh: Mesh of one axis, e.g. `ctx.mesh_for("dense")["tp"]`.
        plan: Styles by the names of submodules; the empty name is `module` itself. A `*` matches one part of a name, as
            in `layers.*.attention`. Names of submodules that are `None`, because another pipeline stage has them, are
            allowed. Unnamed descendants of a named submodule follow its `has_partial_gradients`. All other modules
            compute the same on every rank.

    Raises:
        UserError: If a name matches no submodule, two names match one submodule, a style does not support its
            submodule, the axis size does not divide a split dim, or a submodule is already parallelized. Also if values
            differ between ranks. Nothing is changed then.
    """
    axis = only_axis(mesh, example="tp")
    styles = _match(module, plan)
    modules = dict(module.named_modules())
    for name, style in styles.items():
        style.check(modules[name])
    if mesh.size() == 1:
        return
    for name, style in styles.items():
        _check_splits(name, modules[name], style)
    _check_is_first(modules, axis)
    placements = _placements(modules, styles, mesh)
    agree_on_values(module, mesh, [each for each in module.parameters() if axis not in axes_of(each)])
    distribute_parameters(module, mesh, placements, default=Replicate())
    for name, submodule in modules.items():
        if submodule._parameters:
            is_partial = _style_above(name, styles).has_partial_gradients
            compute_locally(submodule, partial_axes=(axis,) if is_partial else ())
    for name, style in styles.items():
        submodule = modules[name]
        style.prepare(submodule, mesh)
        if (weight := style.placements().get(WEIGHT)) is not None:
            for _, _, follower in followers(submodule):
                follower.prepare_tensor(weight, mesh)
        # An instance attribute overrides the class's forward. Module hooks, which set local parameters, still run.
        submodule.forward = partial(style.forward, submodule, mesh, submodule.forward)


def _match(module: nn.Module, plan: Mapping[str, TensorStyle]) -> dict[str, TensorStyle]:
    """Return the style of each submodule that the plan names."""
    names = [name for name, _ in module.named_modules()]
    absent = list(_absent(module))
    matched: dict[str, str] = {}
    for pattern in plan:
        found = [name for name in names if _matches(name, pattern)]
        if not found and not any(_matches(name, pattern) for name in absent):
            raise UserError(
                f"the tensor-parallel plan names {pattern!r}, which matches no submodule of {type(module).__name__}; "
                f"it has {', '.join(_examples(names))}."
            )
        for name in found:
            if name in matched:
                raise UserError(
                    f"the tensor-parallel plan matches {name} twice, by {matched[name]!r} and by {pattern!r}; "
                    "expected one style for each submodule."
                )
            matched[name] = pattern
    return {name: plan[pattern] for name, pattern in matched.items()}


def _check_splits(name: str, module: nn.Module, style: TensorStyle) -> None:
    """Reject a style that would split no parameter or a computed one, and a second style on one submodule."""
    split = style.placements()
    computed = [
        each for each in split if each not in module._parameters and isinstance(getattr(module, each, None), Tensor)
    ]
    if computed:
        raise UserError(
            f"{name} is a {type(module).__name__} that computes its {' and '.join(computed)} from other parameters, "
            "such as with torch.nn.utils.parametrizations; expected parameters of its own, which "
            f"{type(style).__name__} shards. Remove the parametrization, or remove the layer from the plan."
        )
    if split and not any(module._parameters.get(parameter) is not None for parameter in split):
        raise UserError(
            f"{name} is a {type(module).__name__} without its own parameter {' or '.join(split)}, which "
            f"{type(style).__name__} shards; expected a layer such as torch.nn.Linear. Name the layer itself in the "
            "plan."
        )
    forward = vars(module).get("forward")
    if isinstance(forward, partial) and isinstance(getattr(forward.func, "__self__", None), TensorStyle):
        raise UserError(
            f"{name} is already tensor parallel; expected parallelize_tensor to name each submodule once. Remove it "
            "from this plan."
        )


def _check_is_first(modules: Mapping[str, nn.Module], axis: str) -> None:
    """Reject modules that are already data parallel."""
    for name, submodule in modules.items():
        axes = {
            other
            for parameter in submodule._parameters.values()
            if parameter is not None
            for other in axes_of(parameter)
        }
        if isinstance(submodule, FSDPModule) or axes - {axis}:
            raise UserError(
                f"{name or 'the module'} is already data parallel; expected parallelize_tensor to be called first. "
                "Call it before parallelize_hsdp, parallelize_fsdp and parallelize_replicate."
            )


def _absent(module: nn.Module) -> Iterator[str]:
    """Yield the names of submodules that are `None`, because another pipeline stage has them."""
    for parent, submodule in module.named_modules():
        for name, value in (*submodule._modules.items(), *vars(submodule).items()):
            if value is None:
                yield f"{parent}.{name}".lstrip(".")


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _examples(names: list[str]) -> Iterator[str]:
    shown = [name for name in names if name]
    yield from shown[:8]
    if len(shown) > 8:
        yield f"... ({len(shown)} in total)"


def _style_above(name: str, styles: Mapping[str, TensorStyle]) -> TensorStyle:
    """Return the style of the submodule or of its nearest ancestor with a style, else `Replicated()`."""
    while name not in styles:
        if not name:
            return Replicated()
        name = name.rpartition(".")[0]
    return styles[name]


def _check_divides(name: str, parameter: nn.Parameter, dim: int, block: int, mesh: DeviceMesh) -> None:
    num_blocks, rest = divmod(parameter.shape[dim], block)
    if rest or num_blocks % mesh.size():
        unit = "" if block == 1 else f" blocks of {block}"
        raise UserError(
            f"the {axis_names(mesh)[0]} degree = {mesh.size()} does not divide dim {dim} of {name}, which is "
            f"{num_blocks}{unit}. Use a degree that divides {num_blocks}."
        )


def _placements(
    modules: Mapping[str, nn.Module], styles: Mapping[str, TensorStyle], mesh: DeviceMesh
) -> dict[int, Placement]:
    """Return the placements of split parameters, by `id`. All other parameters are replicated."""
    placements: dict[int, tuple[str, Placement]] = {}
    placed: set[str] = set()
    for module_name, style in styles.items():
        for name, parameter, placement in _placed(modules[module_name], style):
            full_name = f"{module_name}.{name}"
            if isinstance(placement, Shard):
                _check_divides(full_name, parameter, placement.dim, style.block, mesh)
            other_name, other = placements.setdefault(id(parameter), (full_name, placement))
            if other != placement:
                raise UserError(
                    f"{other_name} and {full_name} are one tied parameter, which the plan places as {other} and as "
                    f"{placement}; expected one placement."
                )
            placed.add(full_name)
    for module_name, module in modules.items():
        for name, parameter in module._parameters.items():
            split_name, placement = placements.get(id(parameter), ("", None))
            if isinstance(placement, Shard) and f"{module_name}.{name}" not in placed:
                raise UserError(
                    f"{split_name} and {module_name}.{name} are one shared parameter, and the plan splits only the "
                    "first; expected styles for both. Name both modules, or neither."
                )
    return {key: placement for key, (_, placement) in placements.items()}


def _placed(layer: nn.Module, style: TensorStyle) -> Iterator[tuple[str, nn.Parameter, Placement]]:
    """Yield the parameters that a style splits, of the layer itself and of children that follow its weight."""
    split = style.placements()
    places = [(layer, "", split)]
    if WEIGHT in split:
        places += [(child, f"{name}.", it.tensor_placements(split[WEIGHT])) for name, child, it in followers(layer)]
    for module, prefix, placements in places:
        for name, placement in placements.items():
            parameter = module._parameters.get(name)
            if parameter is not None:
                yield prefix + name, parameter, placement
