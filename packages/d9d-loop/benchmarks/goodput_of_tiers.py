"""Goodput of a job with checkpoints in several tiers, simulated failure by failure.

    uv run python packages/d9d-loop/benchmarks/goodput_of_tiers.py
    uv run python packages/d9d-loop/benchmarks/goodput_of_tiers.py --measured campaign.jsonl

Prints JSON. Each tier saves at its own period. A save stops the job for its stall, and is complete after its delay.
Failures arrive at random (Poisson). A failure ends a process, loses a host, or loses neighbors on the ring of replicas,
permanently (`hosts`) or until power returns (`power`). The job resumes from the newest complete step of the tiers that
survive the failure, after detection, restart and the load. Goodput is the fraction of the time spent on steps that are
kept.

Failure rates are published: a mean time to failure of 7.9 h at 1,024 devices and 1.8 h at 16,384 (Kokolis et al. 2024,
https://arxiv.org/abs/2410.21680); 419 unexpected interruptions in 54 days on 16,384 devices (Llama 3, 2024,
https://arxiv.org/abs/2407.21783). The rate per device at 100,000 devices is assumed to be the same as at 16,384.
`check` compares the simulation of one tier with the formula of the planner. `--measured` takes the times from a fault
to the next step from the output of `recovery_time.py` or `fault_campaign.py` in `integration_tests/hosts`, whose jobs
are small.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from d9d_loop.planning import goodput

_HOUR = 3600.0
_CASES = {
    "1,024 devices, MTTF 7.9 h": 7.9 * _HOUR,
    "16,384 devices, 419 in 54 days": 54 * 24 * _HOUR / 419,
    "16,384 devices, MTTF 1.8 h": 1.8 * _HOUR,
    "100,000 devices, MTTF 0.3 h": 1.8 * _HOUR * 16384 / 100_000,
}
# Faults of the campaign by the kind of failure; faults that lose several hosts are not measured.
_MEASURED = {
    "process": ("rank killed", "rank stopped", "two ranks of a host killed", "rank killed in a recovery"),
    "host": ("host without power", "host cut off", "memory of a host lost"),
}


@dataclass(frozen=True, slots=True)
class Tier:
    """Tier of checkpoints. All times are in seconds.

    Attributes:
        name: Name in the results.
        period: Time between saves.
        stall: Time that a save stops the job.
        delay: Time until a save is complete.
        load: Time to load.
        survives: Kinds of failures that leave the tier usable.
    """

    name: str
    period: float
    stall: float
    delay: float
    load: float
    survives: Sequence[str]


def simulate(
    tiers: Sequence[Tier],
    *,
    mttf: float,
    kinds: dict[str, float],
    restart: dict[str, float],
    failures: int,
    seed: int = 0,
) -> float:
    """Return the goodput over many failures. `restart` is the time from a failure of each kind to the load."""
    draws = random.Random(seed)  # noqa: S311
    slowdown = 1 + sum(tier.stall / tier.period for tier in tiers)
    saved: dict[str, float] = {}  # by tier, the progress of its newest complete save
    progress = total = 0.0
    for _ in range(failures):
        worked = draws.expovariate(1 / mttf)
        reached = progress + worked / slowdown
        kind = draws.choices(list(kinds), list(kinds.values()))[0]
        for tier in tiers:
            newest = max(0.0, reached - tier.delay) // tier.period * tier.period
            if newest > progress:
                saved[tier.name] = newest
            if kind not in tier.survives:
                saved.pop(tier.name, None)
        # The initial weights are at progress 0, and load as slowly as the slowest tier. Of equal steps, use the first
        # tier, which is the fastest.
        left = [(saved[tier.name], -rank, tier.load) for rank, tier in enumerate(tiers) if tier.name in saved]
        progress, _, load = max(left, default=(0.0, 0, max(tier.load for tier in tiers)))
        saved = {name: min(each, progress) for name, each in saved.items()}
        total += worked + restart[kind] + load
    return progress / total


def _measured(path: Path) -> dict[str, float]:
    """Return the median time of recovery after each kind of failure that was measured, in seconds."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    outcomes = [each for each in lines if each.get("seconds") is not None]
    found: dict[str, float] = {}
    for kind, faults in _MEASURED.items():
        if times := [each["seconds"] for each in outcomes if each["fault"] in faults]:
            found[kind] = median(times)
    return found


def main() -> None:
    """Parse the arguments, simulate and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=10.0, help="seconds per step")
    parser.add_argument("--gigabytes", type=float, default=35.0, help="state of a host in GB")
    parser.add_argument("--memory-stall", type=float, default=0.03, help="seconds that a save in memory stops the job")
    parser.add_argument("--network", type=float, default=10.0, help="GB/s of a host to a peer")
    parser.add_argument("--disk", type=float, default=2.0, help="GB/s of a host's disk")
    parser.add_argument("--store", type=float, default=0.25, help="GB/s of a host to the shared folder or object store")
    parser.add_argument("--restart", type=float, default=110.0, help="seconds of detection and restart")
    parser.add_argument(
        "--measured", type=Path, help="output of recovery_time.py or fault_campaign.py, in place of --restart"
    )
    parser.add_argument("--failures", type=int, default=100_000)
    arguments = parser.parse_args()
    size, stall = arguments.gigabytes, arguments.memory_stall
    in_memory = Tier(
        "memory", arguments.step, stall, size / arguments.network, size / arguments.network, ("process", "host")
    )
    on_disk = Tier(
        "disk", 30 * arguments.step, stall, size / arguments.disk, size / arguments.disk, ("process", "host", "power")
    )
    shared = Tier(
        "global", 0, stall, size / arguments.store, size / arguments.store, ("process", "host", "power", "hosts")
    )
    kinds = {"process": 0.45, "host": 0.50, "power": 0.03, "hosts": 0.02}
    restart = dict.fromkeys(kinds, arguments.restart)
    if arguments.measured is not None:
        restart |= _measured(arguments.measured)
    results: dict[str, dict[str, float]] = {}
    for case, mttf in _CASES.items():
        # The global tier cannot save more often than a save takes; the optimal period is Young's formula.
        period = max(shared.delay, (2 * stall * mttf) ** 0.5)
        everything = [in_memory, on_disk, replace(shared, period=period)]
        without = {f"without {gone.name}": [tier for tier in everything if tier is not gone] for gone in everything[:2]}
        ways = {"all tiers": everything, **without, "global only": everything[2:]}
        results[case] = {
            name: round(simulate(tiers, mttf=mttf, kinds=kinds, restart=restart, failures=arguments.failures), 4)
            for name, tiers in ways.items()
        }
    only = Tier("global", 600.0, 5.0, 0.0, 0.0, ("process",))
    formula = goodput(1, failures_per_device_day=86400 / (1.8 * _HOUR), save_cost=5.0, restart=600.0)
    simulated = simulate(
        [replace(only, period=formula.save_seconds)],
        mttf=1.8 * _HOUR,
        kinds={"process": 1.0},
        restart={"process": 600.0},
        failures=arguments.failures,
    )
    check = {"formula": round(formula.fraction, 4), "simulated": round(simulated, 4)}
    print(
        json.dumps(
            {"inputs": vars(arguments), "kinds": kinds, "restart": restart, "goodput": results, "check": check},
            indent=2,
            default=str,
        )
    )


if __name__ == "__main__":
    main()
