"""Public names of a package that are imported at their first use (PEP 562).

`import torch.distributed.tensor` takes almost as long as `import torch`. A script that uses only a small part of a
package, such as its configuration, imports neither.
"""

import ast
import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from importlib.abc import InspectLoader
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose `__init__.py` imports its names under `TYPE_CHECKING`.

    The public names are those that `__init__.py` imports as themselves: `from package.module import name as name`.
    Type checkers read those imports, as does `.ci/docs_exports.py` for the documentation. `__getattr__` imports a name
    at its first use, and returns all names for `__all__`. No name may equal the name of a module of the package:
    importing a module sets an attribute of the package.

    Args:
        package: `__name__` in `__init__.py`.

    Returns:
        The functions to assign to `__getattr__` and `__dir__`, in the `else` branch of `if TYPE_CHECKING`.
    """

    @cache
    def owners() -> dict[str, str]:
        spec = importlib.util.find_spec(package)
        source = spec.loader.get_source(package) if spec and isinstance(spec.loader, InspectLoader) else None
        assert source is not None, f"lazy_exports reads the source of {package}, which is not installed"
        return exports(ast.parse(source))

    def get(name: str) -> Any:
        if name == "__all__":
            return sorted(owners())
        if name.startswith("__") or name not in owners():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with paused_collection():
            value = getattr(importlib.import_module(owners()[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *owners(), "__all__"})

    return get, names


@contextmanager
def paused_collection() -> Generator[None]:
    """Pause automatic garbage collection during imports: collections take a quarter of the time, and find nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def exports(init: ast.AST) -> dict[str, str]:
    """Return the public names of an `__init__.py`, each with the module it is imported from."""
    imports = [node for node in ast.walk(init) if isinstance(node, ast.ImportFrom)]
    return {each.name: str(node.module) for node in imports for each in node.names if each.asname == each.name}
