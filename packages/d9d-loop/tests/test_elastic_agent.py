import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from torch._logging._internal import TorchLogsFormatter
from torch.distributed import DistNetworkError, HashStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousGracefulExitError
from torch.distributed.launcher import api as launcher

from d9d_dist.failures.first_failure import NODE_FOLDER
from d9d_dist.failures.peers import process_state
from d9d_loop import elastic_agent
from d9d_loop.elastic_agent import QuickAgent
from d9d_loop.elastic_rendezvous import QuickRendezvous
from d9d_loop.rank_ends import RankEnds
from d9d_loop.resilience.node_files import NodeFile, read_node_file, write_node_file

ENDS, IGNORES, IS_STOPPED = "echo > 0; exec sleep 100", "trap '' TERM; echo > 1; sleep 100", "echo > 2; kill -STOP $$"


def _agent(folder: Path, *scripts: str) -> QuickAgent:
    """Return an agent whose ranks run shell scripts, each of which creates a file."""
    context = SubprocessContext(
        "rank",
        "sh",
        args={rank: ("-c", f"cd {folder}; {script}") for rank, script in enumerate(scripts)},
        envs={rank: {} for rank in range(len(scripts))},
        logs_specs=DefaultLogsSpecs(),
    )
    with mock.patch.object(signal, "signal"):  # the agent would install signal handlers in this process
        context.start()
    while len(list(folder.iterdir())) < len(scripts):
        os.sched_yield()
    for rank, script in enumerate(scripts):
        while script is IS_STOPPED and process_state(context.pids()[rank]) != "is stopped":
            os.sched_yield()
    agent = QuickAgent.__new__(QuickAgent)
    agent._pcontext = context
    agent._ends = RankEnds()
    agent._worker_group = mock.Mock(workers=[mock.Mock(global_rank=4 + rank) for rank in range(len(scripts))])
    return agent


def test_ranks_that_ignore_the_signal_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_agent, "_END_SECONDS", 0.3)
    agent = _agent(tmp_path, ENDS, IGNORES)
    agent._end_ranks()
    assert agent._exit_codes() == [-signal.SIGTERM, -signal.SIGKILL]


def test_ranks_that_are_stopped_are_killed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_agent, "_END_SECONDS", float("inf"))
    agent = _agent(tmp_path, ENDS, IS_STOPPED)
    agent._end_ranks()
    assert agent._exit_codes() == [-signal.SIGTERM, -signal.SIGKILL]


@pytest.mark.parametrize("is_broken", [True, False])
def test_ranks_have_little_time_to_end_after_another_node_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_broken: bool
) -> None:
    monkeypatch.setattr(elastic_agent, "_END_SECONDS", 0.3)
    agent, group = _agent(tmp_path, IGNORES), mock.Mock(state=WorkerState.HEALTHY)
    group.spec.rdzv_handler = mock.Mock(spec=QuickRendezvous)
    group.spec.rdzv_handler.configure_mock(**{"lost_nodes.return_value": [], "is_broken.return_value": is_broken})
    with mock.patch.object(LocalElasticAgent, "_stop_workers"):
        agent._stop_workers(group)
    assert agent._exit_codes() == ([-signal.SIGKILL] if is_broken else [None])
    agent._end_ranks()


def test_the_first_rank_of_a_lost_host_counts_the_ranks_of_uneven_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NODE_FOLDER, str(tmp_path))
    agent, store = QuickAgent.__new__(QuickAgent), HashStore()
    agent._pcontext = None
    groups = [
        mock.Mock(group_rank=node, store=store, workers=[mock.Mock(global_rank=rank) for rank in ranks])
        for node, ranks in enumerate([range(8), range(8, 10), range(10, 14)])
    ]
    with mock.patch.multiple(LocalElasticAgent, _rendezvous=mock.DEFAULT, _stop_workers=mock.DEFAULT):
        for group in groups:
            agent._rendezvous(group)
        rendezvous = groups[1].spec.rdzv_handler = mock.Mock(spec=QuickRendezvous)
        rendezvous.configure_mock(**{"lost_nodes.return_value": [(2, "host2")], "is_broken.return_value": False})
        agent._stop_workers(groups[1])
    assert str(read_node_file(NodeFile.LOST_HOST)).startswith("Rank 10 is missing: its process on host2")


@pytest.mark.parametrize("fails", [False, True])
def test_a_host_that_was_lost_before_it_named_its_ranks_stops_no_agent(*, fails: bool) -> None:
    broken = mock.Mock(**{"check.side_effect": DistNetworkError("connection reset")})
    store = broken if fails else HashStore()
    assert elastic_agent._first_rank(2, mock.Mock(store=store, workers=[mock.Mock()] * 4)) == 8


_NOTES_FIRST = "printf '5\\n2' > ../first_failure; "


@pytest.mark.parametrize(
    ("scripts", "expected", "restarts"),
    [
        (("exit 125", "exit 2"), 2, 0),  # a user error, on any rank
        (("exit 1", f"{_NOTES_FIRST} exit 2"), 2, 0),
        (("exit 75", "exit 75"), 75, 0),  # a stop on request
        (("touch ../replacing; echo r > ../replacing; exit 75", "exit 75"), 75, 3),
        (("exit 125", "kill -KILL $$"), 137, 3),
        (("exit 124", "exit 124"), 124, 3),
        (("exit 130", "exit 130"), 130, 0),
    ],
)
def test_a_restart_follows_only_failures_that_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripts: tuple[str, ...], expected: int, restarts: int
) -> None:
    monkeypatch.setenv(NODE_FOLDER, str(tmp_path))
    (tmp_path / "ranks").mkdir()
    agent = _agent(tmp_path / "ranks", *(f"echo > {rank}; {script}" for rank, script in enumerate(scripts)))
    agent._remaining_restarts = 3
    while None in agent._exit_codes():
        os.sched_yield()
    failed = RunResult(WorkerState.FAILED)
    with mock.patch.object(LocalElasticAgent, "_monitor_workers", return_value=failed):
        agent._monitor_workers(agent._worker_group)
    assert agent._ends.exit_code() == expected
    assert agent._remaining_restarts == restarts


def test_signals_to_the_agent_reach_its_ranks_until_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGUSR2")
    # The first signal asks for a save; during the save, the agent gets another signal, and passes it on.
    script = "trap 'kill -USR2 $PPID' USR1; trap 'exit 75' USR2; echo > 0; while :; do sleep 0.01; done"
    agent = _agent(tmp_path, script)
    agent._worker_watchdog = agent._health_check_server = None
    agent._shutdown_timeout = 60
    before = signal.getsignal(signal.SIGUSR2)
    agent._shutdown(signal.SIGUSR1)
    assert agent._ends.exit_code() == 75
    assert signal.getsignal(signal.SIGUSR2) == before


def test_ranks_end_with_an_agent_that_lost_the_rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ranks").mkdir()
    monkeypatch.setenv(NODE_FOLDER, str(tmp_path))
    agent = _agent(tmp_path / "ranks", ENDS, IS_STOPPED)
    agent._worker_group.spec.rdzv_handler = mock.Mock(spec=QuickRendezvous, host="host0")
    failed = mock.patch.object(LocalElasticAgent, "_invoke_run", side_effect=RendezvousConnectionError)
    with failed, pytest.raises(RendezvousConnectionError):
        agent._invoke_run()
    assert agent._exit_codes() == [-signal.SIGTERM, -signal.SIGKILL]
    expected = "the rendezvous on host0 does not answer: the host is down or cut off."
    assert read_node_file(NodeFile.LOST_HOST) == expected


@pytest.mark.parametrize(("restarts", "has_spare"), [(1, True), (0, True), (1, False)])
def test_ranks_know_whether_a_spare_node_can_replace_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int, *, has_spare: bool
) -> None:
    monkeypatch.setenv(NODE_FOLDER, str(tmp_path))
    (tmp_path / "ranks").mkdir()
    agent, group = _agent(tmp_path / "ranks", ENDS), mock.Mock()
    agent._remaining_restarts = restarts
    write_node_file(NodeFile.SPARE_HOST, "waits" if not has_spare else None)
    group.spec.rdzv_handler = mock.Mock(spec=QuickRendezvous)
    group.spec.rdzv_handler.configure_mock(**{"has_spare.return_value": has_spare})
    healthy = RunResult(WorkerState.HEALTHY)
    with mock.patch.object(LocalElasticAgent, "_monitor_workers", return_value=healthy):
        agent._monitor_workers(group)
    assert (read_node_file(NodeFile.SPARE_HOST) is not None) == (restarts > 0 and has_spare)
    agent._end_ranks()


def test_a_node_yields_to_a_spare_one_if_its_ranks_ask_for_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NODE_FOLDER, str(tmp_path))
    agent, group = QuickAgent.__new__(QuickAgent), mock.MagicMock()
    group.spec.rdzv_handler = mock.Mock(spec=QuickRendezvous)
    write_node_file(NodeFile.SLOW_HOST, "slow")
    with mock.patch.object(LocalElasticAgent, "_rendezvous"):
        agent._rendezvous(group)
        agent._rendezvous(group)
    group.spec.rdzv_handler.yield_to_spare.assert_called_once_with()


def test_a_spare_node_that_waits_when_the_job_ends_has_succeeded() -> None:
    agent = QuickAgent.__new__(QuickAgent)
    ended = mock.patch.object(LocalElasticAgent, "_invoke_run", side_effect=RendezvousGracefulExitError)
    with ended, mock.patch.object(QuickAgent, "_shutdown"):
        agent._shutdown_timeout = 1
        assert not agent.run().is_failed()


def test_torchrun_uses_the_agent_and_formats_exceptions_without_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LocalElasticAgent", launcher.LocalElasticAgent)
    handlers = logging.getLogger("torch.distributed").handlers
    handler = next(each for each in handlers if isinstance(each.formatter, TorchLogsFormatter))
    monkeypatch.setattr(handler, "filters", [])
    ends = RankEnds()
    elastic_agent.install(ends)
    agent = launcher.LocalElasticAgent
    assert isinstance(agent, partial)
    assert (agent.func, agent.keywords) == (QuickAgent, {"ends": ends})
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # importing it fails
    try:
        raise KeyError("culprit")
    except KeyError:
        record = logging.LogRecord("torch.distributed.x", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    assert handler.filter(record)
    assert "KeyError: 'culprit'" in handler.format(record)
