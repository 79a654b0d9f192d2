"""Time to build a program of every schedule, including its transfers and verification.

    uv run python packages/d9d-pipeline/benchmarks/build_program.py

Prints one JSON line per schedule. The minimum over all repetitions is the cost of the work; the median shows how busy
the machine is. Only the last column uses the cache of `build`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from d9d_pipeline import (
    DualPipeV,
    ForwardOnly,
    GPipe,
    Interleaved,
    LoopedBreadthFirst,
    OneForwardOneBackward,
    Schedule,
    ZeroBubble1P,
    ZeroBubbleV,
    build,
    verify,
)
from d9d_pipeline.actions import Compute
from d9d_pipeline.schedule import StagePlacement
from d9d_pipeline.schedules import v_shaped

SCHEDULES: list[tuple[Schedule, float]] = [  # with the target in milliseconds for p = 16, m = 64
    (OneForwardOneBackward(), 20.0),
    (ForwardOnly(), 100.0),
    (GPipe(), 100.0),
    (LoopedBreadthFirst(2), 100.0),
    (Interleaved(2), 100.0),
    (ZeroBubble1P(), 100.0),
    (ZeroBubble1P(2), 100.0),
    (ZeroBubbleV(), 100.0),
    (DualPipeV(), 100.0),
]


class Uncached(Schedule):
    """Wrapper that does not compare by value, so that `build` does not cache the schedule's program."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.stages_per_rank: int = schedule.stages_per_rank
        self.placement: StagePlacement = schedule.placement

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> list[Compute]:
        """Return the actions of the wrapped schedule."""
        return list(self._schedule.actions(rank, num_ranks, num_microbatches))


def milliseconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Return the milliseconds of each call, with empty caches."""
    taken = []
    for _ in range(repeats):
        v_shaped._simulate_ranks.cache_clear()  # the other cache
        start = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - start))
    return taken


def measure(schedule: Schedule, bound: float, num_ranks: int, num_microbatches: int, repeats: int) -> dict[str, Any]:
    """Return the measurements of one schedule."""

    def build_program(which: Schedule) -> Any:
        return build(which, num_ranks=num_ranks, num_microbatches=num_microbatches)

    program = build_program(schedule)
    whole = milliseconds(lambda: build_program(Uncached(schedule)), repeats)
    return {
        "schedule": repr(schedule),
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "num_actions": sum(map(len, program.ranks)),
        "build_ms": round(min(whole), 1),
        "build_median_ms": round(statistics.median(whole), 1),
        "bound_ms": bound,
        "of_which_verify_ms": round(min(milliseconds(lambda: verify(program), repeats)), 1),
        "build_again_ms": round(min(milliseconds(lambda: build_program(schedule), repeats)), 4),
    }


def main() -> None:
    """Parse the arguments, run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", type=int, default=16)
    parser.add_argument("--num-microbatches", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    for schedule, bound in SCHEDULES:
        shape = (arguments.num_ranks, arguments.num_microbatches)
        print(json.dumps(measure(schedule, bound, *shape, arguments.repeats)))


if __name__ == "__main__":
    main()
