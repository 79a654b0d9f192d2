"""Reads before the start: apart from the workers, and named if they take long."""

import os
from threading import Event

import pytest

from d9d_dist.failures import slow_report
from d9d_loop.data import in_fork as module
from d9d_loop.data.in_fork import in_fork, read_apart


def test_a_read_that_takes_long_is_named_and_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    printed = Event()

    def show(text: str, **_: object) -> None:
        lines.append(text)
        printed.set()

    monkeypatch.setattr(module, "_SECONDS", 0.0)
    monkeypatch.setattr(slow_report, "print", show, raising=False)
    assert read_apart(lambda: printed.wait(60), num_workers=0, what="the training data") is True
    assert lines == ["d9d: rank 0 has been reading the training data for 0 s, and keeps waiting."]


def test_a_short_read_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_apart(lambda: 1, num_workers=1, what="the training data") == 1
    assert not capsys.readouterr().out


def test_a_read_whose_process_crashes_is_repeated_here() -> None:
    here = os.getpid()
    assert read_apart(lambda: 1 if os.getpid() == here else os._exit(1), num_workers=1, what="the data") == 1


def test_a_forked_process_that_takes_too_long_or_crashes_is_an_error() -> None:
    with pytest.raises(TimeoutError):
        in_fork(lambda: str(Event().wait()), seconds=0.0)
    with pytest.raises(EOFError):
        in_fork(lambda: os._exit(1), seconds=60.0)
