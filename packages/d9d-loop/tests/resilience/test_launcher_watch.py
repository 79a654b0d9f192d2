import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from stopping_loops import trains_until_the_launcher_is_gone

from d9d_loop.resilience import ExitCode
from d9d_loop.resilience.launcher_watch import LAUNCHER, LauncherWatch, launcher_process


def test_a_process_without_torchrun_has_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launcher_process() is None  # a shell may end before its background job
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.delenv(LAUNCHER, raising=False)
    assert launcher_process() == os.getppid()
    monkeypatch.setenv(LAUNCHER, "17")
    assert launcher_process() == 17


def _gone() -> int:
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_the_loss_of_the_launcher_is_noticed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv(LAUNCHER, str(_gone()))
    is_lost = threading.Event()
    with LauncherWatch(is_lost.set):
        assert is_lost.wait(30)


def test_a_rank_that_cannot_save_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv(LAUNCHER, str(_gone()))
    if not (child := os.fork()):
        try:
            with LauncherWatch():
                threading.Event().wait(30)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ExitCode.PEER_LOST


def test_the_steps_end_after_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv(LAUNCHER, str(_gone()))
    assert trains_until_the_launcher_is_gone() == (ExitCode.PEER_LOST, "stopped because the launcher is gone")


_ORPHAN = """
import os
while " Z " not in open("/proc/" + os.environ["PARENT"] + "/stat").read():
    os.sched_yield()
from d9d_loop.resilience.launcher_watch import LauncherWatch
with LauncherWatch():
    import threading
    threading.Event().wait(30)
"""
_DIES = """
import os, subprocess, sys
environment = {**os.environ, "PARENT": str(os.getpid()), "TORCHELASTIC_RUN_ID": "1"}
subprocess.Popen(sys.argv[1:], env=environment, start_new_session=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/1/exe").is_symlink(), reason="needs /proc")
@pytest.mark.parametrize("wrapper", [(), ("sh", "-c", '"$@"; true', "-")], ids=["alone", "in a wrapper"])
def test_a_rank_whose_torchrun_is_killed_during_its_imports_ends_at_once(wrapper: Sequence[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != LAUNCHER}
    command = [sys.executable, "-c", _DIES, *wrapper, sys.executable, "-c", _ORPHAN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "d9d: this rank exits without saving: its launcher is gone.\n"


_WATCHES = """
from d9d_loop.resilience.launcher_watch import launcher_process
print(launcher_process())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/1/exe").is_symlink(), reason="needs /proc")
def test_the_launcher_is_the_process_that_started_the_session_of_a_wrapped_rank() -> None:
    environment = {name: value for name, value in os.environ.items() if name != LAUNCHER}
    command = ["sh", "-c", '"$@"; true', "-", sys.executable, "-c", _WATCHES]
    environment["TORCHELASTIC_RUN_ID"] = "1"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, start_new_session=True)
    assert int(done.stdout) == os.getpid()
