"""Digests of what is being written, by threads of their own: hashing takes as long as writing, so both go on at once.

SHA-256, because processors compute it in hardware: twice as fast as BLAKE2b, and about as fast as a good disk.
"""

import hashlib
import os
from dataclasses import dataclass
from queue import Queue
from threading import Thread
from typing import Any, Self, final

_SMALL = 1 << 16  # bytes that are sooner hashed than handed to another thread
_BLOCKS_AHEAD = 16  # blocks that may wait for a thread, whose memory cannot be given back before
_MAX_THREADS = 4  # which hash faster than most disks write


@final
@dataclass(frozen=True, slots=True)
class PartRecord:
    """What a part of a file must be to be the one that was written.

    Attributes:
        size: In bytes.
        sha256: Hexadecimal digest.
    """

    size: int
    sha256: str


@final
class Digests:
    """Takes blocks, one part after the other. A context manager, after which the digests are known."""

    def __init__(self) -> None:
        self._hashes: list[Any] = []
        self._sizes: list[int] = []
        self._workers: list[_Worker] = []
        self._num_workers = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for worker in self._workers:
            worker.finish()

    def start_part(self) -> None:
        """Let the next blocks belong to a new part."""
        self._hashes.append(hashlib.sha256())
        self._sizes.append(0)

    def add(self, block: memoryview) -> None:
        """Take the next block of the part, whose memory stays as it is until the digests are known."""
        is_first = self._sizes[-1] == 0
        self._sizes[-1] += len(block)
        if is_first and len(block) <= _SMALL:
            self._hashes[-1].update(block)
            return
        # The blocks of a part go to one thread, in order; those of the next part to the next thread.
        index = len(self._hashes) % self._num_workers
        while len(self._workers) <= index:
            self._workers.append(_Worker())
        self._workers[index].add(self._hashes[-1], block)

    def records(self) -> tuple[PartRecord, ...]:
        """Size and digest of every part, once the context is left."""
        return tuple(
            PartRecord(size, digest.hexdigest()) for size, digest in zip(self._sizes, self._hashes, strict=True)
        )


@final
class _Worker:
    """A thread that hashes what it is given, in order."""

    def __init__(self) -> None:
        self._queue: Queue[tuple[Any, memoryview] | None] = Queue(_BLOCKS_AHEAD)
        self._thread = Thread(target=self._work, name="d9d-digests", daemon=True)
        self._thread.start()

    def add(self, digest: Any, block: memoryview) -> None:
        self._queue.put((digest, block))

    def finish(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            digest, block = item
            digest.update(block)
