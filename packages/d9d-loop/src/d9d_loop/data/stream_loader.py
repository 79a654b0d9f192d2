"""Loader of a rank's microbatches, step by step. Its state covers only samples of returned steps."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Self, final

import torch
from pydantic import JsonValue
from torch.utils.data import default_collate

from d9d_dist import UserError
from d9d_loop.data.batch_reader import BatchReader
from d9d_loop.data.sample_stream import Collate, Cursor, SampleStream
from d9d_loop.data.worker_pool import ReadJob


@final
@dataclass(frozen=True, slots=True)
class Share:
    """Share of a rank in the samples of a step.

    The samples of a step are split into consecutive groups of `microbatch_size`. Microbatch m of a rank is group
    m * dp_size + dp_rank.
    """

    microbatch_size: int
    num_microbatches: int = 1
    dp_rank: int = 0
    dp_size: int = 1

    @property
    def global_size(self) -> int:
        """Global batch size: number of samples in a step over all ranks."""
        return self.microbatch_size * self.num_microbatches * self.dp_size

    def starts(self) -> range:
        """Return, for each microbatch of this rank, the index of its first sample within the step."""
        size = self.microbatch_size
        return range(self.dp_rank * size, self.global_size, self.dp_size * size)


@final
class StreamLoader:
    """Iterator over the steps of a job. Each item is the list of this rank's microbatches of a step.

    Every rank plans the whole stream, and reads its own share. The used samples are always a prefix of the global
    order, so `state_dict` is equal on all ranks. One copy of the state suffices, and a job with any number of ranks
    can resume from it. Prefetched batches do not count as used.

    The last step of a finite stream may have fewer samples: some of its microbatches are smaller, and the last ones of
    a rank may be stand-ins, whose losses must be ignored.

    Attributes:
        num_own: Number of microbatches of the last returned step that are not stand-ins.
        has_stand_ins: True if a rank has stand-ins in this step; equal on all ranks.

    Args:
        stream: Stream of samples; equal on every rank.
        collate: Collates a list of samples into a batch, which may be any pytree of tensors.
        place: Copies a batch to `device`. With workers, it runs in a thread and must not draw random numbers.
        num_workers: Number of worker processes. With 0, this process reads each batch on demand.
        prefetch: Number of steps to prefetch in a thread; only used with workers.
        timeout: Time limit of a worker for a batch, in seconds; `None` for no limit.
        draws: If True, samples and `collate` may draw random numbers; see `DataProvider`. Those of a sample are a
            function of the seed and the sample's position; those of `collate`, of the microbatch's first position.

    Raises:
        UserError: If `num_workers` is negative or `prefetch` is below 1.
    """

    def __init__(
        self,
        stream: SampleStream,
        share: Share,
        *,
        seed: int,
        collate: Collate = default_collate,
        place: Callable[[Any], Any] = lambda batch: batch,
        device: torch.device | str = "cpu",
        num_workers: int = 0,
        prefetch: int = 2,
        timeout: float | None = 600.0,
        draws: bool = True,
    ) -> None:
        for name, value, least in (("num_workers", num_workers, 0), ("prefetch", prefetch, 1)):
            if value < least:
                raise UserError(f"{name} = {value}; expected at least {least}.")
        self._stream, self._share = stream, share
        # Number of samples used over all ranks, and the cursor state after them.
        self._used: Any = {"position": 0, "stream": None}
        # End of each planned step that was not yet returned, its number of microbatches without stand-ins, and whether
        # a rank has some.
        self._places: deque[tuple[Any, int, bool]] = deque()
        self.num_own, self.has_stand_ins = 0, False
        self._batches: BatchReader | None = None
        self._read: Callable[[Iterator[ReadJob]], BatchReader] = partial(
            BatchReader,
            stream,
            collate,
            seed=seed,
            place=place,
            device=torch.device(device),
            num_workers=num_workers,
            prefetch=prefetch * share.num_microbatches,
            timeout=timeout,
            draws=draws,
        )

    @property
    def position(self) -> int:
        """Number of samples that the returned steps have used over all ranks."""
        return self._used["position"]

    @property
    def cursor_state(self) -> JsonValue:
        """State of the stream's cursor after these samples; `None` at the start."""
        return self._used["stream"]

    def state_dict(self) -> JsonValue:
        """Return the position of the next step; equal on every rank."""
        return self._used

    def load_state_dict(self, state: JsonValue) -> None:
        """Resume from the state of a job with any number of ranks, and drop prefetched batches."""
        self.close()
        self._used = state

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        """Return the microbatches of the next step. Failed samples and workers raise `DataError`."""
        if self._batches is None:
            self._places.clear()
            self._batches = self._read(self._jobs())
        try:
            microbatches = list(islice(self._batches, self._share.num_microbatches))
        except BaseException:
            self.close()  # prefetched batches belong to later steps than the failed one
            raise
        if not microbatches:
            raise StopIteration
        self._used, self.num_own, self.has_stand_ins = self._places.popleft()
        return microbatches

    def close(self) -> None:
        """Stop the workers and the prefetch thread. The next `__next__` starts them again."""
        if self._batches is not None:
            self._batches.close()
        self._batches = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _jobs(self) -> Iterator[ReadJob]:
        """Yield this rank's read jobs, step by step, and append the end of each step to `_places`."""
        share, position, cursor = self._share, self.position, self._stream.cursor(self.cursor_state)
        for jobs, num_own, num_samples in plan_steps(cursor, share, position=position):
            position += num_samples
            has_stand_ins = num_samples <= share.global_size - share.microbatch_size
            self._places.append(({"position": position, "stream": cursor.state_dict()}, num_own, has_stand_ins))
            yield from jobs


def plan_steps(
    cursor: Cursor, share: Share, *, position: int = 0, num_samples: int | None = None
) -> Iterator[tuple[list[ReadJob], int, int]]:
    """Yield, for each step, the read jobs of a rank, how many of them are no stand-ins, and the samples of all ranks.

    Every rank plans the whole stream. A rank gets a job for each of its microbatches, because all ranks must issue the
    same collectives. At the end of an epoch of a finite stream, or of `num_samples` samples, jobs of a rank may be
    smaller, and its last ones may be stand-ins: the first sample of the step, whose results must be ignored.

    `position` is that of the cursor in the global order. The steps end at position `num_samples`, or with the stream.
    """
    size, most = share.microbatch_size, share.global_size
    while entries := cursor.take(most if num_samples is None else min(most, num_samples - position)):
        jobs = [ReadJob(position + start, entries[start : start + size]) for start in share.starts()]
        own = [job for job in jobs if job.entries]
        yield [*own, *[ReadJob(position, entries[:1])] * (len(jobs) - len(own))], len(own), len(entries)
        position += len(entries)
