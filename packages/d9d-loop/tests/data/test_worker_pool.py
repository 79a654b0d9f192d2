import gc
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from typing import Any

import pytest
import torch

from d9d_dist import DistributedContext, UserError
from d9d_loop.data import DataError, IndexedStream
from d9d_loop.data.batch_reader import read_batch
from d9d_loop.data.worker_pool import Read, ReadJob, WorkerPool
from d9d_loop.isolation import restored_random
from d9d_loop.job.garbage import garbage_collection
from d9d_loop.resilience import StopConfig, StopSignals


class _Numbers:
    """Samples with a fault at index 13."""

    def __init__(self, at_13: str = "") -> None:
        self.at_13 = at_13

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            return self._misfortune()
        return torch.tensor([index, random.random(), torch.rand(()).item()])  # noqa: S311

    def _misfortune(self) -> Any:
        match self.at_13:
            case "raises":
                raise KeyError("no such file")
            case "refuses":
                raise UserError("chats.jsonl, line 14: an empty text.")
            case "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exits":
                os._exit(3)
            case "hangs":
                time.sleep(1000)
            case "cannot be sent":
                return lambda: None
        return torch.zeros(3)


def _reader(at_13: str = "", collate: Any = list) -> Read:
    return partial(read_batch, IndexedStream(_Numbers(at_13), seed=0), collate, seed=5)


def _jobs(count: int, size: int = 4) -> list[ReadJob]:
    return [ReadJob(start, list(range(start, start + size))) for start in range(0, count * size, size)]


def _read(reader: Read, jobs: list[ReadJob], num_workers: int, timeout: float | None = None) -> list[Any]:
    pool = WorkerPool(reader, num_workers=num_workers, timeout=timeout)
    try:
        return list(pool.batches(jobs))
    finally:
        pool.close()
        pool.close()


def test_workers_read_batches_in_the_order_of_one_process() -> None:
    expected = []
    for job in _jobs(7):
        with restored_random():
            expected.append(torch.stack(_reader()(job, lambda number: None)))
    for num_workers in (1, 3):
        found = _read(_reader(collate=torch.stack), _jobs(7), num_workers)
        assert torch.equal(torch.stack(found), torch.stack(expected))


def test_a_pool_may_have_more_workers_than_batches() -> None:
    assert len(_read(_reader(), _jobs(1), 2)) == 1


@pytest.mark.parametrize(
    ("at_13", "message"),
    [
        (
            "raises",
            r"data worker 1 \(process \d+\): sample 13 \(position 13 of .*\) could not be read: KeyError: 'no such",
        ),
        (
            "is killed",
            r"data worker 1 \(process \d+\) was killed by SIGKILL at sample 13 \(position 13 .* ran out of",
        ),
        ("exits", r"data worker 1 \(process \d+\) exited with 3 at sample 13 \(position 13 of the global order\)\.$"),
        pytest.param(
            "hangs",
            r"data worker 1 \(process \d+\) has not finished a batch after 5 s; it is at sample 13 \(position",
            marks=pytest.mark.full,
        ),
        (
            "cannot be sent",
            r"the batch from sample 12 \(position 12 of the global order\) on cannot be pickled for the train",
        ),
    ],
)
def test_an_error_names_worker_and_sample(at_13: str, message: str) -> None:
    timeout = 5.0 if at_13 == "hangs" else None
    with pytest.raises(DataError, match=message) as caught:
        _read(_reader(at_13), _jobs(8), 2, timeout)
    if at_13 == "raises":
        assert "in _misfortune" in caught.value.__notes__[0]


def test_a_user_error_is_the_cause_of_the_error_of_a_worker() -> None:
    with pytest.raises(DataError, match=r"data worker 0 .* sample 13 .*: chats\.jsonl, line 14: an e") as caught:
        _read(_reader("refuses"), _jobs(4), 1)
    assert isinstance(caught.value.__cause__, UserError)


def _end(samples: list[Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_while_it_collates_names_the_batch() -> None:
    with pytest.raises(DataError, match=r"was killed by SIGKILL at collate of the 4 samples from sample 0 \(posit"):
        _read(_reader(collate=_end), _jobs(1), 1)


def test_a_collate_function_that_fails_names_the_batch() -> None:
    with pytest.raises(
        DataError, match=r"the 4 samples from sample 0 \(position 0 .*\) on could not be collated: Type"
    ):
        _read(_reader(collate=str.join), _jobs(1), 1)


def test_a_worker_that_is_killed_while_it_waits_is_found() -> None:
    pool = WorkerPool(_reader(), num_workers=1)
    batches = pool.batches(_jobs(5))
    next(batches)
    (worker,) = pool._workers
    worker.process.kill()
    worker.process.join()
    with pytest.raises(DataError, match=r"data worker 0 \(process \d+\) was killed by SIGKILL"):
        list(batches)
    pool.close()


def test_workers_end_by_themselves_when_the_pool_is_closed() -> None:
    # A killed worker may leave its last tensor in shared memory, and leaves its temporary folder.
    pool = WorkerPool(_reader(), num_workers=2)
    next(pool.batches(_jobs(5)))
    pool.close()
    assert [worker.process.exitcode for worker in pool._workers] == [0, 0]


_JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class _Process:
    """Samples that describe the process that reads them."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[bool, bool]:
        return gc.isenabled(), all(signal.getsignal(each) is signal.SIG_IGN for each in _JOB_SIGNALS)


def test_workers_collect_garbage_and_ignore_the_stop_signals_of_a_job(ctx: DistributedContext) -> None:
    reader = partial(read_batch, IndexedStream(_Process(), seed=0), list)
    with garbage_collection(5), StopSignals(StopConfig(), ctx) as stop:  # as in a job, which collects at fixed steps
        assert not gc.isenabled()
        pool = WorkerPool(reader, num_workers=1)
        batches = pool.batches(_jobs(3))
        assert next(batches) == [(True, True)] * 4
        (worker,) = pool._workers
        for each in _JOB_SIGNALS:
            os.kill(worker.process.pid or 0, each)
        assert len(list(batches)) == 2
        assert stop.agreed() is None
        pool.close()


def test_long_entries_are_shortened() -> None:
    job = ReadJob(7, [list(range(1000))])
    assert len(job.describe(0)) < 200
    assert job.describe(0).endswith("... (position 7 of the global order)")


def test_data_that_cannot_be_pickled_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    context = torch.multiprocessing.get_context("forkserver")
    monkeypatch.setattr("d9d_loop.data.worker_pool.multiprocessing.get_context", lambda: context)
    with pytest.raises(UserError, match=r"cannot be pickled for worker processes: .* top level of a module"):
        WorkerPool(_reader(collate=lambda samples: samples), num_workers=1)


_LARGE_BLOCKS = """
import ctypes
import torch
from d9d_loop.data.worker_pool import _return_freed_memory

libc = ctypes.CDLL("libc.so.6")
libc.mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD: the heap gets large blocks, of which every other one is freed
blocks = [torch.ones(1 << 22, dtype=torch.uint8) for _ in range(9)]
del blocks[1::2]

def is_in_heap(block):
    heap = next(line for line in open("/proc/self/maps") if "[heap]" in line).split()[0].split("-")
    return int(heap[0], 16) <= block.data_ptr() < int(heap[1], 16)

def num_pages():
    return int(open("/proc/self/statm").read().split()[1])

assert is_in_heap(torch.ones(1 << 22, dtype=torch.uint8))
before = num_pages()
_return_freed_memory()
print(before - num_pages() > 3 * (1 << 22) // 4096, is_in_heap(torch.ones(1 << 22, dtype=torch.uint8)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the C library is glibc on Linux")
def test_free_memory_of_the_heap_is_returned_and_takes_no_large_blocks() -> None:
    found = subprocess.run([sys.executable, "-c", _LARGE_BLOCKS], check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["True", "False"]
