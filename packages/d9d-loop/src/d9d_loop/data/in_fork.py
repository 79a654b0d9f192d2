"""Calls in a forked process, whose side effects are discarded: opened files, caches, counters and random states."""

import gc
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from typing import TYPE_CHECKING

import torch

from d9d_dist import read_launch
from d9d_dist.failures.slow_report import reported_if_slow

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from pydantic import JsonValue


_SECONDS = 30.0


def read_apart(read: "Callable[[], JsonValue]", *, num_workers: int, what: str) -> "JsonValue":
    """Return the JSON value of `read`, which reads samples, without an effect on the samples that workers read.

    A dataset may open its files at the first read. Forked workers would share such a file with its position, and read
    each other's samples; other workers could not receive it. So with workers, `read` runs in a forked process. If it
    takes long, a line names `what` is read; nothing is stopped.
    """
    text = f"rank {read_launch().rank} has been reading {what} for {_SECONDS:g} s, and keeps waiting."
    with reported_if_slow(text, seconds=_SECONDS):
        if num_workers:
            with suppress(EOFError):
                return json.loads(in_fork(lambda: json.dumps(read())))
        return read()


def in_fork(
    function: Callable[[], str], *, seconds: float | None = None, meanwhile: Callable[[], object] | None = None
) -> str:
    """Return the result of a function in a forked process; call `meanwhile` in this process while it runs.

    Raises `TimeoutError` after `seconds`, and `EOFError` if the process ends without a result.
    """
    receiver, sender = Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about a fork of a multi-threaded process
        child = os.fork()
    if child == 0:
        _run_and_exit(function, sender)
    sender.close()
    try:
        if meanwhile is not None:
            meanwhile()
        if not receiver.poll(seconds):
            raise TimeoutError
        return receiver.recv_bytes().decode()
    finally:
        receiver.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _run_and_exit(function: Callable[[], str], sender: "Connection") -> None:
    """Send the result of a function, and end this process without any clean-up."""
    gc.disable()  # never destroy the parent's process groups here: their threads were not forked
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - open until the process ends
        sender.send_bytes(function().encode())
    finally:
        os._exit(0)
