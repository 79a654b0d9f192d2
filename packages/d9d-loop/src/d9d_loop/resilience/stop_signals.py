"""A scheduler that wants its machines back sends a signal: all ranks agree on the step at which they save and leave.

A rank that acted on its own signal alone would save while the others compute. So at the end of every step ranks take
the maximum of what they got, over their hosts, and look at the result a step later: by then it is there, and nobody
waits, neither a host for its device nor, but for one step, a host for another.
"""

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import FrameType, TracebackType
from typing import Self, TypeAlias, final

import torch
import torch.distributed as dist

from d9d_dist import DistributedContext, UserError
from d9d_loop.resilience.exit_codes import ExitCode

_Handler: TypeAlias = "signal._HANDLER"
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_END = b"\0"  # no signal has this number


@final
class Stopped(SystemExit):
    """The job has saved and leaves, as a signal asked. Not caught, it ends the process with `ExitCode.STOPPED`.

    The signals are ignored from then on, so that one that comes once more does not change the exit code. Whoever
    catches this and goes on gives them a meaning again, with `signal.signal`.

    Attributes:
        by: The signal.
        step: Steps done, all of which are saved.

    Args:
        by: See the attribute.
        step: See the attribute.
    """

    def __init__(self, by: signal.Signals, *, step: int) -> None:
        super().__init__(int(ExitCode.STOPPED))
        self.by, self.step = by, step

    def __str__(self) -> str:
        """For people."""
        return f"stopped by {self.by.name} after step {self.step}, which is saved. The same command continues."


@final
class StopSignals:
    """Catches signals from `with` to the end of its block, and tells all ranks together.

    Only Python's main thread may catch signals. In another thread, and for a signal that native code handles already,
    this rank catches none, and hears of those of the others.

    Args:
        ctx: The job's context.
        signals: Which signals ask the job to stop.
        every: After how many calls of `agreed` ranks ask each other. All give the same.
        grace: How long after the first signal the process ends, saved or not; `None` leaves that to who sent it.
        repeat: A signal that comes so much later than the first one ends the process at once. One that comes sooner is
            the same once more: a scheduler signals a launcher and its ranks, and the launcher its ranks again.
    """

    def __init__(
        self,
        ctx: DistributedContext,
        *,
        signals: Sequence[signal.Signals] = _SIGNALS,
        every: int = 1,
        grace: timedelta | None = None,
        repeat: timedelta = timedelta(seconds=2),
    ) -> None:
        if every < 1:
            raise UserError(f"got every = {every}; expected a positive number of steps.")
        self._rank, self._signals, self._every = ctx.rank, tuple(signals), every
        self._grace, self._repeat = grace, repeat.total_seconds()
        self._received = 0
        self._num_calls = 0
        self._group = _host_group(ctx)
        self._asked: tuple[torch.Tensor, dist.Work] | None = None
        self._handlers: dict[signal.Signals, _Handler] = {}
        self._is_leaving = False
        self._mask: set[signal.Signals | int] = set()

    def __enter__(self) -> Self:
        """Begin to catch them."""
        if threading.current_thread() is threading.main_thread():
            # Handlers run in the main thread, which may be in a collective; what is written here is read in any case.
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            caught = [each for each in self._signals if signal.getsignal(each) is not None]
            self._handlers = {each: signal.signal(each, self._receive) for each in caught}
            self._keep_from_forks()
            self._thread = threading.Thread(target=self._watch, name="d9d-stop-signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Let signals do what they did before, or nothing if the process is about to end."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._handlers.items():
                signal.signal(number, signal.SIG_IGN if self._is_leaving else handler)
            signal.set_wakeup_fd(self._wakeup_before)
            self._handlers = {}
            # Not by closing it: a process that was forked meanwhile may hold it open.
            self._writer.send(_END)
            self._thread.join()
            self._writer.close()
            self._reader.close()
        if error is None and self._asked is not None:
            self._asked[1].wait()  # nobody leaves while others may still need it

    def _keep_from_forks(self) -> None:
        """Let forked processes, such as those that read data, have signals of their own."""
        me = weakref.ref[StopSignals](self)  # what is registered stays for ever
        os.register_at_fork(
            before=partial(_in_fork, me, StopSignals._block),
            after_in_parent=partial(_in_fork, me, StopSignals._unblock),
            after_in_child=partial(_in_fork, me, StopSignals._forget),
        )

    def _block(self) -> None:
        """A signal that comes right after the fork waits until the child has forgotten the handlers."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._handlers)

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _forget(self) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._unblock()
        self._handlers = {}

    def leave(self) -> None:
        """Have signals ignored from the end of the block on: all is saved, and the process is about to end.

        Python takes its own handlers away before the process is gone, and a signal that comes then, such as the
        scheduler's second one, would end it with another exit code.
        """
        self._is_leaving = True

    def agreed(self) -> signal.Signals | None:
        """The signal that all ranks are to stop for now, or `None`; the same on all of them.

        To be called by all ranks at the end of every step. Collective, on every `every`-th call: an all-reduce of one
        integer over the hosts, which is looked at on the next such call. So a signal is heard of after at most
        `2 * every` steps; in a job of one process at once.
        """
        if self._group is None:
            return _signal(self._received)
        self._num_calls += 1
        if self._num_calls % self._every:
            return None
        answered, self._asked = self._asked, self._ask(self._group)
        if answered is None:
            return None
        value, work = answered
        work.wait()
        return _signal(int(value))

    def _ask(self, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
        value = torch.tensor(self._received, dtype=torch.int32, device="cpu")
        work = dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None, "what is asynchronous gives its work"
        return value, work

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._received = number

    def _watch(self) -> None:
        """End the process on a second signal, or when the grace period is over; in a thread of its own."""
        first: float | None = None
        deadline: float | None = None
        while True:
            self._reader.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
            try:
                data = self._reader.recv(64)
            except TimeoutError:
                self._end_process(self._received, "the grace period is over")
                return
            if _END in data:
                return
            for number in data:
                if number not in self._signals:
                    continue
                now = time.monotonic()
                self._received = number
                if first is None:
                    first = now
                    deadline = None if self._grace is None else now + self._grace.total_seconds()
                elif now - first >= self._repeat:
                    self._end_process(number, "a second signal came")

    def _end_process(self, number: int, why: str) -> None:
        out = sys.__stderr__ or sys.stderr
        name = signal.Signals(number).name
        print(f"d9d: rank {self._rank} ends without saving: {why} ({name}).", file=out, flush=True)
        faulthandler.dump_traceback(file=out, all_threads=True)
        os._exit(128 + number)


def _in_fork(signals: "weakref.ref[StopSignals]", do: Callable[[StopSignals], None]) -> None:
    """Do something around a fork, if signals are still caught."""
    here = signals()
    if here is not None and here._handlers:
        do(here)


def _signal(number: int) -> signal.Signals | None:
    return signal.Signals(number) if number else None


def _host_group(ctx: DistributedContext) -> dist.ProcessGroup | None:
    """A group of all ranks that works on the CPU; the default group if it does."""
    if ctx.world_size == 1:
        return None
    backends = dist.get_backend_config().split(",")
    if any(backend.startswith("cpu:") for backend in backends):
        return dist.group.WORLD
    group = dist.new_group(backend=dist.get_default_backend_for_device("cpu"), timeout=ctx.timeouts.startup)
    assert isinstance(group, dist.ProcessGroup), "every rank is in a group of all"
    return group
