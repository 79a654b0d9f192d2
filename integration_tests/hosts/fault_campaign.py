"""Random faults in a training job over three hosts: no wrong bits, always resumable, and every culprit named.

    PYTHONPATH=integration_tests python -m hosts.fault_campaign --count 12 --seed 1

Needs what `Hosts` needs. For each layout, a job without faults gives the expected bits of each step. Then faults strike
the same job, one after another, at random steps. Agents that end are started again, as by a scheduler, and hosts
without power are rebooted: their memory is empty, their disk has its files. Prints one line of JSON per fault.
"""

import argparse
import json
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import final

from d9d_loop import warm_rank
from d9d_loop.testing import parse_layout
from hosts.elastic_job import IMPATIENT, ElasticJob, Settings, Step, differing_steps
from hosts.hosts import Hosts

LAYOUTS = (
    "dp_replicate=6",
    "dp_shard=6",
    "dp_replicate=3,dp_shard=2,ep=2",
    "dp_shard=3,tp=2",
    "pp=3,dp_shard=2,microbatch=2",
    "dp_shard=3,cp_shard=2",
)
FAULTS = (
    "rank killed",
    "rank stopped",
    "host cut off",
    "host without power",
    "host of the rendezvous without power",
    "disk of a host lost",
    "memory of a host lost",
    "two ranks of a host killed",
    "rank killed in a recovery",
)
_NUM_HOSTS = 3
_STEPS_PER_FAULT = 8
_RECOVERY_SECONDS = 240.0


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a fault.

    Attributes:
        layout: Layout of the job.
        fault: One of `FAULTS`.
        seconds: Time from the fault to the end of the first step after it; `None` if the job did not resume.
        lost_steps: Number of completed steps that were repeated.
        is_named: True if a log of another rank or agent names the culprit.
        wrong_steps: Steps after the fault whose loss or gradient norm differ from those without faults.
    """

    layout: str
    fault: str
    seconds: float | None
    lost_steps: int
    is_named: bool
    wrong_steps: Sequence[int]

    @property
    def is_good(self) -> bool:
        """True if the job resumed with the same bits, and the culprit is named."""
        return self.seconds is not None and self.is_named and not self.wrong_steps


def campaign(
    layout: str, faults: Sequence[str], seed: int, *, num_hosts: int = _NUM_HOSTS, step_seconds: float = 10.0
) -> Iterator[Outcome]:
    """Run a job in which faults strike one after another; yield their outcomes.

    Call it in a process that has imported what ranks need, and that has one thread: agents are forked from it.
    """
    warm_rank.import_for(["-m", "hosts.elastic_job"])
    draws = random.Random(seed)  # noqa: S311
    with Hosts(num_hosts, sysctls=IMPATIENT) as hosts:
        checkpoint = {"every": 7, "memory_every": 1, "local_every": 3, "local_folder": hosts.local, "replicas": 1}
        sections = {"checkpoint": checkpoint}
        steps = _STEPS_PER_FAULT * len(faults) + _STEPS_PER_FAULT
        ranks_per_host = parse_layout(layout).world_size // num_hosts
        settings = Settings(layout, steps, ranks_per_host, (num_hosts, num_hosts), step_seconds, sections)
        with ElasticJob(hosts, "calm", settings) as job:
            _wait(job, lambda: len(job.steps()) == steps)
            calm = job.steps()
        with ElasticJob(hosts, "faults", settings) as job:
            for number, fault in enumerate(faults):
                outcome = _Strike(hosts, job, draws, fault).run(number * _STEPS_PER_FAULT + draws.randint(2, 5))
                wrong = differing_steps(job.steps(), calm)
                yield Outcome(layout, fault, *outcome, wrong_steps=wrong)
                if outcome[0] is None:
                    print(*(f"host{host}:\n{text[-3000:]}" for host, text in job.errors().items()), file=sys.stderr)
                    return


@final
class _Strike:
    """A fault: strikes, repairs what a person or a scheduler repairs, and waits for the first step after it."""

    def __init__(self, hosts: Hosts, job: ElasticJob, draws: random.Random, fault: str) -> None:
        self._hosts, self._job, self._draws, self._fault = hosts, job, draws, fault
        self._culprits: list[str] = []
        self._struck = 0.0

    def run(self, step: int) -> tuple[float | None, int, bool]:
        """Strike some time after a step; return the seconds to the next step, the lost steps, and if it is named."""
        job = self._job
        job.allow(step + 3)
        _wait(job, lambda: any(each.step >= step for each in job.steps()))
        time.sleep(self._draws.uniform(0, 0.3))
        before = {host: len(text) for host, text in job.errors().items()}
        start = time.monotonic()
        try:
            self._strike()
            self._struck = time.monotonic()
            job.allow(step + _STEPS_PER_FAULT)
            _wait(job, lambda: self._first_after(start) is not None)
        except TimeoutError:
            return None, 0, self._is_named(before)
        last, first = self._first_after(start) or (None, None)
        assert last is not None
        assert first is not None
        return round(first.seconds - start, 2), last.step - first.step + 1, self._is_named(before)

    def _first_after(self, start: float) -> tuple[Step, Step] | None:
        """Return the last step of the life in which the fault struck, and the first one of the last life."""
        steps = self._job.steps()
        old = [each for each in steps if each.seconds < start][-1].life
        last = next(each for each in reversed(steps) if each.life == old)
        new = [each for each in steps if each.life == steps[-1].life]
        is_recovered = new[0].life != old and new[0].seconds > self._struck
        return (last, new[0]) if is_recovered else None

    def _is_named(self, before: dict[int, int]) -> bool:
        written = "\n".join(text[before.get(host, 0) :] for host, text in self._job.errors().items())
        return any(re.search(culprit, written) is not None for culprit in self._culprits)

    def _strike(self) -> None:
        match self._fault:
            case "host cut off":
                self._cut(self._draws.randrange(1, len(self._hosts.names)))
            case "host without power":
                self._power_off(self._draws.randrange(1, len(self._hosts.names)))
            case "host of the rendezvous without power":
                self._power_off(0)
            case _:
                self._strike_rank()

    def _strike_rank(self) -> None:
        hosts, job, draws = self._hosts, self._job, self._draws
        rank = draws.choice(sorted(job.processes()))
        host, _ = job.processes()[rank]
        self._culprits = [rf"[Rr]ank {rank} (failed|is missing|was|on)", rf"This rank failed first.*rank {rank}\b"]
        match self._fault:
            case "rank killed":
                job.signal(rank, signal.SIGKILL)
            case "rank stopped":
                job.signal(rank, signal.SIGSTOP)
            case "disk of a host lost":
                hosts.run(host, "sh", "-c", f"until rm -rf {hosts.local}/*; do :; done")  # ranks write to it
                job.signal(rank, signal.SIGKILL)
            case "memory of a host lost":
                job.signal(rank, signal.SIGKILL)
                hosts.run(host, "sh", "-c", "rm -rf /dev/shm/d9d-*")
            case "two ranks of a host killed":
                pair = [each for each, (place, _) in job.processes().items() if place == host]
                for each in pair:
                    job.signal(each, signal.SIGKILL)
                self._culprits += [rf"[Rr]anks? {each}\b.*(failed|missing|answer)" for each in pair]
                self._culprits.append(rf"host{host}\b.* not answer")
            case "rank killed in a recovery":
                old = job.processes()
                job.signal(rank, signal.SIGKILL)
                another = draws.choice(sorted(job.processes()))
                _wait(job, lambda: job.processes()[another] != old[another])
                time.sleep(draws.uniform(0, 1.5))
                job.signal(another, signal.SIGKILL)

    def _cut(self, host: int) -> None:
        """Cut a host off until the others have noticed."""
        self._culprits = [rf"host{host}\b.*(down or cut off|not answer)"]
        self._hosts.cut(host)
        logs = self._job.errors()
        before = {each: len(text) for each, text in logs.items()}
        _wait(self._job, lambda: self._is_named(before))
        self._hosts.mend(host)

    def _power_off(self, host: int) -> None:
        self._culprits = [rf"host{host}\b.*(down|not answer)", rf"(torchrun|rank 0) on host{host}:\d+ hosts"]
        self._hosts.power_off(host)
        logs = self._job.errors()
        before = {each: len(text) for each, text in logs.items()}
        self._job.is_off.add(host)
        _wait(self._job, lambda: self._is_named(before))
        self._hosts.reboot(host)
        self._job.is_off.remove(host)


def _wait(job: ElasticJob, is_true: Callable[[], bool]) -> None:
    """Wait for a condition, and start agents again that have ended. Raises `TimeoutError`."""
    deadline = time.monotonic() + _RECOVERY_SECONDS
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no success within {_RECOVERY_SECONDS} s")
        job.start_missing()
        time.sleep(0.05)


def main() -> None:
    """Parse the arguments, and run campaigns until all faults have struck or the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="number of faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults-per-job", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no job after this time")
    parser.add_argument("--hosts", type=int, default=_NUM_HOSTS)
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--faults", nargs="*", default=FAULTS)
    arguments = parser.parse_args()
    draws, start, outcomes = random.Random(arguments.seed), time.monotonic(), list[Outcome]()  # noqa: S311
    planned = [arguments.faults[number % len(arguments.faults)] for number in range(arguments.count)]
    draws.shuffle(planned)
    for job, first in enumerate(range(0, arguments.count, arguments.faults_per_job)):
        if time.monotonic() - start > arguments.seconds:
            break
        layout = arguments.layouts[(job + arguments.seed) % len(arguments.layouts)]
        faults, seed = planned[first : first + arguments.faults_per_job], draws.randrange(1 << 30)
        for outcome in campaign(layout, faults, seed, num_hosts=arguments.hosts):
            outcomes.append(outcome)
            print(json.dumps(asdict(outcome)), flush=True)
    times = [each.seconds for each in outcomes if each.seconds is not None]
    summary = {
        "faults": len(outcomes),
        "good": sum(each.is_good for each in outcomes),
        "unresumable": sum(each.seconds is None for each in outcomes),
        "wrong": sum(bool(each.wrong_steps) for each in outcomes),
        "unnamed": sum(not each.is_named for each in outcomes),
        "median_seconds": median(times) if times else None,
        "most_lost_steps": max((each.lost_steps for each in outcomes), default=0),
    }
    print(json.dumps(summary))
    sys.exit(summary["good"] < summary["faults"])


if __name__ == "__main__":
    main()
