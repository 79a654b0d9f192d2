"""Extension of griffe: a module's public names are those that it imports as themselves, if it has no `__all__`."""

import ast
from typing import Any

import griffe

from d9d_dist.lazy_exports import exports


class Exports(griffe.Extension):
    """Set the exports of modules that `lazy_exports` serves."""

    def on_module_members(self, *, node: Any, mod: griffe.Module, **_: Any) -> None:
        if mod.exports is None and isinstance(node, ast.Module):
            mod.exports = [*exports(node)] or None
