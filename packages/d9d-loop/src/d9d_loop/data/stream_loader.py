"""The microbatches of a rank, step by step, from a stream; with a state that says what was used, and nothing else."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Self, final

import torch
from pydantic import JsonValue, TypeAdapter
from torch.utils.data import default_collate

from d9d_dist import UserError
from d9d_loop.batches import Collate
from d9d_loop.data.prefetcher import Prefetcher
from d9d_loop.data.sample_reader import ReadJob, SampleReader
from d9d_loop.data.sample_stream import SampleStream
from d9d_loop.data.worker_pool import WorkerPool
from d9d_loop.data_random import check_draws_nothing, position_random


@final
@dataclass(frozen=True, slots=True)
class Share:
    """Which samples of a step fall to a rank: of microbatch m, the (m * dp_size + dp_rank)-th run of consecutive ones.

    Attributes:
        microbatch_size: Samples of a microbatch.
        num_microbatches: Microbatches of a step on one rank.
        dp_rank: Data-parallel rank.
        dp_size: Number of data-parallel ranks.
    """

    microbatch_size: int
    num_microbatches: int = 1
    dp_rank: int = 0
    dp_size: int = 1

    @property
    def global_size(self) -> int:
        """Samples of a step, over all ranks."""
        return self.microbatch_size * self.num_microbatches * self.dp_size

    def starts(self) -> range:
        """Where each microbatch of the rank begins in a step."""
        size = self.microbatch_size
        return range(self.dp_rank * size, self.global_size, self.dp_size * size)


@dataclass(frozen=True, slots=True)
class _Place:
    """How many samples of the stream were used, over all ranks, and where that is."""

    position: int = 0
    stream: JsonValue = None


_PLACE = TypeAdapter(_Place)


@final
class StreamLoader:
    """Iterates over the steps of a job: for each, the list of this rank's microbatches.

    Every rank takes the whole stream, and reads its share of it. So `state_dict` is equal on all ranks, one is enough
    to be saved, and any number of ranks goes on from it: what all of them have used is a prefix of the global order.
    Batches that were read ahead and not handed out are not part of it.

    What samples and the collate function draw at random is a function of the seed and of the position of a microbatch's
    first sample, in workers or without.

    Args:
        stream: The samples; equal on every rank.
        share: Which of them fall to this rank.
        seed: The seed of the job.
        collate: Makes a batch, any pytree of tensors, of a list of samples.
        place: Brings a batch to where it is used; with workers, it runs in a thread, and must draw no random numbers.
        device: Where `place` brings them.
        num_workers: Processes that read samples; 0 reads in this one, at the moment that a batch is asked for.
        prefetch: Steps that are kept ready in a thread, if there are workers.
        timeout: Seconds that a worker may take for a batch; `None` for any time.
        draws: Whether samples and the collate function may draw random numbers; see `DataProvider`.

    Raises:
        UserError: If a number is out of its range.
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
        self._stream, self._share, self._seed = stream, share, seed
        self._reader = SampleReader(stream, collate)
        self._place, self._device = place, torch.device(device)
        self._num_workers, self._prefetch, self._timeout = num_workers, prefetch, timeout
        self._draws, self._is_first = draws, True
        self._used = _Place()
        self._steps: Iterator[tuple[list[Any], _Place]] | None = None
        self._pool: WorkerPool | None = None
        self._prefetcher: Prefetcher[tuple[list[Any], _Place]] | None = None

    def state_dict(self) -> JsonValue:
        """Where the next step begins; the same on every rank."""
        return asdict(self._used)

    def load_state_dict(self, state: JsonValue) -> None:
        """Go on from a state, of a job with any number of ranks; what was read ahead is dropped."""
        self.close()
        self._used = _PLACE.validate_python(state)

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        """The microbatches of the next step. There is always one.

        Raises:
            DataError: If a sample could not be read, or a worker is gone.
        """
        if self._steps is None:
            self._steps = self._start()
        try:
            microbatches, self._used = next(self._steps)
        except BaseException:
            self.close()  # what was read ahead belongs to a step that is not there
            raise
        return microbatches

    def close(self) -> None:
        """End workers and threads. The next step that is asked for starts them again."""
        if self._pool is not None:
            self._pool.close()
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._steps = self._pool = self._prefetcher = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> Iterator[tuple[list[Any], _Place]]:
        places: deque[_Place] = deque()
        jobs = self._jobs(places)
        if not self._num_workers:
            return self._grouped(map(self._place, map(self._read_here, jobs)), places)
        self._pool = WorkerPool(self._reader, num_workers=self._num_workers, seed=self._seed, timeout=self._timeout)
        self._prefetcher = Prefetcher(
            self._grouped(self._pool.batches(jobs), places),
            prepare=lambda step: ([self._place(batch) for batch in step[0]], step[1]),
            depth=self._prefetch,
            device=self._device,
        )
        return self._prefetcher

    def _jobs(self, places: deque[_Place]) -> Iterator[ReadJob]:
        """This rank's jobs, one step after the other; `places` gets where each step ends."""
        size = self._share.microbatch_size
        position, cursor = self._used.position, self._stream.cursor(self._used.stream)
        while True:
            entries = cursor.take(self._share.global_size)
            places.append(_Place(position + len(entries), cursor.state_dict()))
            for start in self._share.starts():
                yield ReadJob(position + start, entries[start : start + size])
            position += len(entries)

    def _grouped(self, batches: Iterator[Any], places: deque[_Place]) -> Iterator[tuple[list[Any], _Place]]:
        while True:
            microbatches = list(islice(batches, self._share.num_microbatches))
            yield microbatches, places.popleft()

    def _read_here(self, job: ReadJob) -> Any:
        if self._draws:
            with position_random(self._seed, position=job.position):
                return self._reader(job)
        if self._is_first:
            check_draws_nothing(partial(self._reader, job))
            self._is_first = False
        return self._reader(job)
