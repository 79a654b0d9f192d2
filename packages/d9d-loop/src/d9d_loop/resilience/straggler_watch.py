"""Watch for ranks that become slow while a job trains.

A step takes equally long on all ranks, because each waits for the slowest one in collectives. So the time of a step
does not show which rank is slow. The watch repeats the health check between steps, where ranks do not wait for each
other, and adds up the time that each rank waits for its data.
"""

import os
import time
from collections.abc import Iterator
from typing import Any, final

from d9d_dist import DistributedContext, gather_json
from d9d_loop.resilience.health_check import RankHealth, check_health
from d9d_loop.resilience.node_files import NodeFile, read_node_file, write_node_file
from d9d_loop.resilience.resilience_config import HealthConfig


@final
class StragglerWatch:
    """Watch that names ranks with slow compute, memory, links or data in several checks in a row.

    Does nothing unless `config.every` is set and the check is enabled.
    """

    def __init__(self, config: HealthConfig, ctx: DistributedContext) -> None:
        self._config, self._ctx = config, ctx
        self._every = config.every if config.enabled else None
        self._num_slow: dict[tuple[str, int], int] = {}
        self._slow: RankHealth | None = None
        self._num_steps, self._data_seconds, self._since = 0, 0.0, time.perf_counter()

    def next(self, steps: Iterator[list[Any]]) -> list[Any]:
        """Return the next item of a loader, and add the waiting time to this rank's total."""
        if self._every is None:
            return next(steps)
        start = time.perf_counter()
        batches = next(steps)
        self._data_seconds += time.perf_counter() - start
        self._num_steps += 1
        return batches

    def is_due(self, step: int) -> bool:
        """Return True if the health check is repeated after a step."""
        return self._every is not None and step % self._every == 0

    def check(self, step: int) -> list[str]:
        """Repeat the health check if it is due after a step; describe the ranks that have become stragglers.

        A rank is a straggler when the same part has been slow in `config.window` checks in a row. It is described once,
        and again only after a check in which it was not slow. Issues the collectives of `check_health`, and
        synchronizes host and device.

        Raises:
            HealthError: On all ranks, if a device or a link of any rank fails or gives wrong values.
        """
        if not self.is_due(step):
            return []
        steps = max(self._num_steps, 1)
        data_seconds, step_seconds = self._data_seconds / steps, (time.perf_counter() - self._since) / steps
        report = check_health(self._config, ctx=self._ctx, data_seconds=data_seconds, step_seconds=step_seconds)
        assert report is not None
        self._num_slow = {part: self._num_slow.get(part, 0) + 1 for part in report.slow}
        is_slow = [
            rank for (part, rank), times in self._num_slow.items() if part != "link" and times >= self._config.window
        ]
        self._slow = report.ranks[is_slow[0]] if is_slow else None
        self._num_steps, self._data_seconds, self._since = 0, 0.0, time.perf_counter()
        return [text for part, text in report.slow.items() if self._num_slow[part] == self._config.window]

    def ask_to_replace(self) -> str | None:
        """Ask the agent to replace the host of a straggler when its ranks have ended, if a spare host waits.

        Call it after a check that was due. Does nothing unless `config.replace` is set. For a slow link, neither of its
        two hosts is replaced. Collective if the check found a straggler: an all-gather.

        Returns:
            The host to replace: all ranks must then save and exit with `ExitCode.STOPPED`. `None` if no host is
            replaced.
        """
        slow = self._slow
        if not self._config.replace or slow is None:
            return None
        if not all(gather_json(read_node_file(NodeFile.SPARE_HOST) is not None)):
            if self._ctx.is_main_process:
                print(f"d9d: {slow.host} is slow, but no spare host waits that can replace it")
            return None
        ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        if slow.rank // ranks_per_node == self._ctx.rank // ranks_per_node:
            write_node_file(NodeFile.SLOW_HOST, "slow")
        write_node_file(NodeFile.REPLACING, "replacing")
        return slow.host
