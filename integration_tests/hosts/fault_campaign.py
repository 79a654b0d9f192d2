"""Random faults in training jobs over three hosts: values stay bitwise equal, jobs resume, and logs name the culprits.

    PYTHONPATH=integration_tests python -m hosts.fault_campaign --count 30 --seed 1 --seconds 420

Needs what `Hosts` needs. Each layout has one job, in which faults strike one after another at random steps. Agents that
end are started again, as by a scheduler, and hosts without power are rebooted: their memory is empty, their disk has
its files. A job without faults gives the expected bits of each step and of each checkpoint of the global tier, with all
parameters and the optimizer's state; `--references` keeps them for later campaigns. Prints one line of JSON per fault
and a summary; `--record` appends these lines to a file, and then summarizes the whole file.
"""

import argparse
import json
import math
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Self, final

from d9d_loop import warm_rank
from d9d_loop.testing import parse_layout
from d9d_state import CheckpointStore
from hosts.elastic_job import IMPATIENT, ElasticJob, Settings, Step
from hosts.hosts import Hosts

LAYOUTS = (
    "dp_replicate=6",
    "dp_shard=6",
    "dp_replicate=3,dp_shard=2,ep=2",
    "dp_shard=3,tp=2",
    "pp=3,dp_shard=2,microbatch=2",
    "dp_shard=3,cp_shard=2",
)
END = "end of the job"  # no fault: the bits of the last checkpoint
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
_STEPS_PER_FAULT = 4  # also the interval of the global tier
_RECOVERY_SECONDS = 240.0


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a fault.

    Attributes:
        layout: Layout of the job.
        fault: One of `FAULTS`.
        detection: Time from the fault to the first log that names the culprit, in seconds; `None` if no log names it.
        seconds: Time from the fault to the end of the first step after it; `None` if the job did not resume.
        lost_steps: Number of completed steps that were repeated.
        wrong_steps: Steps of the job, up to now, whose loss or gradient norm differ from those without faults.
        wrong_checkpoints: Steps of checkpoints, up to now, whose tensors differ from those without faults.
    """

    layout: str
    fault: str
    detection: float | None
    seconds: float | None
    lost_steps: int
    wrong_steps: Sequence[int] = ()
    wrong_checkpoints: Sequence[int] = ()

    @property
    def is_good(self) -> bool:
        """True if the job resumed bitwise, and a log names the culprit."""
        is_same = not self.wrong_steps and not self.wrong_checkpoints
        return self.seconds is not None and self.detection is not None and is_same


@final
@dataclass(frozen=True, slots=True)
class Bits:
    """Bits of a job: the values of each step, and the digests of the tensors of each checkpoint."""

    steps: dict[int, str]
    checkpoints: dict[int, str]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the bits of a job without faults that has run before."""
        found = json.loads(path.read_text(encoding="ascii"))
        return cls(*({int(step): text for step, text in found[name].items()} for name in ("steps", "checkpoints")))


def campaign(
    layout: str,
    faults: Sequence[str],
    seed: int,
    *,
    num_hosts: int = _NUM_HOSTS,
    step_seconds: float = 10.0,
    references: Path | None = None,
    seconds: float = math.inf,
) -> Iterator[Outcome]:
    """Run a job in which faults strike one after another; yield their outcomes.

    Call it in a process that has imported what ranks need, and that has one thread: agents are forked from it.

    Args:
        layout: Layout of the job.
        faults: Names of the faults, in their order.
        seed: Seed of the steps, ranks and hosts at which they strike.
        num_hosts: Number of hosts.
        step_seconds: Time limit of a step.
        references: Folder of the bits without faults; `None` computes them again.
        seconds: Time after which no fault strikes.
    """
    warm_rank.import_for(["-m", "hosts.elastic_job"])
    draws, start = random.Random(seed), time.monotonic()  # noqa: S311
    with Hosts(num_hosts, sysctls=IMPATIENT) as hosts:
        local = {"memory_every": 1, "local_every": 3, "local_folder": hosts.local, "replicas": 1}
        sections = {"checkpoint": {"every": _STEPS_PER_FAULT, "keep_last": None, **local}}
        steps = _STEPS_PER_FAULT * (len(faults) + 2)
        ranks_per_host = parse_layout(layout).world_size // num_hosts
        settings = Settings(layout, steps, ranks_per_host, (num_hosts, num_hosts), step_seconds, sections)
        expected = _expected(hosts, settings, references)
        with ElasticJob(hosts, "faults", settings) as job:
            for number, fault in enumerate(faults):
                if time.monotonic() - start > seconds:
                    break
                outcome = _Strike(hosts, job, draws, fault).run(number * _STEPS_PER_FAULT + draws.randint(1, 2))
                yield Outcome(layout, fault, *outcome, *wrong_bits(job.steps(), _folder(hosts, "faults"), expected))
                if outcome[1] is None:
                    print(*(f"host{host}:\n{text[-3000:]}" for host, text in job.errors().items()), file=sys.stderr)
                    return
            if job.steps():  # else the time was over before the first fault
                yield _end(hosts, job, layout, expected)


def _expected(hosts: Hosts, settings: Settings, references: Path | None) -> Bits:
    """Return the bits of the job without faults: those that are kept, or of a new job."""
    path = None if references is None else references / f"{settings.layout}.json"
    if path is not None and path.is_file() and len((kept := Bits.read(path)).steps) >= settings.steps:
        return kept
    with ElasticJob(hosts, "calm", settings) as job:
        _wait(job, (_folder(hosts, "calm") / f"step-{settings.steps:08}").is_dir)
        found = bits_of(job.steps(), _folder(hosts, "calm"))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(found)), encoding="ascii")
    return found


def _folder(hosts: Hosts, name: str) -> Path:
    """Return the folder of a job's checkpoints of the global tier."""
    return hosts.shared / name / "checkpoints"


def bits_of(steps: Sequence[Step], checkpoints: Path) -> Bits:
    """Return the bits of steps, and of the complete checkpoints of a folder."""
    complete = CheckpointStore(checkpoints).complete()
    digests = {each.step: sha256(repr(sorted(each.manifest.tensors.items())).encode()).hexdigest() for each in complete}
    return Bits({each.step: each.values for each in steps}, digests)


def wrong_bits(steps: Sequence[Step], checkpoints: Path, expected: Bits) -> tuple[list[int], list[int]]:
    """Return the steps, in each life of a job, and its checkpoints that differ from those without faults."""
    wrong = [each.step for each in steps if expected.steps[each.step] != each.values]
    found = bits_of(steps, checkpoints).checkpoints
    return wrong, [step for step, digest in found.items() if expected.checkpoints[step] != digest]


def _end(hosts: Hosts, job: ElasticJob, layout: str, expected: Bits) -> Outcome:
    """Train to the next checkpoint after all faults; return its bits as those of a last outcome."""
    start, last = time.monotonic(), job.steps()[-1].step
    step = min(set(expected.checkpoints) - set(range(last + 1)))
    job.allow(step + 1)
    _wait(job, (_folder(hosts, "faults") / f"step-{step:08}").is_dir)
    return Outcome(
        layout,
        END,
        0.0,
        round(time.monotonic() - start, 2),
        0,
        *wrong_bits(job.steps(), _folder(hosts, "faults"), expected),
    )


@final
class _Strike:
    """A fault: strikes, repairs what a person or a scheduler repairs, and waits for the first step after it."""

    def __init__(self, hosts: Hosts, job: ElasticJob, draws: random.Random, fault: str) -> None:
        self._hosts, self._job, self._draws, self._fault = hosts, job, draws, fault
        self._culprits: list[str] = []
        self._start, self._struck = 0.0, math.inf
        self._sizes: dict[int, int] = {}
        self._named_after: float | None = None

    def run(self, step: int) -> tuple[float | None, float | None, int]:
        """Strike some time after a step; return the seconds until it is named and to the next step, and lost steps."""
        job = self._job
        job.allow(step + 2)
        _wait(job, lambda: any(each.step >= step for each in job.steps()))
        time.sleep(self._draws.uniform(0, 0.3))
        self._sizes = job.log_sizes()
        self._start = time.monotonic()
        with suppress(TimeoutError):
            self._strike()
            self._struck = time.monotonic()
            job.allow(step + 2 + _STEPS_PER_FAULT)
            _wait(job, self._is_over)
        if (found := self._first_after()) is None:
            return self._named_after, None, 0
        last, first = found
        return self._named_after, round(first.seconds - self._start, 2), last.step - first.step + 1

    def _is_over(self) -> bool:
        self._is_named()
        return self._first_after() is not None

    def _first_after(self) -> tuple[Step, Step] | None:
        """Return the last step of the life in which the fault struck, and the first one of the last life."""
        steps = self._job.steps()
        old = [each for each in steps if each.seconds < self._start][-1].life
        last = next(each for each in reversed(steps) if each.life == old)
        new = [each for each in steps if each.life == steps[-1].life]
        is_recovered = new[0].life != old and new[0].seconds > self._struck
        return (last, new[0]) if is_recovered else None

    def _is_named(self) -> bool:
        """Return True if a log names the culprit; note when it did so first."""
        if self._named_after is None:
            written = "\n".join(self._job.errors(self._sizes).values())
            if any(re.search(culprit, written) is not None for culprit in self._culprits):
                self._named_after = round(time.monotonic() - self._start, 2)
        return self._named_after is not None

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
        _wait(self._job, self._is_named)
        self._hosts.mend(host)

    def _power_off(self, host: int) -> None:
        self._culprits = [rf"host{host}\b.*(down|not answer)", rf"(torchrun|rank 0) on host{host}:\d+ hosts"]
        self._hosts.power_off(host)
        self._job.is_off.add(host)
        _wait(self._job, self._is_named)
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


def summarize(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Return the numbers of faults by their outcome, and their times."""
    faults = [each for each in outcomes if each.fault != END]
    times = [each.seconds for each in faults if each.seconds is not None]
    return {
        "faults": len(faults),
        "layouts": len({each.layout for each in faults}),
        "good": sum(each.is_good for each in faults),
        "unresumable": sum(each.seconds is None for each in outcomes),
        "wrong": sum(bool(each.wrong_steps) or bool(each.wrong_checkpoints) for each in outcomes),
        "unnamed": sum(each.detection is None for each in faults),
        "median_detection": median(each.detection for each in faults if each.detection is not None) if times else None,
        "median_seconds": median(times) if times else None,
        "most_seconds": max(times, default=None),
        "most_lost_steps": max((each.lost_steps for each in faults), default=0),
    }


def main() -> None:
    """Parse the arguments, and run a job for each layout until all faults have struck or the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="number of faults, divided over the layouts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="let no fault strike after this time")
    parser.add_argument("--hosts", type=int, default=_NUM_HOSTS)
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--faults", nargs="*", default=FAULTS)
    parser.add_argument("--references", type=Path, help="folder that keeps the bits without faults")
    parser.add_argument("--record", type=Path, help="file to which the outcomes are appended")
    arguments = parser.parse_args()
    draws, start, outcomes = random.Random(arguments.seed), time.monotonic(), list[Outcome]()  # noqa: S311
    planned = [arguments.faults[number % len(arguments.faults)] for number in range(arguments.count)]
    draws.shuffle(planned)
    for number, layout in enumerate(arguments.layouts):
        end = start + arguments.seconds * (number + 1) / len(arguments.layouts)
        options = {"num_hosts": arguments.hosts, "references": arguments.references, "seconds": end - time.monotonic()}
        faults, seed = planned[number :: len(arguments.layouts)], draws.randrange(1 << 30)
        for outcome in campaign(layout, faults, seed, **options):
            outcomes.append(outcome)
            line = json.dumps(asdict(outcome))
            print(line, flush=True)
            if arguments.record is not None:
                with arguments.record.open("a", encoding="ascii") as file:
                    file.write(f"{line}\n")
    if arguments.record is not None:
        outcomes = [Outcome(**json.loads(line)) for line in arguments.record.read_text(encoding="ascii").splitlines()]
    print(json.dumps(summarize(outcomes)))
    sys.exit(not all(each.is_good for each in outcomes))


if __name__ == "__main__":
    main()
