"""The private names of torch that a source uses, as far as its syntax shows them; private_names.toml lists them all."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Set
from functools import cache
from typing import Any


def is_private(name: str) -> bool:
    """Return True for `_name`, not for `__name__` and `_`."""
    return name.startswith("_") and not name.endswith("__") and name != "_"


def _is_private_path(path: str) -> bool:
    return any(map(is_private, path.split(".")))


def resolve(path: str) -> Any:
    """Return the module or attribute of a dotted name; raise `ImportError` or `AttributeError` if there is none."""
    parts = path.split(".")
    value = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:]):
        if not hasattr(value, part) and inspect.ismodule(value):
            importlib.import_module(".".join(parts[: index + 2]))
        value = getattr(value, part)
    return value


def _of_torch(node: ast.Import) -> list[ast.alias]:
    return [each for each in node.names if f"{each.name}.".startswith("torch.")]


def _imports(nodes: list[ast.AST]) -> dict[str, str]:
    """Return the full name of each name that a source imports from torch."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for each in _of_torch(node):
                name = each.name if each.asname is not None else "torch"
                found[name if each.asname is None else each.asname] = name
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("torch."):
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def _path(node: ast.AST, imports: dict[str, str]) -> str:
    """Return the full name of an expression such as `torch.ops.aten`; "" for other expressions."""
    if isinstance(node, ast.Name):
        return imports.get(node.id, "")
    owner = _path(node.value, imports) if isinstance(node, ast.Attribute) else ""
    return f"{owner}.{node.attr}" if owner and isinstance(node, ast.Attribute) else ""


@cache
def nodes_of(text: str) -> list[ast.AST]:
    """Return all nodes of a source's syntax."""
    return list(ast.walk(ast.parse(text)))


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def _defined(nodes: list[ast.AST]) -> set[str]:
    """Return the names that a source defines: functions, classes, variables, fields and attributes of `self`."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
    return names


def defined_names(text: str) -> set[str]:
    """Return the private names that a source defines."""
    return {name for name in _defined(nodes_of(text)) if is_private(name)}


@cache
def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):  # a class of C++
        return ""


def has_attribute(owner: object, name: str) -> bool:
    """Return True if a class or one of its bases defines an attribute, or its code names one of its instances."""
    classes = inspect.getmro(owner) if inspect.isclass(owner) else ()
    return any(name in vars(cls) or re.search(rf"\b{name}\b", _source(cls)) for cls in classes)


def _inherited(node: ast.ClassDef, imports: dict[str, str]) -> Iterator[str]:
    """Yield the private names of torch's base classes that a class uses or defines again."""
    attributes = [each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and _is_self(each.value)]
    methods = [each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef)]
    names = [name for name in [*attributes, *methods] if is_private(name)]
    paths = [path for base in node.bases if (path := _path(base, imports))]
    for base in (resolve(path) for path in paths if names):
        yield from (name for name in names if has_attribute(base, name))


def _in_strings(node: ast.AST) -> set[str]:
    """Return the names of `"torch._dynamo"` and `getattr(x, "_name")`."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"getattr", "hasattr", "setattr"}:
        constants = [
            each for argument in node.args[1:2] for each in ast.walk(argument) if isinstance(each, ast.Constant)
        ]
        return {name for each in constants if isinstance(name := each.value, str) and is_private(name)}
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return {text} if re.fullmatch(r"torch(\.\w+)+", text) and _is_private_path(text) else set()


def private_names(text: str, *, ours: Set[str] = frozenset()) -> set[str]:
    """Return the private names of torch that a source uses.

    Full names (`torch._dynamo`) of what is imported from torch, and only the last part (`_local_tensor`) of attributes
    that the source does not define: their owners are unknown. They include private names of other libraries. `ours`
    are names that base classes of ours may define.
    """
    nodes = nodes_of(text)
    imports, defined = _imports(nodes), _defined(nodes)
    found = {path for path in imports.values() if _is_private_path(path)}
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(each.name for each in _of_torch(node) if _is_private_path(each.name))
        elif isinstance(node, ast.ClassDef):
            found.update(_inherited(node, imports))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            path = _path(node, imports)
            is_known = node.attr in (defined | ours if _is_self(node.value) else defined)
            is_changed = isinstance(node.ctx, ast.Store) and not _is_self(node.value)
            found.update({path} if path else {node.attr} if is_changed or not is_known else ())
        else:
            found.update(_in_strings(node) - defined)
    return found
