import json
import os
import signal
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed import DistNetworkError, run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.launcher import api as launcher

from d9d_dist.failures.first_failure import NODE_FOLDER
from d9d_loop import warm_rank
from d9d_loop.elastic_rendezvous import BACKEND
from d9d_loop.report.run_status import read_status
from d9d_loop.resilience.exit_codes import QUIET_TORCHRUN
from d9d_loop.resilience.launcher_watch import LAUNCHER
from d9d_loop.resilience.node_files import write_job
from d9d_loop.torchrun import main


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LocalElasticAgent", launcher.LocalElasticAgent)  # restored after the test
    for name in (
        QUIET_TORCHRUN,
        LAUNCHER,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        NODE_FOLDER,
    ):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)


def _exit_code(error: Exception, codes: dict[int, int]) -> object:
    """Run the command with ranks that end with exit codes."""

    def end_ranks(options: object) -> None:
        agent = launcher.LocalElasticAgent
        assert isinstance(agent, partial)
        agent.keywords["ends"].codes.update(codes)
        raise error

    with mock.patch.object(run, "run", side_effect=end_ranks), pytest.raises(SystemExit) as left:
        main(["train.py"])
    return left.value.code


def test_torchrun_exits_with_the_code_of_the_rank_that_failed_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = ProcessFailure(0, pid=7, exitcode=125, error_file=str(tmp_path / "missing"))
    assert _exit_code(ChildFailedError("train.py", {0: failure}), {0: 125, 1: -signal.SIGKILL}) == 137
    assert capsys.readouterr().err == "d9d-torchrun: Exit codes: rank 0: 125, rank 1: 137.\n"


@pytest.mark.parametrize(("code", "nodes"), [(-signal.SIGKILL, "1"), (-signal.SIGKILL, "2"), (75, "1")])
def test_the_launcher_reports_a_failure_that_no_rank_reported(tmp_path: Path, code: int, nodes: str) -> None:
    def end_ranks(options: object) -> None:
        agent = launcher.LocalElasticAgent
        assert isinstance(agent, partial)
        agent.keywords["ends"].codes.update({0: code})
        write_job(tmp_path, "echo $D9D_STATE: $D9D_ERROR > $D9D_RUN/said")
        raise ChildFailedError("train.py", {0: ProcessFailure(0, pid=7, exitcode=code, error_file="missing")})

    with mock.patch.object(run, "run", side_effect=end_ranks), pytest.raises(SystemExit):
        main(["--nnodes", nodes, "train.py"])
    status = read_status(tmp_path)
    if (code, nodes) != (-signal.SIGKILL, "1"):
        assert status is None
        return
    assert (tmp_path / "said").read_text() == "failed: d9d-torchrun: Exit codes: rank 0: 137.\n"
    assert status is not None
    assert (status["state"], status["error"]) == ("failed", "d9d-torchrun: Exit codes: rank 0: 137.")


def test_after_a_signal_the_exit_code_is_that_of_the_ranks() -> None:
    stopped = SignalException("stop", signal.SIGUSR1)
    assert _exit_code(stopped, {0: 75, 1: 75}) == 75
    assert _exit_code(stopped, {0: 0, 1: 0}) == 0
    assert _exit_code(stopped, {0: -signal.SIGUSR1, 1: -signal.SIGUSR1}) == 138
    assert _exit_code(stopped, {}) == 138


@pytest.mark.parametrize("is_ignored", [False, True])
def test_the_signals_that_jobs_handle_are_forwarded(*, is_ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        with mock.patch.object(run, "run") as torchrun:
            main(["train.py"])
    finally:
        signal.signal(signal.SIGHUP, before)
    handled = torchrun.call_args.args[0].signals_to_handle.split(",")
    assert {"SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"} <= set(handled)
    assert ("SIGHUP" in handled) != is_ignored, "nohup"
    assert os.environ["D9D_LAUNCHER"] == str(os.getpid())


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
        mock.patch("d9d_loop.elastic_launch.forkserver") as server,
        mock.patch("d9d_loop.elastic_launch.multiprocessing"),
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


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (DistNetworkError("address already in use"), ["--master-addr", "node0", "--master-port", "4"]),
        (RendezvousConnectionError("address already in use"), ["--rdzv-endpoint", "node0:4"]),
    ],
)
def test_an_address_in_use_is_a_message(
    error: Exception, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.object(run, "run", side_effect=error), pytest.raises(SystemExit, match="1"):
        main([*options, "train.py"])
    expected = (
        "d9d-torchrun: this node can neither listen at node0:4 nor reach the job's store there: address already in "
    )
    assert capsys.readouterr().err.startswith(expected)
