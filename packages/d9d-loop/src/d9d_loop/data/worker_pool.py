"""Processes that read batches. One that dies, fails or hangs is an error that names it and its sample; never a wait.

Not torch's `DataLoader`: that seeds its workers by their number, where here what a batch draws is a function of its
position, so that it does not depend on how many workers there are or where a job resumed; and it cannot tell which
sample a worker died of.
"""

import gc
import pickle
import signal
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, final

import torch
from torch import multiprocessing

from d9d_dist import UserError
from d9d_loop.data.data_error import DataError
from d9d_loop.data.sample_reader import ReadJob, SampleReader
from d9d_loop.data_random import seed_data_random

_PATIENCE = 5.0
"""Seconds that a process gets to end."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """What a worker sends instead of a batch."""

    message: str
    traceback: str


@final
class WorkerPool:
    """Reads batches in worker processes, in order; each works at one batch ahead of what was asked for.

    Args:
        reader: Reads a batch. Is sent to the workers, unless they are forked.
        num_workers: Number of processes, at least 1.
        seed: The seed of the job.
        timeout: Seconds that a batch may take; `None` for any time.

    Raises:
        UserError: If the data cannot be sent to a worker.
    """

    def __init__(self, reader: SampleReader, *, num_workers: int, seed: int, timeout: float | None = None) -> None:
        assert num_workers > 0
        self._timeout = timeout
        self._workers: list[_Worker] = []
        try:
            for number in range(num_workers):
                self._workers.append(_Worker(number, reader, seed=seed))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self.close()
            raise UserError(
                f"the data, or their collate function, cannot be sent to worker processes: {error}. Expected functions "
                "and classes at the top of a module. Move them there, or use data.num_workers = 0."
            ) from error

    def batches(self, jobs: Iterable[ReadJob]) -> Iterator[Any]:
        """The batches of jobs, in order. For one iteration over the life of the pool.

        Raises:
            DataError: If a worker failed, died, or took too long; names it and the sample.
        """
        # One job for each worker at a time: then neither side can wait for the other to read what it writes.
        waiting = iter(jobs)
        busy = [worker for worker, job in zip(self._workers, waiting, strict=False) if worker.start(job)]
        while busy:
            worker = busy.pop(0)
            batch = worker.finish(self._timeout)
            if (job := next(waiting, None)) is not None and worker.start(job):
                busy.append(worker)
            yield batch

    def close(self) -> None:
        """End the workers, at once; may be called from any thread, and twice."""
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.end()


@final
class _Worker:
    """A worker process, as its parent sees it."""

    def __init__(self, number: int, reader: SampleReader, *, seed: int) -> None:
        self._number = number
        context = multiprocessing.get_context()
        self._connection, theirs = context.Pipe()
        self._sample = context.RawValue("q", 0)  # number of the sample that is being read
        self._process: BaseProcess = context.Process(
            target=_work, args=(theirs, self._sample, reader, seed), name=f"d9d-data-{number}", daemon=True
        )
        self._job: ReadJob | None = None
        self._process.start()
        theirs.close()

    def start(self, job: ReadJob) -> bool:
        """Hand over a job."""
        self._job, self._sample.value = job, 0
        try:
            self._connection.send(job)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died() from None
        return True

    def finish(self, timeout: float | None) -> Any:
        """Wait for the batch of the job."""
        ready = wait([self._connection, self._process.sentinel], timeout)
        if not ready:
            raise DataError(
                f"{self._describe()} has taken more than {timeout:g} s for a batch, and is at {self._at()}. Check what "
                "it waits for, or allow more time."
            )
        if self._connection not in ready:
            raise self._died()
        try:
            result = self._connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if isinstance(result, _Failed):
            error = DataError(f"{self._describe()}: {result.message}")
            error.add_note(result.traceback)
            raise error
        return result

    def stop(self) -> None:
        """Stop the process: what it reads is not needed any more."""
        self._connection.close()
        self._process.kill()

    def end(self) -> None:
        """Wait until it is gone."""
        self._process.join(_PATIENCE)

    def _died(self) -> DataError:
        self._process.join(_PATIENCE)
        code = self._process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
        hint = " Often memory has run out: use fewer workers." if code == -signal.SIGKILL else ""
        return DataError(f"{self._describe()} {how} at {self._at()}.{hint}")

    def _describe(self) -> str:
        return f"data worker {self._number} (process {self._process.pid})"

    def _at(self) -> str:
        assert self._job is not None
        return self._job.describe(min(self._sample.value, len(self._job.entries) - 1))


def _work(connection: Connection, sample: Any, reader: SampleReader, seed: int) -> None:
    """What a worker process does until its parent stops it or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes, and the parent stops this one
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        # They go to whole process groups, and mean the job: it still needs its data, until it has saved.
        signal.signal(number, signal.SIG_IGN)
    gc.enable()  # the training process collects at set steps; here nobody would
    torch.set_num_threads(1)
    parent = parent_process()
    assert parent is not None

    def on_sample(number: int) -> None:
        sample.value = number

    while connection in wait([connection, parent.sentinel]):
        try:
            job = connection.recv()
        except EOFError:
            return
        seed_data_random(seed, position=job.position)
        try:
            result = reader(job, on_sample)
        except Exception as error:  # whatever it is, the parent is told
            result = _Failed(str(error), traceback.format_exc())
        try:
            connection.send(result)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            message = f"the batch from {job.describe(0)} on cannot be sent to the training process: {error}"
            connection.send(_Failed(message, traceback.format_exc()))
        except BrokenPipeError:
            return
