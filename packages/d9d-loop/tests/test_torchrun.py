import os
import signal
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from d9d_loop.resilience.exit_codes import QUIET_TORCHRUN
from d9d_loop.torchrun import main


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(QUIET_TORCHRUN, "")  # restored after the test


def _exit_code(error: Exception) -> object:
    with mock.patch.object(run, "main", side_effect=error), pytest.raises(SystemExit) as left:
        main(["train.py"])
    return left.value.code


@pytest.mark.parametrize(("code", "expected"), [(2, 2), (124, 124), (-signal.SIGKILL, 137)])
def test_the_exit_code_is_that_of_the_rank_that_failed_first(code: int, expected: int, tmp_path: Path) -> None:
    failures = {}
    for rank, (seconds, exit_code) in enumerate([(2, 1), (1, code), (3, 125)]):
        failure = ProcessFailure(rank, pid=7, exitcode=exit_code, error_file=str(tmp_path / "missing"))
        failure.timestamp = seconds
        failures[rank] = failure
    assert _exit_code(ChildFailedError("train.py", failures)) == expected


def test_the_exit_code_of_a_signal_is_that_of_a_shell() -> None:
    assert _exit_code(SignalException("stop", signal.SIGTERM)) == 143


def test_a_job_that_succeeds_exits_with_0() -> None:
    with mock.patch.object(run, "main") as torchrun:
        main(["--nproc-per-node", "2", "train.py"])
    torchrun.assert_called_once_with(["--nproc-per-node", "2", "train.py"])
    assert os.environ[QUIET_TORCHRUN] == "1"  # for the messages of the ranks
