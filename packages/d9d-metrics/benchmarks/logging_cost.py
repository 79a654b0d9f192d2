"""Cost of metrics and trackers: a sync of 32 scalars relative to one all-reduce, and logging on the step's thread.

    uv run python packages/d9d-metrics/benchmarks/logging_cost.py

Prints JSON. `sync`: time to reduce 32 metrics over 2 ranks, divided by the time to stack 32 float64 numbers, all-reduce
and unbind them, measured in alternating pairs. `collect_microseconds`: time of `MetricCollector.collect` on the step's
thread. `log_microseconds`: time of `log` of 32 values on that thread, for a tracker that works, one that fails and one
that hangs, each with a spool on disk.
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from d9d_dist.testing import run_ranks
from d9d_metrics import BackgroundTracker, JsonlTracker, Max, Metric, MetricCollector, Sum, Tracker
from d9d_metrics.sync import MetricSync

NUM_SCALARS = 32


def seconds_of(function: Callable[[], object]) -> float:
    """Return the duration of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def race(pairs: int, num_extremes: int) -> tuple[list[float], list[float]]:
    """Return the seconds of `MetricSync` and of the all-reduce."""
    dist.init_process_group("gloo")
    kinds: list[type[Sum] | type[Max]] = [Max] * num_extremes + [Sum] * (NUM_SCALARS - num_extremes)
    metrics: dict[str, Metric] = {str(index): kind() for index, kind in enumerate(kinds)}
    for metric in metrics.values():
        metric.update(1.0)  # ty: ignore[missing-attribute]
    scalars = [torch.ones((), dtype=torch.float64) for _ in range(NUM_SCALARS)]
    sync = MetricSync(metrics, dist.group.WORLD)

    def theirs() -> None:
        flat = torch.stack(scalars)
        dist.all_reduce(flat)
        flat.unbind()

    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(pairs):
        for times, function in zip(taken, (lambda: sync.start().wait(), theirs), strict=True):
            dist.barrier()
            times.append(seconds_of(function))
    return taken


def collect(repeats: int) -> float:
    """Return the microseconds of `collect` on the step's thread."""
    dist.init_process_group("gloo")
    metrics = {str(index): Sum() for index in range(NUM_SCALARS)}
    times = []
    with MetricCollector(metrics, dist.group.WORLD, lambda step, values: None) as collector:
        for step in range(repeats):
            times.append(seconds_of(lambda step=step: collector.collect(step)))
            time.sleep(0.002)
    return 1e6 * statistics.median(times)


def hanging() -> Tracker:
    """Hang forever."""
    threading.Event().wait()
    raise AssertionError


def down() -> Tracker:
    """Raise a connection error."""
    raise ConnectionError


def log(open_tracker: Callable[[], Any], repeats: int) -> float:
    """Return the microseconds of `log` on the step's thread."""
    values = {f"value {index}": index / 7 for index in range(NUM_SCALARS)}
    with tempfile.TemporaryDirectory() as folder:
        tracker = BackgroundTracker(open_tracker, name="benchmark", spool=Path(folder) / "spool", close_seconds=0.1)
        times = []
        for step in range(repeats):
            times.append(seconds_of(lambda step=step: tracker.log(step, values)))
            time.sleep(0.001)
        tracker.close()
    return 1e6 * statistics.median(times)


def ratio(numerators: list[float], denominators: list[float]) -> dict[str, Any]:
    """Return the median ratio of pairs with its bootstrapped 95 % confidence interval."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    draws = random.Random(0)  # noqa: S311
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(1000))
    low, high = medians[25], medians[-25]
    of_medians = statistics.median(numerators) / statistics.median(denominators)
    return {
        "median": round(statistics.median(ratios), 3),
        "low": round(low, 3),
        "high": round(high, 3),
        "of_medians": round(of_medians, 3),
        "all_reduce_microseconds": round(1e6 * statistics.median(denominators), 1),
    }


def main() -> None:
    """Run the benchmark and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=400)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"sync": {}}
    for num_extremes in (0, NUM_SCALARS // 2):
        raced = run_ranks(race, arguments.pairs, num_extremes, world_size=2)[0]
        result["sync"][f"{num_extremes} maxima"] = ratio(*raced)
    result["collect_microseconds"] = round(run_ranks(collect, arguments.repeats, world_size=2)[0], 1)
    with tempfile.TemporaryDirectory() as folder:
        trackers = {"well": lambda: JsonlTracker(Path(folder) / "metrics.jsonl"), "down": down, "hangs": hanging}
        result["log_microseconds"] = {
            name: round(log(tracker, arguments.repeats), 1) for name, tracker in trackers.items()
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
