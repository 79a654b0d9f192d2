import json
import os
import signal
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api as launcher

from d9d_loop import warm_rank
from d9d_loop.elastic_rendezvous import BACKEND
from d9d_loop.resilience.exit_codes import QUIET_TORCHRUN
from d9d_loop.resilience.node_files import NODE_FOLDER
from d9d_loop.torchrun import main


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LocalElasticAgent", launcher.LocalElasticAgent)  # restored after the test
    for name in (QUIET_TORCHRUN, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", NODE_FOLDER):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)


def _exit_code(error: Exception) -> object:
    with mock.patch.object(run, "run", side_effect=error), pytest.raises(SystemExit) as left:
        main(["train.py"])
    return left.value.code


@pytest.mark.parametrize(("code", "expected"), [(2, 2), (124, 124), (-signal.SIGKILL, 137)])
def test_torchrun_exits_with_the_code_of_the_rank_that_failed_first(code: int, expected: int, tmp_path: Path) -> None:
    failures = {}
    for rank, (seconds, exit_code) in enumerate([(2, 1), (1, code), (3, 125)]):
        failure = ProcessFailure(rank, pid=7, exitcode=exit_code, error_file=str(tmp_path / "missing"))
        failure.timestamp = seconds
        failures[rank] = failure
    assert _exit_code(ChildFailedError("train.py", failures)) == expected


def test_ranks_that_the_agent_ended_do_not_give_the_exit_code(tmp_path: Path) -> None:
    codes = [-signal.SIGTERM, 2, -signal.SIGTERM]
    failures = {rank: ProcessFailure(rank, 7, code, str(tmp_path / "missing")) for rank, code in enumerate(codes)}
    assert _exit_code(ChildFailedError("train.py", failures)) == 2


def test_after_a_signal_the_exit_code_is_128_plus_its_number() -> None:
    assert _exit_code(SignalException("stop", signal.SIGTERM)) == 143


def test_a_job_that_succeeds_exits_with_0() -> None:
    with mock.patch.object(run, "run") as torchrun:
        main(["--nproc-per-node", "2", "train.py", "--warm"])
    options = torchrun.call_args.args[0]
    assert (options.nproc_per_node, options.training_script, options.training_script_args) == (
        "2",
        "train.py",
        ["--warm"],
    )
    assert (options.start_method, options.run_path) == ("spawn", False)
    assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"  # needed by replacement nodes
    assert os.environ[QUIET_TORCHRUN] == "1"  # for the messages of the ranks


def test_warm_ranks_are_forked_from_a_process_with_their_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(warm_rank.COMMAND, "")
    with (
        mock.patch.object(run, "run") as torchrun,
        mock.patch("d9d_loop.torchrun.forkserver") as server,
        mock.patch("d9d_loop.torchrun.multiprocessing"),
    ):
        main(["--warm", "--nproc-per-node", "2", "-m", "train", "--steps", "2"])
    options = torchrun.call_args.args[0]
    assert (options.start_method, options.run_path, options.module) == ("forkserver", True, False)
    assert [options.training_script, *options.training_script_args] == [
        warm_rank.__file__,
        "-m",
        "train",
        "--steps",
        "2",
    ]
    assert [call[0] for call in server.method_calls] == ["set_forkserver_preload", "ensure_running"]
    assert json.loads(os.environ[warm_rank.COMMAND]) == ["-m", "train"]


@pytest.mark.parametrize(("backend", "expected"), [("c10d", BACKEND), ("static", "static")])
def test_nodes_that_meet_dynamically_use_the_rendezvous_without_long_waits(backend: str, expected: str) -> None:
    with mock.patch.object(run, "run") as torchrun:
        main(["--rdzv-backend", backend, "train.py"])
    assert torchrun.call_args.args[0].rdzv_backend == expected


def test_warm_ranks_of_a_program_that_is_not_python_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--warm", "--no-python", "train"])
    assert (
        "--warm cannot be combined with --no-python or --run-path; expected a Python script" in capsys.readouterr().err
    )
