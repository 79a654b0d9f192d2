"""Ranks that are forked from a process with imported modules: `d9d-torchrun --warm`.

Python's fork server imports this module, which imports the modules of the ranks. The fork server has one thread and
touches no device. torchrun's agent asks the fork server to fork each rank, which runs this file as a script.
"""

import ast
import gc
import importlib
import importlib.util
import json
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

COMMAND = "D9D_WARM_COMMAND"
"""Environment variable with the command of the ranks for the fork server, without arguments, as a JSON list."""

# Modules that a job imports after its start, in addition to the imports of its script.
_LATE_IMPORTS = ("torch._dynamo", "torch.distributed.run", "d9d_loop.job.plan", "d9d_loop.job.training")


def import_for(command: Sequence[str]) -> None:
    """Import the modules of a training job, and those that a script imports at its top level.

    Args:
        command: Path of the script, or "-m" and the name of a module. Neither is executed.
    """
    _add_to_path(command)
    for name in _LATE_IMPORTS:
        importlib.import_module(name)
    with suppress(Exception):  # a rank that runs the script reports its errors
        for statement in ast.parse(_file_of(command).read_bytes()).body:
            _import_names(statement)
    gc.collect()
    gc.freeze()  # a collection in a rank would write to all these objects, and so copy their pages


def _file_of(command: Sequence[str]) -> Path:
    """Return the file that a command runs. Imports the packages of a module, as Python does."""
    if command[0] != "-m":
        return Path(command[0])
    spec = importlib.util.find_spec(command[1])
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{command[1]}.__main__")
    return Path("" if spec is None or spec.origin is None else spec.origin)


def _add_to_path(command: Sequence[str]) -> None:
    """Prepend the script's folder to `sys.path`, or the current folder for `-m`, as Python does."""
    sys.path.insert(0, str(Path.cwd() if command[0] == "-m" else Path(command[0]).absolute().parent))


def _import_names(statement: ast.stmt) -> None:
    """Import the modules and names of an import statement. Accessing a name of a lazy module imports the name."""
    with suppress(ImportError, AttributeError):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                importlib.import_module(alias.name)
        elif isinstance(statement, ast.ImportFrom) and statement.module is not None and not statement.level:
            module = importlib.import_module(statement.module)
            for alias in statement.names:
                getattr(module, alias.name, None)


def _run(command: Sequence[str]) -> None:
    """Run a script or module with its arguments in this process, which was forked for it."""
    import torch  # noqa: PLC0415 - imported already

    _add_to_path(command)
    with suppress(OSError):
        os.setsid()  # as torchrun does: a signal of the terminal reaches the launcher only
    # OpenMP has read the variable in the fork server, before torchrun has set it.
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        torch.set_num_threads(int(threads))
    sys.argv = list(command[1:] if command[0] == "-m" else command)
    try:
        if command[0] == "-m":
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
    except Exception:  # torchrun would print the traceback of only one rank of the node
        traceback.print_exc()
        raise SystemExit(1) from None


if __name__ == "__main__":
    _run(sys.argv[1:])
elif COMMAND in os.environ:
    import_for(json.loads(os.environ.pop(COMMAND)))
