"""Blocks of a model: the modules that are gathered, recomputed, cut into stages and planned as one."""

from typing import Any, TypeGuard

from torch import Tensor, nn

Layers = nn.ModuleList | nn.ModuleDict


def block_lists(model: Any) -> dict[str, Layers]:
    """Return the outermost lists and dictionaries of modules of a model, whose modules are the blocks, by name.

    The largest of the decoder is first. Lists of lists have no blocks, but their lists do. A list with a `forward` is a
    block or a part of one.
    """
    found: dict[str, Layers] = {}
    for name, module in model.named_modules():  # outer modules first
        if not _is_list(module) or name.startswith(tuple(f"{outer}.".lstrip(".") for outer in found)):
            continue
        children = list(module.children())
        has_lists = any(map(_is_list, children))
        if not has_lists and any(each.numel() for child in children for each in child.parameters()):
            found[name] = module
    decoder = getattr(model, "get_decoder", lambda: model)() if hasattr(model, "get_image_features") else model
    own = {*decoder.modules()}
    size = {name: sum(map(Tensor.numel, each.parameters())) for name, each in found.items()}
    return dict(sorted(found.items(), key=lambda each: (each[1] not in own, -size[each[0]])))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of all lists of a model, each once."""
    return list(dict.fromkeys(block for layers in block_lists(model).values() for block in layers.children()))


def _is_list(module: nn.Module) -> TypeGuard[Layers]:
    return isinstance(module, Layers) and type(module).forward is nn.Module.forward
