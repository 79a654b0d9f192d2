import multiprocessing
import os
import signal
import threading
import time

import pytest
from forked_faults import run_forked
from pydantic import ValidationError
from stopping_loops import saves_for_ever, stops

from d9d_dist import DistributedContext, MeshConfig
from d9d_dist.testing import run_ranks
from d9d_loop.resilience import ExitCode, StopConfig, Stopped, StopSignals, stop_signals
from d9d_loop.resilience.exit_codes import QUIET_TORCHRUN, Lost


def test_one_process_gets_the_signal_at_once_and_restores_handlers(ctx: DistributedContext) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(StopConfig(), ctx) as stop:
        assert stop.agreed() is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed() is signal.SIGTERM
        assert stop.agreed() is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_without_signals_no_handlers_are_installed(ctx: DistributedContext) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    with StopSignals(StopConfig(signals=()), ctx):
        assert {number: signal.getsignal(number) for number in before} == before


def test_another_thread_installs_no_handlers(ctx: DistributedContext) -> None:
    heard: list[signal.Signals | Lost | None] = []

    def work() -> None:
        with StopSignals(StopConfig(), ctx) as stop:
            heard.append(stop.agreed())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert heard == [None]


def test_forked_processes_have_the_previous_handlers(ctx: DistributedContext) -> None:
    fork = multiprocessing.get_context("fork")
    stays, goes = (fork.Process(target=time.sleep, args=(60,), daemon=True) for _ in range(2))
    with StopSignals(StopConfig(), ctx) as stop:
        stays.start()
        goes.start()
        goes.terminate()
        goes.join(30)
        assert goes.exitcode == -signal.SIGTERM
        assert stop.agreed() is None
    # Restored before the fork returns: a child with inherited handlers would never be waited for.
    assert stays.is_alive()
    stays.kill()
    stays.join(30)


def test_every_must_be_positive() -> None:
    with pytest.raises(ValidationError, match="every"):
        StopConfig(every=0)


def test_stopped_jobs_have_their_own_exit_code() -> None:
    stopped = Stopped(signal.SIGTERM, step=7)
    assert stopped.code == ExitCode.STOPPED == 75
    assert str(stopped) == "stopped by SIGTERM after step 7, which is saved. The same command resumes the job."


def test_ctrl_c_saves_and_has_the_exit_code_of_an_interrupt() -> None:
    stopped = Stopped(signal.SIGINT, step=7)
    assert stopped.code == ExitCode.INTERRUPTED == 130
    assert str(stopped).startswith("stopped by Ctrl-C (SIGINT) after step 7, which is saved.")
    assert "SIGINT" in StopConfig().signals


def test_a_job_that_stops_for_a_spare_host_can_be_resumed() -> None:
    stopped = Stopped("host1", step=7)
    assert stopped.code == ExitCode.STOPPED
    assert str(stopped) == "stopped to replace host1, which is slow, with a spare host, after step 7, which is saved."


def test_the_message_announces_the_traceback_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.delenv(QUIET_TORCHRUN, raising=False)
    stopped = Stopped(signal.SIGINT, step=7)
    assert str(stopped).endswith("torchrun ends with exit code 1 and a traceback of its own; d9d-torchrun prints none.")
    monkeypatch.setenv(QUIET_TORCHRUN, "1")
    assert str(stopped).endswith("The same command resumes the job.")


def _fail_and_get_signals(_: None) -> tuple[int, int]:
    """Return how many of the signals reached the previous handler: during the report of a failure, and afterwards."""
    received: list[int] = []
    original = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    with MeshConfig().build() as ctx, pytest.MonkeyPatch.context() as patch:
        for seconds, count in ((60.0, 0), (0.0, 1)):
            patch.setattr(stop_signals, "_FAILING_SECONDS", seconds)
            with pytest.raises(ValueError, match="lost"), StopSignals(StopConfig(), ctx):
                raise ValueError("lost")
            os.kill(os.getpid(), signal.SIGTERM)
            assert len(received) == count
            signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
        with StopSignals(StopConfig(), ctx):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, original)
    return len(received), ctx.world_size


def test_a_failing_rank_is_not_ended_by_the_launcher_before_it_reports() -> None:
    assert run_ranks(_fail_and_get_signals, None, world_size=2) == [(2, 2)] * 2


@pytest.mark.parametrize(
    ("signals", "every", "expected"),
    [
        ({1: (3, "SIGTERM")}, 1, "SIGTERM after step 4"),
        ({0: (3, "SIGTERM"), 1: (4, "SIGUSR1")}, 1, "SIGTERM after step 4"),
        ({1: (4, "SIGUSR1")}, 3, "SIGUSR1 after step 9"),
    ],
)
def test_all_ranks_stop_after_one_step(signals: dict[int, tuple[int, str]], every: int, expected: str) -> None:
    ended = run_forked(stops, signals, every)
    assert [rank.code for rank in ended] == [ExitCode.STOPPED] * 2
    assert all(f"stopped by {expected}" in rank.errors for rank in ended)


@pytest.mark.parametrize(
    ("grace", "second", "why", "code"),
    [
        (0.5, None, r"the grace period ended \(SIGTERM\)", 143),
        (None, "SIGUSR1", r"a second signal was received \(SIGUSR1\)", 138),
    ],
)
def test_a_blocked_process_ends_by_a_second_signal_or_the_grace_period(
    grace: float | None, second: str | None, why: str, code: int
) -> None:
    ended = run_forked(saves_for_ever, grace, second)
    for rank in ended:
        assert rank.code == code, rank
        assert f"exits without saving: {why}".replace("\\", "") in rank.errors
        assert "in saves_for_ever" in rank.errors  # its stacks
