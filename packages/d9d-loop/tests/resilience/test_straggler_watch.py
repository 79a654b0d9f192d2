import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from pydantic import ValidationError

from d9d_dist import DistributedContext, MeshConfig
from d9d_dist.failures.first_failure import NODE_FOLDER
from d9d_dist.testing import run_ranks
from d9d_loop.resilience import HealthConfig, HealthReport, StragglerWatch, check_health, health_check, straggler_watch
from d9d_loop.resilience.node_files import NodeFile, take_slow_host, write_node_file

_STEPS, _STEP_SECONDS = 20, 1.0


class _Clock:
    """Clock that the test advances, because a busy machine makes real waits arbitrary."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def loader(self, slow: list[int]) -> Iterator[list[int]]:
        """Yield a batch for each step, after a wait for data in some steps."""
        for step in range(1, _STEPS + 1):
            self.now += 0.2 * _STEP_SECONDS if step in slow else 0.001
            yield [step]


def _reports() -> dict[int, list[str]]:
    """Train on three ranks, of which the last one waits for data in two periods."""
    config = HealthConfig(matrix_size=8, memory_mib=1, message_mib=1, every=2, window=3)
    clock = _Clock()
    with (
        mock.patch.object(straggler_watch, "time", SimpleNamespace(perf_counter=clock.perf_counter)),
        MeshConfig(data_parallel_shard=-1).build() as ctx,
    ):
        slow = [*range(1, 11), *range(15, 19)] if ctx.rank == 2 else []
        watch, steps = StragglerWatch(config, ctx), clock.loader(slow)
        found: dict[int, list[str]] = {}
        for step in range(1, _STEPS + 1):
            assert watch.next(steps) == [step]
            clock.now += _STEP_SECONDS
            found[step] = [text for text in watch.check(step) if text.startswith("slow data")]
        return found


def test_a_rank_that_waits_for_data_is_reported_once_after_a_window_of_checks() -> None:
    for found in run_ranks(_reports, world_size=3):
        # The second period has two checks only.
        assert [step for step, texts in found.items() if texts] == [6]
        (text,) = found[6]
        assert text.startswith("slow data of rank 2 (cpu of ")
        assert text.endswith("): 200.0 ms, 200.0 times the median.")


def _replaced(folder: Path) -> list[str | None]:
    """Check three ranks four times; the last one is slow, and a spare host waits from the third check on."""
    config = HealthConfig(matrix_size=8, memory_mib=1, message_mib=1, every=1, window=2, replace=True)
    clock = _Clock()
    with (
        mock.patch.object(straggler_watch, "time", SimpleNamespace(perf_counter=clock.perf_counter)),
        MeshConfig(data_parallel_shard=-1).build() as ctx,
        mock.patch.dict(os.environ, {NODE_FOLDER: str(folder / str(ctx.rank)), "LOCAL_WORLD_SIZE": "1"}),
        # Ranks of one machine are equally slow in everything else, but not on a busy one.
        mock.patch.object(straggler_watch, "check_health", _only_data),
        mock.patch.object(socket, "gethostname", return_value=f"host{ctx.rank}"),
    ):
        Path(os.environ[NODE_FOLDER]).mkdir()
        watch, steps = StragglerWatch(config, ctx), clock.loader([1, 2, 3] if ctx.rank == 2 else [])
        found: list[str | None] = []
        for step in range(1, 4):
            watch.next(steps)
            clock.now += _STEP_SECONDS
            write_node_file(NodeFile.SPARE_HOST, "waits" if step == 3 else None)
            watch.check(step)
            found.append(watch.ask_to_replace())
        return [*found, "asks" if take_slow_host() else None]


def _only_data(*arguments: Any, **named: Any) -> HealthReport:
    report = check_health(*arguments, **named)
    assert report is not None
    return replace(report, slow={key: text for key, text in report.slow.items() if key[0] == "data"})


def test_a_slow_host_is_replaced_once_a_spare_one_waits(tmp_path: Path) -> None:
    found = run_ranks(_replaced, tmp_path, world_size=3)
    assert found == [[None, None, "host2", None], [None, None, "host2", None], [None, None, "host2", "asks"]]


def test_hosts_are_replaced_only_if_checks_are_repeated() -> None:
    with pytest.raises(ValidationError, match="replace = true needs repeated checks"):
        HealthConfig(replace=True)


def test_nothing_is_measured_unless_configured(ctx: DistributedContext) -> None:
    watch = StragglerWatch(HealthConfig(matrix_size=8, memory_mib=1), ctx)
    assert watch.next(iter([[7]])) == [7]
    assert watch.check(1000) == []


def test_a_single_slow_check_is_not_reported(
    ctx: DistributedContext, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    watch = StragglerWatch(HealthConfig(matrix_size=8, memory_mib=1, every=1, window=2), ctx)
    slow = {("compute", 0): "slow compute of rank 0: 31.0 ms."}
    with mock.patch.object(health_check, "find_slow", side_effect=[slow, {}, slow, slow]):
        assert [watch.check(step) for step in range(1, 5)] == [[], [], [], list(slow.values())]
    assert not capsys.readouterr().out
    assert not caplog.records
