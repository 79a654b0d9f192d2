import logging
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from torch._logging._internal import TorchLogsFormatter
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SubprocessContext
from torch.distributed.launcher import api as launcher

from d9d_dist.peers import process_state
from d9d_loop import elastic_agent
from d9d_loop.elastic_agent import QuickAgent


@pytest.fixture
def ranks(tmp_path: Path) -> Generator[SubprocessContext]:
    """Start three processes: one ends at SIGTERM, one ignores it and one stops itself."""
    scripts = {0: "echo > 0; exec sleep 100", 1: "trap '' TERM; echo > 1; sleep 100", 2: "echo > 2; kill -STOP $$"}
    context = SubprocessContext(
        "rank",
        "sh",
        args={rank: ("-c", f"cd {tmp_path}; {script}") for rank, script in scripts.items()},
        envs={rank: {} for rank in scripts},
        logs_specs=DefaultLogsSpecs(),
    )
    context.start()
    while not all((tmp_path / f"{rank}").exists() for rank in scripts):
        os.sched_yield()
    while process_state(context.pids()[2]) != "is stopped":
        os.sched_yield()
    yield context
    context.close(signal.SIGKILL)


def test_ranks_that_do_not_end_are_killed(ranks: SubprocessContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_agent, "_END_SECONDS", 0.3)
    agent = QuickAgent.__new__(QuickAgent)
    agent._pcontext = ranks
    agent._end_ranks()
    assert agent._exit_codes() == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGKILL]


def test_torchrun_uses_the_agent_and_formats_exceptions_without_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LocalElasticAgent", launcher.LocalElasticAgent)
    handlers = logging.getLogger("torch.distributed").handlers
    handler = next(each for each in handlers if isinstance(each.formatter, TorchLogsFormatter))
    monkeypatch.setattr(handler, "filters", [])
    elastic_agent.install()
    assert launcher.LocalElasticAgent is QuickAgent
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # importing it fails
    try:
        raise KeyError("culprit")
    except KeyError:
        record = logging.LogRecord("torch.distributed.x", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    assert handler.filter(record)
    assert "KeyError: 'culprit'" in handler.format(record)
