"""Background thread that runs one save at a time and stores its error."""

import logging
from collections.abc import Callable
from threading import Thread
from typing import final

import torch.distributed as dist

from d9d_dist import DistributedContext
from d9d_state.errors import StateError

_LOGGER = logging.getLogger("d9d.state")


@final
class Background:
    """Thread for one task at a time. Logs an error at once; the next `start`, `wait` or `raise_if_failed` raises it."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._failure: StateError | None = None
        self._ctx: DistributedContext | None = None
        self._group: dist.ProcessGroup | None = None

    def group(self, ctx: DistributedContext | None) -> dist.ProcessGroup | None:
        """Return a Gloo group of all ranks for the thread, or `None` for one process. Collective on the first call."""
        if ctx is None or ctx.world_size == 1:
            return None
        if ctx is not self._ctx:
            group = dist.new_group(backend="gloo", timeout=ctx.timeouts.step, group_desc="d9d_checkpoints")
            assert isinstance(group, dist.ProcessGroup), "this rank is not in the group of all ranks"
            self._ctx, self._group = ctx, group
        return self._group

    def start(self, what: str, work: Callable[[], None]) -> None:
        """Wait for the previous task, raise its error if it was not raised yet, then start a new task."""
        self.wait()
        # Not a daemon thread: the interpreter waits for it at exit, so a started save is completed.
        self._thread = Thread(target=self._run, args=(what, work), name="d9d-checkpoint", daemon=False)
        self._thread.start()

    def raise_if_failed(self) -> None:
        """Raise the `StateError` of a finished task, once. Does not wait."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Wait for the task; raise its `StateError` if it was not raised yet."""
        self.join()
        self.raise_if_failed()

    def join(self) -> None:
        """Wait for the task without raising its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def is_busy(self) -> bool:
        """True while the task is running."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # any error is stored, to be raised in the calling thread
            _LOGGER.error("%s failed: %s", what, error)
            failure = error if isinstance(error, StateError) else StateError(f"{what} failed: {error}")
            if failure is not error:
                failure.__cause__ = error
            self._failure = failure
