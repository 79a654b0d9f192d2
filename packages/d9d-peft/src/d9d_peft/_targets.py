"""Selection of the modules that a method adapts, by a pattern of names or by type, and the errors for bad targets."""

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import nn

from d9d_dist import UserError

Target: TypeAlias = str | type[nn.Module] | tuple[type[nn.Module], ...]
"""Regular expression that is searched in qualified names (`re.search`), or one or several module types."""

_MAX_NAMES = 8
# Child layers whose weights torch uses without calling the layer, and the consequence for an adapter of the layer.
_NOT_CALLED: Mapping[type[nn.Module], tuple[tuple[str, ...], str]] = {
    nn.MultiheadAttention: (("out_proj",), "would have no effect"),
    nn.TransformerEncoderLayer: (("linear1", "linear2"), "would be skipped in evaluation, by the fast path"),
}


def check_target(target: Target, method: str) -> None:
    """Raise `UserError` unless a target is a valid regular expression or module types."""
    if isinstance(target, str):
        try:
            re.compile(target)
        except re.error as error:
            raise UserError(
                f"{method} got the pattern {target!r}, which is not a valid regular expression: {error}. Correct the "
                "pattern."
            ) from error
        return
    types = target if isinstance(target, tuple) else (target,)
    if not types or not all(isinstance(each, type) and issubclass(each, nn.Module) for each in types):
        raise UserError(
            f"{method} got the target {target!r}; expected a regular expression or module types, such as nn.Linear."
        )


def is_target(target: Target, name: str, module: nn.Module) -> bool:
    """Return True if a target matches a module by name or type. A pattern never matches the root module."""
    if isinstance(target, str):
        return bool(name) and re.search(target, name) is not None
    return isinstance(module, target)


def find_layers(
    model: nn.Module, target: Target, fits: Callable[[nn.Module], bool], *, method: str, expected: str
) -> tuple[dict[str, nn.Module], tuple[str, ...]]:
    """Return the supported layers that match a target, by first name; and the error message if there are none.

    `fits` returns True for supported modules; other matches are skipped. `method` and `expected` are for messages.
    Raises `UserError` if torch uses the weight of a match without calling the layer: an adapter would have no effect.
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
                    f"the layer: an adapter {outcome}. Narrow the target, train the layer with FullTune, or replace "
                    f"nn.{kind.__name__} by a module that calls its layers."
                )


def shorten(names: list[str]) -> str:
    """Format a list of names for a message: the first eight, and the number of further ones."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return (", ".join(names[:_MAX_NAMES]) or "none") + more


def claims(layers: Mapping[str, nn.Module], first_names: Mapping[str, str]) -> frozenset[str]:
    """Return the layers' parameter names; a tied parameter is listed under its first name only."""
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
