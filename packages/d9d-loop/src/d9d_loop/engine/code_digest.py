"""Description of a job's code: all ranks compare it, and a resumed run reports what has changed.

A description is a mapping of names to texts, so that a difference names its place. Other code on one rank gives wrong
results, not an error. So ranks compare the script, the versions of the packages, the structure of the model, and the
code of the user's functions, with the functions that they refer to: `act = F.relu` on one rank and `act = F.gelu` on
another one. Checkpoints contain digests of the source files of the user's modules.
"""

import inspect
import os
import platform
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from pydantic import JsonValue
from torch import nn

from d9d_loop.data.contents import digest_of, digest_of_files
from d9d_loop.model.built_model import BuiltModel, describe_tensors
from d9d_loop.task import BatchTask

Parts: TypeAlias = dict[str, str]
_Seen: TypeAlias = dict[int, tuple[int, Any]]
"""Number of each described object by its id, and the object, which keeps the id in use."""
BASE = "the base weights"  # of adapters: the name of their digest
BASE_FILE = "base_digest.json"  # of a folder of adapters
_PACKAGES = ("d9d-dist", "d9d-state", "d9d-modules", "d9d-moe", "d9d-pipeline", "d9d-peft", "d9d-metrics", "d9d-loop")
_STANDARD = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_INSTALLED = {Path(path).resolve() for path in (*_STANDARD, *site.getsitepackages(), site.getusersitepackages())}


def source_digests(model_folder: Path | None = None, *, has_adapters: bool = False) -> dict[str, str]:
    """Return a digest of the source of each loaded module that is neither installed nor a part of d9d, under its name.

    The name of the script is that of its file. A model's config.json is included, and its weights if `has_adapters`.
    """
    files: dict[str, list[Path]] = {}
    if model_folder is not None:
        files["the model's config.json"] = [model_folder / "config.json"]
        files[BASE] = sorted(model_folder.glob("*.safetensors")) if has_adapters else []
    for name in sorted(sys.modules.keys() - {"__mp_main__"}):  # multiprocessing's second name of the script
        if (file := _own_file(name)) is not None and file.suffix == ".py":
            files[f"the code of {file.name if name == '__main__' else name}"] = [file]
    return {name: digest_of_files(own)[:16] for name, own in files.items() if any(map(Path.is_file, own))}


def evaluation_digest(identity: JsonValue) -> dict[str, str]:
    """Return the digest of an identity of evaluation data, under its name."""
    return {"the evaluation data": digest_of(identity)}


def describe_code(model: BuiltModel, task: BatchTask, others: Mapping[str, object]) -> dict[str, Parts]:
    """Return what all ranks must agree on, by the name of each part in an error message.

    `others` are more objects of the user, by name. Flags of the task are not compared: a task may print on rank 0 only.
    Neither are numbers under a name that begins with an underscore, such as a time.
    """
    user = {
        "the task": type(task),
        **{
            f"the task's {name}": value
            for name, value in vars(task).items()
            if not isinstance(value, bool | float if name.startswith("_") else bool)
        },
        **others,
    }
    return {
        "the software": _versions(),
        "the script": {"its text": _script()},
        "the structure of the model": describe_tensors(model.tensors),
        "the model": dict(describe_model(model.module)),
        "the code of the job": {name: _describe(value, {}) for name, value in user.items()},
    }


def _versions() -> Parts:
    found = {"Python": platform.python_version(), "torch": torch.__version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a package that this job does not need
            continue
    return found


def _script() -> str:
    file = _own_file("__main__")
    return file.read_text(encoding="utf-8", errors="replace") if file is not None and file.is_file() else ""


def describe_model(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the name of each module, and its class, settings and code."""
    kinds = {kind: _describe(kind, {}) for kind in {type(module) for module in model.modules()}}
    for name, module in model.named_modules():
        kind = type(module)
        own = sorted((key, value) for key, value in vars(module).items() if not key.startswith("_"))
        values = [f"{key}={_describe(value, {})}" for key, value in own if not isinstance(value, nn.Module)]
        yield str(name or kind.__name__), "\n".join([kinds[kind], module.extra_repr(), *values])


def _describe(value: Any, seen: _Seen) -> str:
    """Describe functions, classes and numbers; other values, such as tensors and strings, may differ between ranks.

    Each object is described once, and then by its number, because the functions of a module may call each other.
    """
    if isinstance(value, bool | float):
        return repr(value)
    if id(value) in seen:
        return f"#{seen[id(value)][0]}"
    seen[id(value)] = len(seen), value
    text = ""
    match value:
        case partial():
            text = " ".join(_describe(each, seen) for each in (value.func, *value.args, *value.keywords.values()))
        case MethodType():
            text = _describe(value.__func__, seen)
        case FunctionType() if not _is_installed(value):
            text = _describe_function(value, seen)
        case BuiltinFunctionType() | FunctionType():
            text = f"{value.__module__}.{value.__qualname__}"
        case type():
            text = _describe_class(value, seen)
        case _ if callable(value) and not isinstance(value, nn.Module) and not _is_installed(type(value)):
            text = _describe_class(type(value), seen)
    return text


def _describe_class(kind: type, seen: _Seen) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    if _is_installed(kind):
        return name
    methods = (value for base in kind.mro() if not _is_installed(base) for value in vars(base).values())
    functions = (inspect.unwrap(each) for each in methods if isinstance(each, FunctionType))
    return " ".join([name, *(_describe(each, seen) for each in functions)])


def _describe_function(function: FunctionType, seen: _Seen) -> str:
    code = function.__code__
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
    named = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    functions = (each for each in (*cells, *named) if callable(each) and each is not print)
    return " ".join([function.__qualname__, _describe_bytes(code), *(_describe(each, seen) for each in functions)])


def _describe_bytes(code: CodeType) -> str:
    return " ".join([code.co_code.hex(), *code.co_names, *map(_describe_constant, code.co_consts)])


def _describe_constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return _describe_bytes(value)
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_installed(value: Any) -> bool:
    """Return True for code of the standard library, of d9d or of an installed package, whose versions are compared."""
    name = str(value.__module__)
    return name != "__main__" and _own_file(name) is None


def _own_file(name: str) -> Path | None:
    """Return the file of a loaded module; `None` for modules that are installed, a part of d9d, or without a file."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or name.startswith("d9d_"):
        return None
    return _own_path(file if file.startswith("/") else os.path.abspath(file))  # noqa: PTH100 - one text for the cache


@cache
def _own_path(file: str) -> Path | None:
    folder, base = os.path.split(file)
    own = _own_folder(folder)
    return None if own is None else own / base


@cache
def _own_folder(folder: str) -> Path | None:
    """Return a folder without symbolic links; `None` for one of installed packages."""
    path = Path(folder).resolve()
    return path if _INSTALLED.isdisjoint((path, *path.parents)) else None
