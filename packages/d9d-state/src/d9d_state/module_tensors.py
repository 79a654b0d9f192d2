"""Names and tensors of a module's state: parameters and persistent buffers."""

from collections.abc import Mapping

from torch import Tensor, nn

from d9d_dist import UserError, canonical_name


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer by name; a tied tensor appears under each of its names.

    The tensors share memory with the module. Name prefixes of `torch.compile` and activation checkpointing wrappers are
    removed. Raises `UserError` for extra state that is not a tensor, which safetensors cannot store.
    """
    state = module.state_dict(keep_vars=True)
    extra = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if extra:
        raise UserError(
            f"got {', '.join(extra)} in the state dict; expected tensors only, which checkpoints can store. Remove "
            "get_extra_state() and quantized layers of torch.ao."
        )
    return {canonical_name(name): tensor for name, tensor in state.items()}


def unique_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer once, under its first name."""
    tensors = module_tensors(module)
    return {name: tensors[name] for name in dict.fromkeys(aliases(tensors).values())}


def aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each name to the first name of the same tensor; the name of an untied tensor maps to itself."""
    first_names: dict[int, str] = {}
    return {name: first_names.setdefault(id(tensor), name) for name, tensor in tensors.items()}
