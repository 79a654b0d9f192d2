"""Compare the public names of a package with those that its tests use while only that package is installed.

    python .ci/used_names.py d9d_metrics RECORD packages/d9d-metrics/tests packages/d9d-metrics/README.md

A function is used when it is entered, a class when one of its methods is entered or an instance of it or of a subclass
is created. What runs while a module is imported does not count. Values, type aliases and protocols have nothing to
enter: an expression or annotation of a test or of the README names them, or the source of a used function or class.

`.ci/check_packages.py --names` installs this module into the environment of a package, with a .pth file that calls
`record`: each process of the tests, the ranks and commands too, adds an empty file for each name to the folder RECORD.
"""

import ast
import enum
import importlib
import inspect
import re
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

RECORD = "D9D_USED_NAMES"
"""Environment variable with the folder of the record."""

_CLASS_HOOKS = {
    "__init_subclass__",
    "__class_getitem__",
    "__get_pydantic_core_schema__",
    "__get_pydantic_json_schema__",
}


def exports(init: str) -> dict[str, str]:
    """Return the public names of an `__init__.py`, each with the module it is imported from."""
    imports = [node for node in ast.walk(ast.parse(init)) if isinstance(node, ast.ImportFrom)]
    return {each.name: str(node.module) for node in imports for each in node.names if each.asname == each.name}


def record(folder: str) -> None:
    """Record the names that this process, and the processes that it forks, use from now on."""
    recorder = _Recorder(Path(folder))
    sys.setprofile = _set_profile  # ty: ignore[invalid-assignment]
    execute = SourceFileLoader.exec_module

    def exec_module(self: SourceFileLoader, module: Any) -> None:
        if self.name.startswith("d9d_") and self.path.endswith("__init__.py"):
            recorder.expect(exports(Path(self.path).read_text(encoding="utf-8")))
        with recorder.importing():
            execute(self, module)
        recorder.imported(module)
        if self.name == "_pytest.assertion.rewrite":
            hook = module.AssertionRewritingHook
            original = hook.exec_module

            def exec_test(self: Any, module: Any) -> None:
                with recorder.importing():
                    original(self, module)

            hook.exec_module = exec_test
        if self.name == "_pytest.runner":
            run_test = module.runtestprotocol

            def run_recorded(*args: Any, **kwargs: Any) -> Any:
                recorder.install()  # Python removes it if it raises, such as an interruption of a test
                return run_test(*args, **kwargs)

            module.runtestprotocol = run_recorded

    SourceFileLoader.exec_module = exec_module  # ty: ignore[invalid-assignment]


def _set_profile(function: Any, set_profile: Any = sys.setprofile) -> None:
    """Set the profile function of this thread; wait while another thread that starts does the same."""
    while True:
        try:
            return set_profile(function)
        except RuntimeError:  # "Cannot install a profile function while another profile function is being installed"
            time.sleep(0)


class _Recorder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._public: dict[str, set[str]] = {}
        self._names: dict[int, str] = {}
        self._codes: list[Any] = []  # keeps the ids of `_names` valid
        self._written: set[str] = set()
        self._imports = threading.local()

    def expect(self, names: dict[str, str]) -> None:
        for name, module in names.items():
            self._public.setdefault(module, set()).add(name)
            if module in sys.modules and name in vars(sys.modules[module]):
                self._watch(module, name)

    def imported(self, module: Any) -> None:
        for name in self._public.get(module.__name__, ()):
            self._watch(module.__name__, name)

    def importing(self) -> "_Importing":
        return _Importing(self._imports)

    def _watch(self, module: str, name: str) -> None:
        if hasattr(sys.modules[module], "__path__"):
            return  # a folder of the package, whose `__init__.py` names the module that defines the name
        value = getattr(sys.modules[module], name)
        if _is_alias(value, f"{module}:{name}"):
            return
        codes = list(_codes(value))
        self._codes += codes
        self._names.update({id(code): f"{module}:{name}" for code in codes})
        if isinstance(value, type) and (not codes or _is_made_by_others(value)):
            self._watch_instances(value, f"{module}:{name}")
        self.install()

    def install(self) -> None:
        """Record the calls of this thread, and of those that it starts, unless something else watches them."""
        if sys.getprofile() is None and self._names:
            threading.setprofile(self._on_call)
            sys.setprofile(self._on_call)

    def _watch_instances(self, kind: type, name: str) -> None:
        """Record instances of a class whose functions do not show that an instance was created."""
        if issubclass(kind, enum.Enum) or getattr(kind, "_is_protocol", False) or hasattr(kind, "__total__"):
            return

        def create(cls: type, *args: Any, **kwargs: Any) -> Any:
            self._write(name)
            new = super(kind, cls).__new__  # ty: ignore[invalid-super-argument]
            if new is not object.__new__:
                return new(cls, *args, **kwargs)
            if (args or kwargs) and cls.__init__ is object.__init__:
                raise TypeError(f"{cls.__name__}() takes no arguments")  # as without this function
            return new(cls)

        with suppress(ValueError):  # a class of C without a signature
            signature = inspect.signature(kind)
            first = inspect.Parameter("cls", inspect.Parameter.POSITIONAL_ONLY)
            create.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])  # ty: ignore[missing-attribute]
        kind.__new__ = create  # ty: ignore[invalid-assignment]

    def _on_call(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and (name := self._names.get(id(frame.f_code))) is not None:
            self._write(name)

    def _write(self, name: str) -> None:
        if name not in self._written and not getattr(self._imports, "depth", 0):
            # One empty file per name: a rank that is killed loses nothing, and a test may limit the size of files.
            (self._folder / name).touch()
            self._written.add(name)


def _is_made_by_others(kind: type) -> bool:
    """Return True for a pydantic model, and a class without a constructor of its own."""
    constructors: Any = kind
    is_plain = constructors.__init__ is object.__init__ and constructors.__new__ is object.__new__
    return is_plain or hasattr(kind, "model_fields")


class _Importing:
    def __init__(self, local: threading.local) -> None:
        self._local = local

    def __enter__(self) -> None:
        self._local.depth = getattr(self._local, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        self._local.depth -= 1


def _codes(value: Any) -> Iterator[Any]:
    """Yield the code of a function, or of the functions of a class."""
    if isinstance(value, type):
        for name, member in list(vars(value).items()):  # looking at a member may add an attribute
            if name not in _CLASS_HOOKS:
                yield from _codes_of_member(member, {value.__module__, f"namedtuple_{value.__name__}"})
    elif callable(value):
        yield from _codes_of_member(value)


def _codes_of_member(member: Any, modules: Collection[str] = ()) -> Iterator[Any]:
    """Yield the code of a function; of a class's member only if these modules define it: others share functions."""
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, cached_property):
        member = member.func
    function = inspect.unwrap(getattr(member, "__func__", member))
    if isinstance(function, FunctionType) and (not modules or function.__module__ in modules):
        yield function.__code__


def unused(package: str, folder: Path, texts: Iterable[Path]) -> list[str]:
    """Return the public names of a package that neither the record nor the texts of its tests and README use."""
    public = dict(_public_names(package))
    used = {path.name for path in folder.iterdir()}
    named = {name for path in texts for tree in _trees(path) for name in _names_in(tree)}
    root = Path(inspect.getfile(importlib.import_module(package))).parent
    definitions = [
        found
        for path in root.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        for found in _definitions(".".join((package, *path.relative_to(root).with_suffix("").parts)), node)
    ]
    count = -1
    while count < len(named):  # a definition may name an alias that names another one
        count = len(named)
        for key, node in definitions:
            is_named = key.partition(":")[2] in named
            if key in used or (is_named and (key not in public or _has_nothing_to_enter(key))):
                named |= set(_names_in(node))
    # An instance of a subclass is an instance of its bases.
    classes = [node for key, node in definitions if key in used and isinstance(node, ast.ClassDef)]
    bases = {name for node in classes for base in node.bases for name in _names_in(base)}
    return sorted(
        f"{shown} (of {key.partition(':')[0]})"
        for key, shown in public.items()
        if key not in used
        and key.partition(":")[2] not in bases
        and not (_has_nothing_to_enter(key) and key.partition(":")[2] in named)
    )


def _definitions(module: str, node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield `module:name` of what a statement defines, with the statement."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield f"{module}:{node.name}", node
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                yield f"{module}:{target.id}", node


def _public_names(package: str) -> Iterator[tuple[str, str]]:
    root = Path(inspect.getfile(importlib.import_module(package))).parent
    for init in sorted(root.rglob("__init__.py"), reverse=True):
        owner = ".".join((package, *init.parent.relative_to(root).parts))
        for name, module in exports(init.read_text(encoding="utf-8")).items():
            path = root.joinpath(*module.split(".")[1:])
            if module.partition(".")[0] == package and not path.is_dir():
                yield f"{module}:{name}", f"{owner}.{name}"


def _has_nothing_to_enter(key: str) -> bool:
    module, _, name = key.partition(":")
    value = getattr(importlib.import_module(module), name)
    if not isinstance(value, type) or _is_alias(value, key):
        return not any(_codes(value)) or _is_alias(value, key)
    functions = [each for each in vars(value).values() if inspect.isfunction(each)]
    if functions and all(getattr(each, "__isabstractmethod__", False) for each in functions):
        return True  # its subclasses name it
    return issubclass(value, enum.Enum) or getattr(value, "_is_protocol", False) or hasattr(value, "__total__")


def _is_alias(value: Any, key: str) -> bool:
    module, _, name = key.partition(":")
    return isinstance(value, type) and (value.__module__, value.__name__) != (module, name)


def _trees(path: Path) -> Iterator[ast.AST]:
    """Yield the sources of a folder, of a file, or of the Python blocks of a page."""
    for file in path.rglob("*.py") if path.is_dir() else [path]:
        text = file.read_text(encoding="utf-8")
        blocks: list[str] = (
            [text]
            if file.suffix == ".py"
            else re.findall(r"^```python[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        )
        for block in blocks:
            yield ast.parse(block)


def _names_in(tree: ast.AST) -> Iterator[str]:
    """Yield the names that expressions and annotations read; imports are neither."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def main(package: str, folder: str, *texts: str) -> None:
    found = unused(package, Path(folder), map(Path, texts))
    if found:
        raise SystemExit(
            f"{len(found)} public names of {package} are not used by its own tests: {', '.join(found)}. "
            "Use each in a test of the package, or remove it from __init__.py."
        )
    print(f"the tests use all {len(dict(_public_names(package)))} public names of {package}")


if __name__ == "__main__":
    main(*sys.argv[1:])
