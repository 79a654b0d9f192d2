"""Workers of pytest-xdist that are forked from one process, which has collected the tests.

Otherwise each worker, and the fork server of each worker's ranks, imports torch, transformers and the test files again.
"""

import atexit
import json
import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Literal
from unittest import mock

import pytest
from execnet import gateway_io
from execnet.gateway_base import ExecModel, Popen2IO

ARGUMENTS = "D9D_COLLECTED_ARGUMENTS"
"""Environment variable with the arguments of pytest, for the module `collected_tests`."""


def fork_workers(config: pytest.Config) -> None:
    """Let execnet fork the workers of this run, and replacements of crashed ones, instead of starting interpreters."""
    arguments = json.dumps([str(argument) for argument in config.invocation_params.args])
    # `collected_tests` restores the environment. Servers ignore the `sys.path` that Python passes to them.
    paths = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    forkserver.set_forkserver_preload(["collected_tests"])
    with mock.patch.dict(os.environ, {ARGUMENTS: arguments, "PYTHONPATH": paths}):
        forkserver.ensure_running()
    mock.patch.object(gateway_io, "create_io", lambda _, execmodel: ForkedWorker(execmodel)).start()


class ForkedWorker(Popen2IO):
    """Pipes to a forked worker, with the methods of execnet's `Popen2IOMaster`."""

    def __init__(self, execmodel: ExecModel) -> None:
        context = multiprocessing.get_context("forkserver")
        stdin, to_stdin = context.Pipe(duplex=False)
        from_stdout, stdout = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(stdin, stdout))
        process.start()
        stdin.close()
        stdout.close()
        self.wait, self.kill = process.join, process.kill
        super().__init__(_file(to_stdin, "wb"), _file(from_stdout, "rb"), execmodel)


def _file(pipe: Connection, mode: Literal["rb", "wb"]) -> IO[bytes]:
    return os.fdopen(os.dup(pipe.fileno()), mode)


def _serve(stdin: Connection, stdout: Connection) -> None:
    """Do what `python -c BOOTSTRAP` does with these pipes."""
    atexit._clear()  # as in other forked processes, and so that `_run_exitfuncs` calls functions of this process only
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    stdin.close()
    stdout.close()
    if (torch := sys.modules.get("torch")) and torch.accelerator.is_available():
        # The driver of an accelerator may be loaded. It does not work in forked processes.
        os.execv(sys.executable, [sys.executable, "-u", "-c", gateway_io.popen_bootstrapline])  # noqa: S606
    multiprocessing.set_start_method(None, force=True)  # the default, which children of a fork server do not have
    if sys.version_info < (3, 14):  # later, a child does not have the server's key
        # Python would start another server for the ranks, which imports the modules again.
        forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None  # ty: ignore[invalid-assignment]
    sys.stdin = os.fdopen(0, closefd=False)
    try:
        exec(gateway_io.popen_bootstrapline, {"__name__": "__main__"})  # noqa: S102
    finally:
        atexit._run_exitfuncs()
