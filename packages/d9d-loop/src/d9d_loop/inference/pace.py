"""Limit on how far the ranks of an inference job drift apart."""

from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import final

import torch.distributed as dist

from d9d_dist import DistributedContext
from d9d_loop.resilience import HangWatchdog

_MOST_AHEAD = 4
"""Number of batches that a rank may be ahead of the slowest rank, so batches of uneven duration rarely cause waits."""


@final
class Pace:
    """Limit of `_MOST_AHEAD` batches between the fastest and the slowest rank, so that a failed rank is noticed early.

    After each batch, a rank starts an asynchronous barrier, and waits for the barrier from `_MOST_AHEAD`
    batches earlier. All earlier barriers are complete, so a wait covers at most one batch of the slowest rank. The time
    limit of a wait is the time limit of a batch.
    """

    def __init__(self, ctx: DistributedContext, watchdog: HangWatchdog) -> None:
        self._ctx, self._watchdog = ctx, watchdog
        self._device_ids = None if ctx.device.type == "cpu" else [ctx.device.index]
        self._barriers: deque[dist.Work] = deque()
        self._has_started = False
        self._set_timeout(ctx.timeouts.startup)

    @contextmanager
    def batch(self, part: int) -> Generator[None]:
        """Limit the time of a batch that the body computes; `part` is counted from 1. Collective: starts a barrier."""
        self._watchdog.beat(part, "a batch")
        yield
        self._start_barrier()
        if not self._has_started:
            # Kernels are compiled and process groups connected: switch from the start-up to the step timeout.
            self._wait()
            self._has_started = True
            self._set_timeout(self._ctx.timeouts.step)
        elif len(self._barriers) > _MOST_AHEAD:
            self._wait()

    def end(self) -> None:
        """Wait until every rank has written its results. Collective: a barrier."""
        self._start_barrier()
        while self._barriers:
            self._wait()

    def _start_barrier(self) -> None:
        barrier = dist.barrier(device_ids=self._device_ids, async_op=True)
        assert barrier is not None, "asynchronous collectives return their work"
        self._barriers.append(barrier)

    def _wait(self) -> None:
        with self._watchdog.phase("the wait for other ranks", timeout=self._limit):
            self._barriers.popleft().wait()

    def _set_timeout(self, limit: timedelta) -> None:
        """Set the time limit of a batch. Barriers get more time: another rank may be `_MOST_AHEAD` batches behind."""
        self._limit = limit
        self._ctx.set_timeout(limit + _MOST_AHEAD * self._ctx.timeouts.step + self._watchdog.margin)
