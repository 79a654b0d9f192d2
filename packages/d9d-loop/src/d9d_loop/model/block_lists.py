"""Blocks of a model: the modules that are gathered, recomputed, cut into stages and planned as one."""

from typing import Any, TypeGuard

from torch import Tensor, nn

Layers = nn.ModuleList | nn.ModuleDict


def block_lists(model: Any) -> dict[str, Layers]:
    """Return the outermost lists and dictionaries of modules of a model, whose modules are the blocks, by name.

    The largest of the decoder is first. Lists of lists have no blocks, but their lists do, and so do dictionaries of
    towers: keys without numbers, parameters mostly in lists. A list with a `forward` is a block or a part of one.
    """
    found: dict[str, Layers] = {}
    for name, module in model.named_modules():  # outer modules first
        if not _is_list(module) or name.startswith(tuple(f"{outer}.".lstrip(".") for outer in found)):
            continue
        inner = [each for each in module.modules() if each is not module and _is_list(each)]
        is_numbered = isinstance(module, nn.ModuleList) or all(key[-1:].isdigit() for key in module)
        has_towers = not is_numbered and 2 * _size(*inner) > _size(module)
        if _size(module) and not has_towers and not any(map(_is_list, module.children())):
            found[name] = module
    decoder = getattr(model, "get_decoder", lambda: model)() if hasattr(model, "get_image_features") else model
    own = {*decoder.modules()}
    return dict(sorted(found.items(), key=lambda each: (each[1] not in own, -_size(each[1]))))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of all lists of a model, each once."""
    return list(dict.fromkeys(block for layers in block_lists(model).values() for block in layers.children()))


def _size(*modules: nn.Module) -> int:
    return sum(map(Tensor.numel, {each for module in modules for each in module.parameters()}))


def _is_list(module: nn.Module) -> TypeGuard[Layers]:
    return isinstance(module, Layers) and not has_forward(module)


def has_forward(module: nn.Module) -> bool:
    """Return False for a container, such as `nn.ModuleList`, whose modules are called by the module around it."""
    return type(module).forward is not nn.Module.forward
