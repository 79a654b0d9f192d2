"""Selection of the modules that a method adapts, by a pattern of names or by type, and the errors for bad targets."""

import re
from collections.abc import Mapping
from typing import TypeAlias

from torch import nn

from d9d_dist import UserError

Target: TypeAlias = str | type[nn.Module] | tuple[type[nn.Module], ...]
"""Regular expression that is searched in qualified names (`re.search`), or one or several module types."""

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


def refuse_layers(layers: Mapping[str, nn.Module], modules: Mapping[str, nn.Module], method: str) -> None:
    """Raise `UserError` for a layer that cannot have an adapter.

    Either torch uses the layer's weight without calling the layer, so that an adapter would have no effect, or the
    layer computes its weight from other parameters.
    """
    for name, layer in layers.items():
        if layer._parameters.get("weight") is None:
            raise UserError(
                f"{method} got a target that matches {name} ({type(layer).__name__}), which computes its weight from "
                "other parameters, such as with torch.nn.utils.parametrizations; expected a layer with a weight of its "
                "own. Narrow the target, or remove the parametrization."
            )
        owner, _, child = name.rpartition(".")
        for kind, (children, outcome) in _NOT_CALLED.items():
            if owner != name and isinstance(modules[owner], kind) and child in children:
                raise UserError(
                    f"{method} got a target that matches {name}, whose weight nn.{kind.__name__} uses without calling "
                    f"the layer: an adapter {outcome}. Narrow the target, train the layer with FullTune, or replace "
                    f"nn.{kind.__name__} by a module that calls its layers."
                )


def describe(target: Target) -> str:
    """Return a pattern or types for a message."""
    if isinstance(target, str):
        return f"the pattern {target!r}"
    types = target if isinstance(target, tuple) else (target,)
    return f"the type{'s' if len(types) > 1 else ''} {', '.join(each.__name__ for each in types)}"
