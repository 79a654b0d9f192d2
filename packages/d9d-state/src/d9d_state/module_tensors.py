"""Which tensors a module's state consists of, and under which names: the one place that decides it."""

from torch import Tensor, nn

from d9d_dist import canonical_name


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer by name; a tied tensor under each of its names.

    The tensors are the module's own, to be changed in place. What wrappers of compilation and activation checkpointing
    add to names is left out, so that state does not depend on them.

    Raises:
        ValueError: If the module has extra state that is no tensor: it has no place in a safetensors file.
    """
    state = module.state_dict(keep_vars=True)
    extra = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if extra:
        raise ValueError(f"{', '.join(extra)}: expected tensors only. Keep other state out of get_extra_state().")
    return {canonical_name(name): tensor for name, tensor in state.items()}


def unique_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer under its first name."""
    first_names: dict[int, str] = {}
    tensors = module_tensors(module)
    for name, tensor in tensors.items():
        first_names.setdefault(id(tensor), name)
    return {name: tensors[name] for name in first_names.values()}


def aliases(module: nn.Module) -> dict[str, str]:
    """For each name the first name of the same tensor, which is itself where nothing is tied."""
    first_names: dict[int, str] = {}
    return {name: first_names.setdefault(id(tensor), name) for name, tensor in module_tensors(module).items()}
