from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

from d9d_dist import DistributedContext, MeshConfig
from d9d_dist.testing import run_ranks
from d9d_loop.resilience import HealthConfig, StragglerWatch, straggler_watch

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


def test_a_rank_that_waits_for_data_is_named_once_after_a_window_of_checks() -> None:
    for found in run_ranks(_reports, world_size=3):
        # The second period has two checks only.
        assert [step for step, texts in found.items() if texts] == [6]
        (text,) = found[6]
        assert text.startswith("slow data of rank 2 (cpu of ")
        assert text.endswith("): 200.0 ms, 200.0 times the median.")


def test_nothing_is_measured_unless_configured(ctx: DistributedContext) -> None:
    watch = StragglerWatch(HealthConfig(matrix_size=8, memory_mib=1), ctx)
    assert watch.next(iter([[7]])) == [7]
    assert watch.check(1000) == []
