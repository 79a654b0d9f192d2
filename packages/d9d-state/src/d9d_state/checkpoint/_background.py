"""One save at a time in a thread beside the training, and what came of it."""

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
    """Runs work in a thread. What goes wrong in it is logged at once, and raised when somebody asks."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._failure: StateError | None = None
        self._ctx: DistributedContext | None = None
        self._group: dist.ProcessGroup | None = None

    def group(self, ctx: DistributedContext | None) -> dist.ProcessGroup | None:
        """A group of all ranks for the thread alone, on the CPU. Collective the first time that a context asks."""
        if ctx is None or ctx.world_size == 1:
            return None
        if ctx is not self._ctx:
            group = dist.new_group(backend="gloo", timeout=ctx.timeouts.step, group_desc="d9d_checkpoints")
            assert isinstance(group, dist.ProcessGroup), "a rank is in the group of all ranks"
            self._ctx, self._group = ctx, group
        return self._group

    def start(self, what: str, work: Callable[[], None]) -> None:
        """Begin, after what was begun before is done.

        Args:
            what: What is done, for messages.
            work: Raises if it fails.

        Raises:
            StateError: If what was begun before failed, and nobody was told yet.
        """
        self.wait()
        # No daemon: a process that ends without having waited still finishes what was begun.
        self._thread = Thread(target=self._run, args=(what, work), name="d9d-checkpoint", daemon=False)
        self._thread.start()

    def raise_if_failed(self) -> None:
        """Raise what went wrong, once. Waits for nothing.

        Raises:
            StateError: If the work failed.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Wait until the work is done.

        Raises:
            StateError: If it failed, and nobody was told yet.
        """
        self.join()
        self.raise_if_failed()

    def join(self) -> None:
        """Wait until the work is done, whatever came of it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def is_busy(self) -> bool:
        """Whether the work is still being done."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # whatever it is, it must not stay in the thread
            _LOGGER.error("%s failed: %s", what, error)
            failure = error if isinstance(error, StateError) else StateError(f"{what} failed: {error}")
            if failure is not error:
                failure.__cause__ = error
            self._failure = failure
