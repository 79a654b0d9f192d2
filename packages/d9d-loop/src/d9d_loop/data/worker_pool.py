"""Pool of worker processes that read batches. Errors of failed workers name the worker and its sample.

`torch.utils.data.DataLoader` seeds a worker by its index; here the random numbers of a sample are a function of its
position. They do not depend on the number of workers, nor on where a job resumed. `DataLoader` also cannot report the
sample at which a worker died.
"""

import ctypes
import gc
import pickle  # noqa: TID251 - its errors; a rank sends the function to its own workers
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, final

import torch
from torch import multiprocessing

from d9d_dist import UserError
from d9d_loop.data.sample_stream import Entry
from d9d_loop.data_error import DataError

WORKER_NAME = "d9d-data"
"""Begin of the names of the worker processes."""

_LONGEST = 120
"""Length of a shown entry in characters."""

_PATIENCE = 5.0
"""Time limit for a killed worker process to exit, in seconds."""

_LEAVE_SECONDS = 1.0
"""Time for the workers to end by themselves: a killed worker may leave a tensor in shared memory."""

_M_MMAP_THRESHOLD, _M_MMAP_MAX, _IS_MMAPPED = -3, -4, 2
"""Parameters of `mallopt` in glibc's malloc.h, and the bit of a block's size, before the block, if it is mapped."""


@final
@dataclass(frozen=True, slots=True)
class ReadJob:
    """Batch to read.

    Attributes:
        position: Position of the first sample in the global order.
        entries: Entries of the samples, which are consecutive in the global order.
    """

    position: int
    entries: list[Entry]

    def describe(self, number: int) -> str:
        """Describe the sample at index `number` of the batch for error messages."""
        entry = repr(self.entries[number])
        entry = entry if len(entry) <= _LONGEST else f"{entry[:_LONGEST]}..."
        return f"sample {entry} (position {self.position + number} of the global order)"


Read = Callable[[ReadJob, Callable[[int], object]], Any]
"""Function that reads the batch of a job, and calls its second argument with the index of each sample to read."""


@final
class WorkerPool:
    """Worker processes that read batches ahead of use, one batch at a time each. Batches are returned in order.

    The function `read` is pickled and sent to the workers, unless they are forked; if it cannot be pickled, this is a
    `UserError`. `timeout` is the time limit for a batch, in seconds.
    """

    def __init__(self, read: Read, *, num_workers: int, timeout: float | None = None) -> None:
        assert num_workers > 0
        self._timeout = timeout
        self._workers: list[_Worker] = []
        # Nobody reads the message that ends the workers, so all of them see it. The end of this process's connection
        # would not do: forked workers have copies of it.
        self._stopped, self._stop = multiprocessing.get_context().Pipe(duplex=False)
        try:
            for number in range(num_workers):
                self._workers.append(_Worker(number, read, stopped=self._stopped))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self.close()
            raise UserError(
                f"the data or the collate function cannot be pickled for worker processes: {error}. Expected "
                "functions and classes at the top level of a module. Move them there, or set data.num_workers = 0."
            ) from error

    def batches(self, jobs: Iterable[ReadJob]) -> Iterator[Any]:
        """Read the batches of jobs, in order. Call it only once per pool.

        A worker that fails, dies or times out raises `DataError`, which names the worker and the sample.
        """
        # A worker has at most one job, so that both pipe ends can never block on a write at the same time.
        waiting = iter(jobs)
        busy = [worker for worker, job in zip(self._workers, waiting, strict=False) if worker.start(job)]
        while busy:
            worker = busy.pop(0)
            batch = worker.finish(self._timeout)
            if (job := next(waiting, None)) is not None and worker.start(job):
                busy.append(worker)
            yield batch

    def close(self) -> None:
        """End the workers, and kill those that still read a sample. May be called from any thread, and repeatedly."""
        with suppress(OSError):  # closed before
            self._stop.send_bytes(b"stop")
        deadline = time.monotonic() + _LEAVE_SECONDS
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.join(_PATIENCE)
        self._stop.close()
        self._stopped.close()


@final
class _Worker:
    """Handle of a worker process, for its parent."""

    def __init__(self, number: int, read: Read, *, stopped: Connection) -> None:
        self._number = number
        context = multiprocessing.get_context()
        self.connection, theirs = context.Pipe()
        self._sample = context.RawValue("q", 0)  # index of the sample being read
        self.process: BaseProcess = context.Process(
            target=_work,
            args=(theirs, stopped, self._sample, read),
            name=f"{WORKER_NAME}-{number}",
            daemon=True,
        )
        self._job: ReadJob | None = None
        self.process.start()
        theirs.close()

    def start(self, job: ReadJob) -> bool:
        """Send a job to the worker. Always returns True."""
        self._job, self._sample.value = job, 0
        try:
            self.connection.send(job)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died() from None
        return True

    def finish(self, timeout: float | None) -> Any:
        """Wait for the batch of the current job, for up to `timeout` seconds."""
        ready = wait([self.connection, self.process.sentinel], timeout)
        if not ready:
            raise DataError(
                f"{self._describe()} has not finished a batch after {timeout:g} s; it is at {self._at()}. Find what "
                "blocks the worker, or increase the timeout."
            )
        if self.connection not in ready:
            raise self._died()
        try:
            result = self.connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if isinstance(result, DataError):
            message, cause = result.args
            result.args = (f"{self._describe()}: {message}",)
            raise result from cause
        return result

    def _died(self) -> DataError:
        self.process.join(_PATIENCE)
        code = self.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
        hint = " It probably ran out of memory: use fewer workers." if code == -signal.SIGKILL else ""
        return DataError(f"{self._describe()} {how} at {self._at()}.{hint}")

    def _describe(self) -> str:
        return f"data worker {self._number} (process {self.process.pid})"

    def _at(self) -> str:
        assert self._job is not None
        if (number := self._sample.value) == len(self._job.entries):
            return f"collate of the {number} samples from {self._job.describe(0)} on"
        return self._job.describe(number)


def _work(connection: Connection, stopped: Connection, sample: Any, read: Read) -> None:
    """Read batches until the pool is closed or the parent exits: the main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent stops the workers
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        # Schedulers send these signals to the whole OS process group, but the job needs data until it has saved.
        signal.signal(number, signal.SIG_IGN)
    # A forked worker inherits the objects of the training process and a disabled garbage collector. Never collect the
    # inherited objects: their destructors need threads of the training process, which a fork does not copy.
    gc.freeze()
    gc.enable()
    torch.set_num_threads(1)
    _return_freed_memory()
    parent = parent_process()
    assert parent is not None
    while wait([connection, stopped, parent.sentinel]) == [connection]:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            result = read(job, partial(setattr, sample, "value"))
        except Exception as error:  # sent to the parent
            result = _failure(str(error), error.__cause__)
        try:
            connection.send(result)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            message = f"the batch from {job.describe(0)} on cannot be pickled for the training process: {error}"
            connection.send(_failure(message))
        except BrokenPipeError:
            return
        del result  # before the next batch is read


def _return_freed_memory() -> None:
    """Let glibc return freed blocks of at least 128 KiB to the system, so that a worker does not keep freed images.

    By default, glibc raises this limit to the size of the largest freed block. It also puts large blocks into free
    parts of the heap, which a forked worker inherits: return their pages, and reserve these parts by allocations.
    """
    with suppress(AttributeError, OSError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 17)
        libc.mallopt(_M_MMAP_MAX, 1 << 16)  # the environment may switch mapped blocks off
        libc.malloc_trim(0)
        for size in (1 << bits for bits in range(26, 16, -1)):
            for _ in range(1000):
                block = libc.malloc(size)
                if not block or ctypes.c_size_t.from_address(block - 8).value & _IS_MMAPPED:
                    break
            libc.free(block)


def _failure(message: str, cause: BaseException | None = None) -> DataError:
    """Return an error that a worker sends, with its message, its cause if a user error, and the traceback as a note."""
    error = DataError(message, UserError(str(cause)) if isinstance(cause, UserError) else None)
    error.add_note(traceback.format_exc())
    return error
