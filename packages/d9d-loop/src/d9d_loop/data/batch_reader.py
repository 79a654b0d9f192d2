"""Reader of planned batches, in this process or in worker processes, with prefetch to the device."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, final

import torch

from d9d_loop.data.prefetcher import Prefetcher, pinned
from d9d_loop.data.sample_reader import ReadJob, SampleReader, check_draws_nothing
from d9d_loop.data.sample_stream import Collate, SampleStream
from d9d_loop.data.worker_pool import WorkerPool
from d9d_loop.isolation import restored_random


@final
class BatchReader:
    """Iterator over the batches of read jobs, in order, for training, evaluation and inference.

    The random numbers of a sample are a function of the seed and the sample's position; those of `collate`, of the
    position of the batch's first sample. So they do not depend on `num_workers`, and those of a sample not on the
    number of ranks and the batch size either. The generators of the model are unaffected.

    Args:
        jobs: Batches to read; with workers, a background thread takes jobs ahead of use.
        place: See `StreamLoader` for this argument and those without a description.
        prefetch: Number of batches to prefetch in a thread; only used with workers.
        draws: If False, samples and `collate` draw no random numbers. Without workers, this is checked on the first
            batch.
    """

    def __init__(
        self,
        stream: SampleStream,
        collate: Collate,
        jobs: Iterator[ReadJob],
        *,
        seed: int,
        place: Callable[[Any], Any],
        device: torch.device,
        num_workers: int = 0,
        prefetch: int = 2,
        timeout: float | None = None,
        draws: bool = True,
    ) -> None:
        self._read = SampleReader(stream, collate)
        self._seed, self._draws, self._is_first = seed, draws, True
        self._pool: WorkerPool | None = None
        self._prefetcher: Prefetcher[Any] | None = None
        if num_workers:
            self._pool = WorkerPool(self._read, num_workers=num_workers, seed=seed, timeout=timeout)
            self._prefetcher = Prefetcher(self._pool.batches(jobs), prepare=place, depth=prefetch, device=device)
            self._batches: Iterator[Any] = self._prefetcher
        else:
            pin = pinned if device.type != "cpu" else lambda batch: batch
            self._batches = (place(pin(self._read_here(job))) for job in jobs)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next batch. Failed samples and workers raise `DataError`."""
        return next(self._batches)

    def close(self) -> None:
        """Stop the workers and the prefetch thread, and drop prefetched batches."""
        if self._pool is not None:
            self._pool.close()
        if self._prefetcher is not None:
            self._prefetcher.close()

    def _read_here(self, job: ReadJob) -> Any:
        if self._draws:
            with restored_random():
                return self._read(job, seed=self._seed)
        if self._is_first:
            check_draws_nothing(partial(self._read, job))
            self._is_first = False
        return self._read(job)
