"""Which modules a method is for: by a pattern of names or by type; and what to tell a person if there are none."""

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import nn

from d9d_dist import UserError

Target: TypeAlias = str | type[nn.Module] | tuple[type[nn.Module], ...]
"""A regular expression that is searched in qualified names, or types of modules."""

_NAMES_SHOWN = 8
# Layers whose weights torch uses without calling them, and what an adapter would come to.
_NOT_CALLED: Mapping[type[nn.Module], tuple[tuple[str, ...], str]] = {
    nn.MultiheadAttention: (("out_proj",), "would change nothing"),
    nn.TransformerEncoderLayer: (("linear1", "linear2"), "would be left out in evaluation, where it takes a fast path"),
}


def check_target(target: Target, method: str) -> None:
    """Refuse what is neither a regular expression nor types.

    Raises:
        UserError: Naming the method, what it got and what is wrong with it.
    """
    if isinstance(target, str):
        try:
            re.compile(target)
        except re.error as error:
            raise UserError(f"{method} got the pattern {target!r}, which is no regular expression: {error}.") from error
        return
    types = target if isinstance(target, tuple) else (target,)
    if not types or not all(isinstance(each, type) and issubclass(each, nn.Module) for each in types):
        raise UserError(
            f"{method} got the target {target!r}; expected a regular expression or types of modules, such as nn.Linear."
        )


def is_target(target: Target, name: str, module: nn.Module) -> bool:
    """Whether a module is meant, by its own name or type; the model itself has no name that a pattern could match."""
    if isinstance(target, str):
        return bool(name) and re.search(target, name) is not None
    return isinstance(module, target)


def find_layers(
    model: nn.Module, target: Target, fits: Callable[[nn.Module], bool], *, method: str, expected: str
) -> tuple[dict[str, nn.Module], tuple[str, ...]]:
    """The layers of a model that a method is for, each once, under its first name; others that match are passed over.

    Args:
        model: The model.
        target: What to look for.
        fits: Whether the method can deal with a module.
        method: Its name, for the message.
        expected: What it can deal with, for the message.

    Returns:
        The layers; and a message, if there is none.

    Raises:
        UserError: If torch uses the weight of one without calling the layer, so that an adapter would have no say.
    """
    modules = dict(model.named_modules())
    found = {name: module for name, module in modules.items() if is_target(target, name, module)}
    layers = {name: module for name, module in found.items() if fits(module)}
    _refuse_layers_not_called(layers, modules, method)
    if layers:
        return layers, ()
    others = shorten([f"{name} ({type(module).__name__})" for name, module in found.items()])
    message = (
        f"{method} got {_describe(target)}, which matches {f'only {others}' if found else 'no module'}; expected "
        f"{expected}. This model has {shorten([name for name, module in modules.items() if fits(module)])}."
    )
    return {}, (message,)


def _refuse_layers_not_called(layers: Mapping[str, nn.Module], modules: Mapping[str, nn.Module], method: str) -> None:
    for name in layers:
        owner, _, child = name.rpartition(".")
        for kind, (children, outcome) in _NOT_CALLED.items():
            if owner != name and isinstance(modules[owner], kind) and child in children:
                raise UserError(
                    f"{method} got a target that matches {name}, whose weight nn.{kind.__name__} uses without calling "
                    f"the layer: an adapter {outcome}. Narrow the target, train it by FullTune, or build the model of "
                    "layers that are called."
                )


def shorten(names: list[str]) -> str:
    """A list of names for a message: the first few, and how many more there are."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return (", ".join(names[:_NAMES_SHOWN]) or "none") + more


def claims(layers: Mapping[str, nn.Module], first_names: Mapping[str, str]) -> frozenset[str]:
    """The parameters that layers own, a tied one by its first name."""
    return frozenset(
        first_names[f"{name}.{parameter}".lstrip(".")]
        for name, layer in layers.items()
        for parameter, value in layer._parameters.items()
        if value is not None
    )


def _describe(target: Target) -> str:
    if isinstance(target, str):
        return f"the pattern {target!r}"
    types = target if isinstance(target, tuple) else (target,)
    return f"the type{'s' if len(types) > 1 else ''} {', '.join(each.__name__ for each in types)}"
