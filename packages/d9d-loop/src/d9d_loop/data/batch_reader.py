"""Reader of planned batches, in this process or in worker processes, with prefetch to the device.

Errors name the sample.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, final

import torch
from torch.utils import _pytree as pytree

from d9d_dist import UserError
from d9d_loop.data.prefetcher import Prefetcher, pinned
from d9d_loop.data.sample_stream import Collate, SampleStream
from d9d_loop.data.worker_pool import ReadJob, WorkerPool
from d9d_loop.data_error import DataError
from d9d_loop.isolation import restored_random, seed_generators


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
        self._read = partial(read_batch, stream, collate, seed=seed if draws or num_workers else None)
        self._draws, self._is_first = draws, True
        self._pool: WorkerPool | None = None
        self._prefetcher: Prefetcher[Any] | None = None
        if num_workers:
            self._pool = WorkerPool(self._read, num_workers=num_workers, timeout=timeout)
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
                return self._read(job)
        if self._is_first:
            check_draws_nothing(partial(self._read, job))
            self._is_first = False
        return self._read(job)


def read_batch(
    stream: SampleStream,
    collate: Collate,
    job: ReadJob,
    on_sample: Callable[[int], object] = lambda number: None,
    *,
    seed: int | None = None,
) -> Any:
    """Read the samples of a job and collate them. Failures of a sample or of `collate` raise `DataError`.

    `on_sample` is called with the index of each sample in the batch before the sample is read, and with their
    number before `collate`, which may decode them. With `seed`, the generators are seeded for each sample by its
    position, and for `collate` by the first position.
    """
    samples: list[Any] = []
    for number, entry in enumerate(job.entries):
        on_sample(number)
        if seed is not None:
            seed_sample(seed, job.position + number)
        try:
            samples.append(stream.read(entry))
        except Exception as error:
            raise DataError(f"{job.describe(number)} could not be read: {_describe(error)}") from error
    on_sample(len(samples))
    if seed is not None:
        seed_generators(seed, "collate at", job.position)
    try:
        return collate(samples)
    except Exception as error:
        names = list(map(job.describe, range(len(samples))))
        raise DataError(
            f"the {len(samples)} samples from {names[0]} on could not be collated: {_describe(error)}"
            + describe_none(samples, names)
        ) from error


def describe_none(samples: Sequence[Any], names: Sequence[str]) -> str:
    """Return a sentence about the first `None` in samples that `collate` does not accept; empty without one."""
    for sample, name in zip(samples, names, strict=True):
        for path, leaf in pytree.tree_flatten_with_path(sample)[0]:
            if leaf is None:
                place = f"{pytree.keystr(path)} of {name}" if path else name
                return f". {place} is None; expected a value (is a return missing in the dataset?)."
    return ""


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def seed_sample(seed: int, position: int) -> None:
    """Seed `random`, torch's CPU generator and, if imported, NumPy for the sample at a position in the global order.

    Pipeline-, tensor- and context-parallel ranks read the same samples, so they must draw the same numbers.
    """
    seed_generators(seed, "data at", position)


def check_draws_nothing(read: Callable[[], object]) -> None:
    """Check that `read`, which reads a batch, draws no random numbers, else raise `UserError`.

    If the random states changed, `read` is called again, because another thread, such as a tracker's, may have drawn.
    """
    drawn = _drawn_by(read) and _drawn_by(read)
    if drawn:
        raise UserError(
            f"reading a batch drew random numbers from {' and '.join(drawn)}; expected none, because the data provider "
            "has draws = False. Set draws = True, so that random numbers are seeded by the position of the sample."
        )


def _drawn_by(read: Callable[[], object]) -> list[str]:
    before = _states()
    read()
    after = _states()
    return [name for name, state in before.items() if _text(state) != _text(after[name])]


def _text(state: Any) -> str:
    return json.dumps(state, default=lambda array: array.tolist())


def _states() -> dict[str, Any]:
    states = {"Python": random.getstate(), "torch": torch.default_generator.get_state()}
    numpy = sys.modules.get("numpy")
    return states if numpy is None else {"NumPy": numpy.random.get_state(), **states}
