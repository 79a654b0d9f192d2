"""Main loop of a rank's process: receive a call, run it in a fresh process group, and send the outcome."""

import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle  # noqa: TID251 - between a test and its ranks, on one host
import random
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from d9d_dist.groups.process_groups import destroy_process_groups


@dataclass(frozen=True, slots=True)
class Call:
    """Function call on one rank. `arguments` stay pickled until the modules of their types are loaded.

    `files` maps the modules of the function and the arguments to the files from which the parent loaded them. `None` as
    a value in `environment` unsets the variable.
    """

    module: str
    files: Mapping[str, str]
    function: str
    arguments: bytes
    environment: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a call: a pickled result, or the traceback as text."""

    result: bytes | None = None
    error: str | None = None


def serve(connection: Connection, log: str) -> None:
    """Serve calls until the parent closes the connection. stdout and stderr, even of native code, go to `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    _print_stacks_on_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and terminates its ranks
    torch.set_num_threads(1)
    gc.disable()  # collections follow each call
    gc.freeze()
    num_modules = len(sys.modules)
    while True:
        try:
            call = pickle.loads(connection.recv_bytes())  # noqa: S301  (bytes of our own parent)
        except (EOFError, OSError):
            return
        _print_stacks_on_signal()
        connection.send_bytes(pickle.dumps(_run(call)))
        # Process groups in reference cycles keep their threads, each of which wakes up 100 times per second. Dozens of
        # such groups would slow down the machine. gc.freeze() excludes imported objects.
        gc.collect()
        if len(sys.modules) > num_modules:
            num_modules = len(sys.modules)
            gc.freeze()


def _print_stacks_on_signal() -> None:
    """Print the stacks on SIGUSR1. A job that ran earlier in this process replaces the handler by the default one."""
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def _run(call: Call) -> Outcome:
    for name, value in call.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    torch.manual_seed(0)
    random.seed(0)
    try:
        function = _load_function(call)
        result = pickle.dumps(function(*pickle.loads(call.arguments)))  # noqa: S301  (bytes of our own parent)
        if dist.is_initialized():
            dist.barrier()  # no rank leaves while a peer may still need it
    except BaseException:  # report every exception, including SystemExit
        return Outcome(error=traceback.format_exc())
    destroy_process_groups()
    torch.set_default_dtype(torch.float32)
    return Outcome(result=result)


def _load_function(call: Call) -> Callable[..., Any]:
    absent = {name: file for name, file in call.files.items() if name not in sys.modules}
    for name, file in absent.items():
        if name not in sys.modules:
            _load_module(name, file)
    if absent:
        gc.freeze()  # excludes the modules' objects from the collection after every call
    target: Any = sys.modules[call.module]
    for part in call.function.split("."):
        target = getattr(target, part)
    return target


def _is_importable(name: str, file: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin) == Path(file)


def _load_module(name: str, file: str) -> ModuleType:
    """Import a module by name; if that fails, load its file under the name that the parent uses.

    Under pytest's `importlib` mode test modules cannot be imported by name, but pickled arguments refer to that name.
    """
    if _is_importable(name, file):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, Path(file))
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {file} as module {name}.")
    module = importlib.util.module_from_spec(spec)
    for parent in accumulate(name.split(".")[:-1], "{}.{}".format):
        sys.modules.setdefault(parent, ModuleType(parent))  # pickle imports the parents of a dotted name too
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
