"""Preemption signals: all ranks agree on the step after which they save a checkpoint and exit.

A rank that reacted only to its own signal would save while the other ranks compute. So after every step, the ranks
start an asynchronous all-reduce (maximum) of the received signal numbers on the CPU. They read the result one step
later. There is no host-device synchronization, and a host waits for another host only if the other host is more than a
step behind.
"""

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType, TracebackType
from typing import Self, TypeAlias, final

import torch
import torch.distributed as dist

from d9d_dist import DistributedContext
from d9d_loop.resilience.exit_codes import Lost
from d9d_loop.resilience.launcher_watch import LauncherWatch
from d9d_loop.resilience.lost_terminal import drop_lost_terminal, terminals
from d9d_loop.resilience.resilience_config import StopConfig

_Handler: TypeAlias = "signal._HANDLER"
_FINISH = Lost.LAUNCHER.value - 1  # above the numbers of signals: a job that is complete needs no restart
_END = b"\0"  # 0 is not a signal number
_FAILING_SECONDS = 10.0  # a launcher sends SIGKILL if a rank takes longer to report its failure (torchrun: after 30 s)


@final
class StopSignals:
    """Context manager that catches signals and the loss of the launcher, on which all ranks agree in `agreed`.

    Python allows signal handlers only in the main thread. In another thread, this rank catches no signals, but `agreed`
    still returns the signals of other ranks. The same holds for a signal that has a handler in native code, and for
    SIGHUP if it is ignored, as under `nohup`.

    Attributes:
        is_finished: True if a rank called `finish`, and all ranks agree to end the job as complete.

    A signal less than `repeat_seconds` after the first one counts as a duplicate: a scheduler may signal the launcher
    and its ranks, and the launcher signals its ranks again. `every` counts calls of `agreed`, and must be equal on all
    ranks.
    """

    def __init__(self, config: StopConfig, ctx: DistributedContext) -> None:
        self._config, self._rank = config, ctx.rank
        self._signals = [signal.Signals[name] for name in config.signals]
        self._received, self.is_finished = 0, False
        self._terminals = terminals()
        self._num_calls = 0
        self._group = _host_group(ctx)
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self._handlers: dict[signal.Signals, _Handler] = {}
        self._launcher = LauncherWatch(self._lose_launcher)
        self._is_leaving = False
        self._mask: set[signal.Signals | int] = set()

    def __enter__(self) -> Self:
        """Install the signal handlers and start the watching threads."""
        self._launcher.__enter__()
        if threading.current_thread() is threading.main_thread():
            # Handlers run in the main thread, which may be blocked in a collective; a thread reads the wakeup socket.
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            caught = [each for each in self._signals if _can_catch(each)]
            self._handlers = {each: signal.signal(each, self._receive) for each in caught}
            self._register_fork_hooks()
            self._thread = threading.Thread(target=self._watch, name="d9d-stop-signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Restore the previous signal handlers; after `leave`, ignore the signals instead.

        After an error with several ranks, ignore them for ten seconds: a launcher that sees a rank fail signals the
        others, which would die before they report the failure and its cause.
        """
        self._launcher.close()
        if threading.current_thread() is threading.main_thread():
            is_failing = error is not None and self._group is not None
            until = time.monotonic() + _FAILING_SECONDS
            for number, handler in self._handlers.items():
                after = partial(_restore_later, before=handler, until=until) if is_failing else handler
                signal.signal(number, signal.SIG_IGN if self._is_leaving else after)
            signal.set_wakeup_fd(self._wakeup_before)
            self._handlers = {}
            # Closing the socket would not end the thread, since a forked process may hold it open.
            self._writer.send(_END)
            self._thread.join()
            self._writer.close()
            self._reader.close()
        if error is None and self._pending is not None:
            self._pending[1].wait()  # other ranks may still need this rank in the all-reduce

    def _register_fork_hooks(self) -> None:
        """Register fork hooks that restore the previous handlers in forked processes, such as data workers."""
        reference = weakref.ref[StopSignals](self)  # fork hooks cannot be unregistered
        os.register_at_fork(
            before=partial(_run_fork_hook, reference, StopSignals._block),
            after_in_parent=partial(_run_fork_hook, reference, StopSignals._unblock),
            after_in_child=partial(_run_fork_hook, reference, StopSignals._restore_in_child),
        )

    def _block(self) -> None:
        """Block the signals during a fork, so that the child receives them only after it restored the handlers."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._handlers)

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _restore_in_child(self) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._unblock()
        self._handlers = {}

    def leave(self) -> None:
        """Ignore the signals from the end of the `with` block on. Call it when all is saved and the process will exit.

        Python removes its handlers before the process exits; another signal at that time would change the exit code.
        """
        self._is_leaving = True

    def _lose_launcher(self) -> None:
        self._received = Lost.LAUNCHER.value

    def finish(self) -> None:
        """Ask all ranks to end the job as complete; `agreed` then sets `is_finished` on all of them."""
        self._received = max(self._received, _FINISH)

    def agreed(self) -> signal.Signals | Lost | None:
        """Return the signal or the loss for which all ranks must stop now, or `None`. Equal on all ranks.

        Call it on all ranks at the end of every step. Collective on every `every`-th call: an asynchronous all-reduce
        of one integer on the CPU, whose result is read on the next such call. So a signal is returned after at most `2
        * every` steps; with a single process, immediately.
        """
        if self._group is None:
            return self._take(self._received)
        self._num_calls += 1
        if self._num_calls % self._config.every:
            return None
        value = torch.tensor(self._received, dtype=torch.int32, device="cpu")
        work = dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None, "an asynchronous collective returns its work"
        answered, self._pending = self._pending, (value, work)
        if answered is None:
            return None
        value, work = answered
        work.wait()
        return self._take(int(value))

    def _take(self, number: int) -> signal.Signals | Lost | None:
        self.is_finished = number == _FINISH
        return None if self.is_finished else _signal(number)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._received = number
        if number == signal.SIGHUP:
            drop_lost_terminal(self._terminals)

    def _watch(self) -> None:
        """End the process on a second signal or after the grace period. Runs in its own thread."""
        first: float | None = None
        deadline: float | None = None
        while True:
            self._reader.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
            try:
                data = self._reader.recv(64)
            except TimeoutError:
                self._end_process(self._received, "the grace period ended")
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
                    grace = self._config.grace_seconds
                    deadline = None if grace is None else now + grace
                elif now - first >= self._config.repeat_seconds:
                    self._end_process(number, "a second signal was received")

    def _end_process(self, number: int, why: str) -> None:
        out = sys.__stderr__ or sys.stderr
        name = signal.Signals(number).name
        print(f"d9d: rank {self._rank} exits without saving: {why} ({name}).", file=out, flush=True)
        faulthandler.dump_traceback(file=out, all_threads=True)
        os._exit(128 + number)


def _run_fork_hook(signals: "weakref.ref[StopSignals]", do: Callable[[StopSignals], None]) -> None:
    """Run a fork hook if the `StopSignals` still exists and catches signals."""
    alive = signals()
    if alive is not None and alive._handlers:
        do(alive)


def _restore_later(number: int, _frame: FrameType | None, *, before: _Handler, until: float) -> None:
    """Ignore a signal before `until`, a time of `time.monotonic`; later, restore the previous handler and resend it."""
    if time.monotonic() >= until:
        signal.signal(number, before)
        os.kill(os.getpid(), number)


def _signal(number: int) -> signal.Signals | Lost | None:
    if number == Lost.LAUNCHER.value:
        return Lost.LAUNCHER
    return signal.Signals(number) if number else None


def _can_catch(number: signal.Signals) -> bool:
    """Return False for a signal with a handler in native code, and for SIGHUP under `nohup`."""
    handler = signal.getsignal(number)
    return handler is not None and not (number == signal.SIGHUP and handler == signal.SIG_IGN)


def _host_group(ctx: DistributedContext) -> dist.ProcessGroup | None:
    """Return a group of all ranks with a CPU backend; `None` for one process. Collective if a group is created."""
    if ctx.world_size == 1:
        return None
    backends = dist.get_backend_config().split(",")
    if any(backend.startswith("cpu:") for backend in backends):
        return dist.group.WORLD
    group = dist.new_group(backend=dist.get_default_backend_for_device("cpu"), timeout=ctx.timeouts.startup)
    assert isinstance(group, dist.ProcessGroup), "the group contains every rank"
    return group
