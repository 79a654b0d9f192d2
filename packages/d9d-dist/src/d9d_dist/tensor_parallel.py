"""Tensor parallelism as one function over a module, a mesh axis and a plan: which submodule follows which style."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Placement, Replicate, Shard

from d9d_dist._local_parameters import compute_locally, distribute_parameters
from d9d_dist._mesh_axes import axes_of, axis_names, only_axis
from d9d_dist.errors import UserError
from d9d_dist.follows_weight import WEIGHT, followers
from d9d_dist.tensor_styles import Replicated, TensorStyle


def parallelize_tensor(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, TensorStyle]) -> None:
    """Share a module's matrices out to the ranks of a mesh axis, in place; all of them see the same samples.

    All parameters become DTensors on the axis: `Shard(0)` or `Shard(1)` where a style splits them, else `Replicate()`.
    Forward computes with plain tensors. Gradients of replicated parameters are reduced where ranks compute different
    parts of them (`GradientSync`; FSDP does it by itself). What a fine-tuning method has put into a layer is split with
    it (`FollowsWeight`). Call it before checkpointing activations, before compiling, and before data parallelism. On a
    mesh of one rank the plan is only checked.

    Args:
        module: On `meta`, or with equal values on all ranks. Parameters that its submodules share stay shared: give the
            module that holds all of them.
        mesh: A mesh of one axis, e.g. `ctx.mesh_for("dense")["tp"]`.
        plan: Styles by the names of submodules, empty for `module` itself; a `*` stands for one part of a name, as in
            `layers.*.attention`. A submodule that is `None` (on this pipeline stage) may be named. What lies below a
            named submodule, and is not named itself, follows its `has_partial_gradients`; everything else computes the
            same on every rank.

    Raises:
        UserError: If a name of the plan matches nothing, two of them match one submodule, a style does not fit its
            submodule, a dim that is split does not divide, or something is parallelised already; nothing is changed.
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
    distribute_parameters(module, mesh, _placements(modules, styles, mesh), default=Replicate())
    for name, submodule in modules.items():
        if submodule._parameters:
            is_partial = _style_above(name, styles).has_partial_gradients
            compute_locally(submodule, partial_axes=(axis,) if is_partial else ())
    for name, style in styles.items():
        submodule = modules[name]
        style.prepare(submodule, mesh)
        _prepare_followers(submodule, style, mesh)
        # The instance's forward hides the class's; the hooks that put local parameters in place stand around it.
        submodule.forward = partial(style.forward, submodule, mesh, submodule.forward)


def _match(module: nn.Module, plan: Mapping[str, TensorStyle]) -> dict[str, TensorStyle]:
    """The style of each submodule that the plan names."""
    names = [name for name, _ in module.named_modules()]
    absent = list(_absent(module))
    matched: dict[str, str] = {}
    for pattern in plan:
        found = [name for name in names if _fits(name, pattern)]
        if not found and not any(_fits(name, pattern) for name in absent):
            raise UserError(
                f"the tensor-parallel plan names {pattern!r}, which matches no submodule of {type(module).__name__}; "
                f"it has {', '.join(_examples(names))}."
            )
        for name in found:
            if name in matched:
                raise UserError(
                    f"the tensor-parallel plan names {name} twice, by {matched[name]!r} and by {pattern!r}; "
                    "expected one style for each submodule."
                )
            matched[name] = pattern
    return {name: plan[pattern] for name, pattern in matched.items()}


def _check_splits(name: str, module: nn.Module, style: TensorStyle) -> None:
    """Refuse a style that would split nothing, or a second style."""
    split = style.placements()
    if split and not any(module._parameters.get(parameter) is not None for parameter in split):
        raise UserError(
            f"{name} is a {type(module).__name__} without a parameter {' or '.join(split)} of its own, which "
            f"{type(style).__name__} would split; expected a layer such as torch.nn.Linear. Name the layer itself."
        )
    forward = vars(module).get("forward")
    if isinstance(forward, partial) and isinstance(getattr(forward.func, "__self__", None), TensorStyle):
        raise UserError(
            f"{name} is tensor parallel already; expected parallelize_tensor to name each submodule once. Take it out "
            "of this plan."
        )


def _check_is_first(modules: Mapping[str, nn.Module], axis: str) -> None:
    """Refuse what data parallelism has already."""
    for name, submodule in modules.items():
        axes = {
            other
            for parameter in submodule._parameters.values()
            if parameter is not None
            for other in axes_of(parameter)
        }
        if isinstance(submodule, FSDPModule) or axes - {axis}:
            raise UserError(
                f"{name or 'the module'} is data parallel already; expected parallelize_tensor to come first. Call it "
                "before parallelize_hsdp, parallelize_fsdp and parallelize_replicate."
            )


def _absent(module: nn.Module) -> Iterator[str]:
    """The names of submodules that another pipeline stage has, and that are `None` here."""
    for parent, submodule in module.named_modules():
        for name, value in (*submodule._modules.items(), *vars(submodule).items()):
            if value is None:
                yield f"{parent}.{name}".lstrip(".")


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _examples(names: list[str]) -> Iterator[str]:
    shown = [name for name in names if name]
    yield from shown[:8]
    if len(shown) > 8:
        yield f"... ({len(shown)} in all)"


def _style_above(name: str, styles: Mapping[str, TensorStyle]) -> TensorStyle:
    """The style of the nearest submodule at or above a name."""
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
    """How parameters are split, by their ids; those left out are replicated."""
    placements: dict[int, tuple[str, Placement]] = {}
    for module_name, style in styles.items():
        for name, parameter, placement in _placed(modules[module_name], style):
            full_name = f"{module_name}.{name}"
            if isinstance(placement, Shard):
                _check_divides(full_name, parameter, placement.dim, style.block, mesh)
            other_name, other = placements.setdefault(id(parameter), (full_name, placement))
            if other != placement:
                raise UserError(
                    f"{other_name} and {full_name} are one shared parameter, which the plan places as {other} and "
                    f"{placement}; expected one placement."
                )
    return {key: placement for key, (_, placement) in placements.items()}


def _placed(layer: nn.Module, style: TensorStyle) -> Iterator[tuple[str, nn.Parameter, Placement]]:
    """What a style splits: the layer's own parameters, and those of its children that follow its weight."""
    split = style.placements()
    places = [(layer, "", split)]
    if WEIGHT in split:
        places += [(child, f"{name}.", it.tensor_placements(split[WEIGHT])) for name, child, it in followers(layer)]
    for module, prefix, placements in places:
        for name, placement in placements.items():
            parameter = module._parameters.get(name)
            if parameter is not None:
                yield prefix + name, parameter, placement


def _prepare_followers(layer: nn.Module, style: TensorStyle, mesh: DeviceMesh) -> None:
    split = style.placements()
    if WEIGHT in split:
        for _, _, follower in followers(layer):
            follower.prepare_tensor(split[WEIGHT], mesh)
