"""`sbatch examples/clusters/slurm.sh` on a real Slurm: four nodes of two ranks, signals, requeues and lost nodes."""

import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster_example import ROOT, STEPS, copy_examples, read_losses
from slurm_cluster import NODES, SlurmCluster, why_no_slurm

from d9d_loop.resilience import ExitCode

_RANKS = ("--nodes=4", "--ntasks-per-node=2")
_ONE_RANK = ("--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1")
_SRUN, _RUN_NAME = "srun --kill-on-bad-exit=1 python ", '"pretrain-$SLURM_JOB_ID"'
_ACTIVE = ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING")


class Jobs:
    """Jobs of the batch script in a folder with smaller models."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        copy_examples(folder)
        self._variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def submit(self, *options: str, replace: tuple[str, str] = ("", "")) -> str:
        """Submit the batch script, or a copy of it with another text."""
        script = self.folder / "examples" / "clusters" / "slurm.sh"
        if replace[0]:
            text = script.read_text()
            assert text.count(replace[0]) == 1
            script = script.with_name("edited.sh")
            script.write_text(text.replace(*replace))
        words = ["sbatch", "--parsable", *_RANKS, *options, str(script)]
        return self.cluster.run(*words, cwd=self.folder, variables=self._variables).strip()

    def losses(self, job: str) -> dict[int, float]:
        return read_losses(self.folder, f"pretrain-{job}")

    def wait_for_step(self, job: str, step: int) -> None:
        self.wait(job, lambda: max(self.losses(job), default=0) >= step)

    def wait(self, job: str, is_done: Callable[[], bool]) -> None:
        try:
            self.cluster.wait(is_done, seconds=400)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.cluster.job(job)}\n{self.output(job)[-5000:]}") from None

    @contextmanager
    def stopped(self, job: str) -> Generator[list[str]]:
        """Stop the ranks of a job, which may be fast, until the block ends; yield their process IDs."""
        ranks = ("--full", f"^[^ ]*python examples/pretrain.py --run.name pretrain-{job} ")
        self.cluster.run("pkill", "-STOP", *ranks)
        yield self.cluster.run("pgrep", *ranks).split()
        self.cluster.run("pkill", "-CONT", *ranks)

    def end(self, job: str) -> dict[str, str]:
        """Wait until a job has ended, and return its fields."""
        self.wait(job, lambda: self.cluster.job(job)["JobState"] not in _ACTIVE)
        return dict(self.cluster.job(job))

    def output(self, job: str) -> str:
        files = sorted(self.folder.glob(f"slurm-{job}*.out"))
        return "".join(file.read_text() for file in files)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Generator[Jobs]:
    if (reason := why_no_slurm()) is not None:
        pytest.skip(reason)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    folder = tmp_path_factory.mktemp("slurm")
    cluster = SlurmCluster(folder, port=port)
    try:
        (folder / "jobs").mkdir()
        yield Jobs(cluster, folder / "jobs")
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def uninterrupted(jobs: Jobs) -> dict[int, float]:
    job = jobs.submit()
    ended = jobs.end(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), jobs.output(job)[-5000:]
    return jobs.losses(job)


def _requeued_by_slurm(jobs: Jobs, job: str) -> None:
    jobs.cluster.run("scontrol", "requeue", job)


def _lost_node(jobs: Jobs, job: str) -> None:
    """Set a node down; its slurmd answers, so Slurm takes it back (ReturnToService=2)."""
    jobs.cluster.run("scontrol", "update", f"nodename={NODES[-1]}", "state=down", "reason=test")


def _dead_daemon(jobs: Jobs, job: str) -> None:
    """Kill the slurmd of a node for longer than `SlurmdTimeout`, and start it again. Its ranks live on."""
    node = NODES[-1]
    jobs.cluster.run("pkill", "-KILL", "--full", f"slurmd -N {node}$")
    jobs.wait(job, lambda: "down" in jobs.cluster.run("sinfo", "-h", "-n", node, "-o", "%T"))
    jobs.cluster.run("slurmd", "-N", node)


def _signal(jobs: Jobs, job: str) -> None:
    jobs.cluster.run("scancel", "--signal=USR1", job)


def _time_limit(jobs: Jobs, job: str) -> None:
    """Set a limit of one to two minutes from now, after the time of the signal, and restore it for the next run."""
    hours, minutes, _ = map(int, jobs.cluster.job(job)["RunTime"].split(":"))
    jobs.cluster.run("scontrol", "update", f"jobid={job}", f"timelimit={60 * hours + minutes + 2}")
    jobs.wait(job, lambda: jobs.cluster.job(job)["Restarts"] == "1")
    jobs.wait(job, lambda: jobs.cluster.job(job)["JobState"] in ("PENDING", "RUNNING"))  # not COMPLETING
    jobs.cluster.run("scontrol", "update", f"jobid={job}", "timelimit=600")


def _wait_for_signal(jobs: Jobs, job: str, ranks: Sequence[str]) -> None:
    """Wait until all stopped ranks of a job have a pending SIGUSR1."""
    files = [f"/proc/{rank}/status" for rank in ranks]
    pending = f"ShdPnd:\t{1 << (signal.SIGUSR1 - 1):016x}"
    jobs.wait(job, lambda: jobs.cluster.run("cat", *files).count(pending) == len(files) > 0)


def _preemption(jobs: Jobs, job: str) -> None:
    """Submit a job of a partition of higher priority that needs all nodes."""
    words = ("--partition=urgent", "--nodes=4", "--gpus-per-node=8", "--output=/dev/null", "--wrap=true")
    jobs.cluster.run("sbatch", *words)


_STATES = {"a node is down": "NODE_FAIL", "slurmd is killed": "NODE_FAIL"}
"""State of the interrupted run in the accounting."""
FAULTS: dict[str, Callable[[Jobs, str], None]] = {
    "scontrol requeue": _requeued_by_slurm,
    "a node is down": _lost_node,
    "slurmd is killed": _dead_daemon,
    "scancel --signal=USR1": _signal,
    "time limit": _time_limit,
    "preemption": _preemption,
}


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_an_interrupted_job_is_requeued_and_ends_with_equal_bits(
    fault: str, jobs: Jobs, uninterrupted: dict[int, float]
) -> None:
    job = jobs.submit()
    jobs.wait_for_step(job, 20)
    FAULTS[fault](jobs, job)
    jobs.wait(job, lambda: jobs.cluster.job(job)["Restarts"] == "1")
    ended = jobs.end(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1")
    assert jobs.losses(job) == uninterrupted
    states = [_STATES.get(fault, "REQUEUED"), "COMPLETED"]
    jobs.wait(job, lambda: [state for state, _ in jobs.cluster.accounts(job)] == states)  # the accounting lags behind
    assert not list(jobs.folder.glob(".first-failure-*"))


@pytest.mark.full
@pytest.mark.parametrize(("launcher", "fault"), [("d9d-torchrun", _signal), ("torchrun", _requeued_by_slurm)])
def test_a_launcher_on_each_node_trains_and_resumes_with_the_bits_of_tasks(
    launcher: str, fault: Callable[[Jobs, str], None], jobs: Jobs, uninterrupted: dict[int, float]
) -> None:
    text = (ROOT / "docs" / "many_hosts.md").read_text(encoding="utf-8").partition("\n## Slurm\n")[2]
    (command,) = re.findall(r"^(srun [^`]*? d9d-torchrun [^`]*?)examples/pretrain.py", text, flags=re.MULTILINE)
    job = jobs.submit(replace=(_SRUN, command.replace("d9d-torchrun", launcher)))
    jobs.wait_for_step(job, 20)
    fault(jobs, job)
    jobs.wait(job, lambda: jobs.cluster.job(job)["Restarts"] == "1")
    assert jobs.end(job)["JobState"] == "COMPLETED", jobs.output(job)[-5000:]
    assert jobs.losses(job) == uninterrupted


@pytest.mark.full
def test_a_job_of_an_array_is_requeued_alone(jobs: Jobs) -> None:
    """The last job of an array has the ID of the array: to requeue this ID would requeue all of its jobs."""
    array = jobs.submit("--array=0-1", "--nodes=2")
    other = str(int(array) + 1)
    jobs.wait_for_step(array, 5)
    with jobs.stopped(array) as ranks:
        jobs.cluster.run("scancel", "--signal=USR1", f"{array}_{jobs.cluster.job(array)['ArrayTaskId']}")
        _wait_for_signal(jobs, array, ranks)
    ended = {job: jobs.end(job) for job in (array, other)}
    assert {job: (fields["JobState"], fields["Restarts"]) for job, fields in ended.items()} == {
        array: ("COMPLETED", "1"),
        other: ("COMPLETED", "0"),
    }
    assert jobs.losses(array) == jobs.losses(other)


@pytest.mark.full
def test_the_second_job_in_one_folder_waits_for_the_first(jobs: Jobs) -> None:
    """After `resilience.timeouts.lock_seconds` the second job fails and is requeued."""
    replace = (_RUN_NAME, "pretrain-shared")
    first = jobs.submit(*_ONE_RANK, replace=replace)
    jobs.wait_for_step("shared", 5)
    with jobs.stopped("shared"):
        second = jobs.submit(*_ONE_RANK, replace=replace)
        jobs.wait(second, lambda: "is in use by another job" in jobs.output(second))
    assert [jobs.end(job)["JobState"] for job in (first, second)] == ["COMPLETED"] * 2
    assert jobs.cluster.job(first)["Restarts"] == "0"
    assert len(jobs.losses("shared")) == STEPS


@pytest.mark.full
def test_a_job_on_a_drained_node_goes_on(jobs: Jobs) -> None:
    job = jobs.submit(*_ONE_RANK)
    jobs.wait_for_step(job, 5)
    node = jobs.cluster.job(job)["NodeList"]
    with jobs.stopped(job):
        jobs.cluster.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    ended = jobs.end(job)
    jobs.cluster.run("scontrol", "update", f"nodename={node}", "state=resume")
    assert (ended["JobState"], ended["Restarts"], len(jobs.losses(job))) == ("COMPLETED", "0", STEPS)


@pytest.mark.full
def test_a_job_whose_prolog_failed_is_held_and_runs_after_its_release(jobs: Jobs) -> None:
    node = NODES[1]
    fails = jobs.cluster.folder / f"prolog-fails-on-{node}"
    fails.touch()
    job = jobs.submit(*_ONE_RANK, f"--nodelist={node}")
    jobs.wait(job, lambda: jobs.cluster.job(job)["Reason"] == "launch_failed_requeued_held")
    fails.unlink()
    jobs.cluster.run("scontrol", "update", f"nodename={node}", "state=resume")
    jobs.cluster.run("scontrol", "release", job)
    ended = jobs.end(job)
    assert (ended["JobState"], ended["Restarts"], len(jobs.losses(job))) == ("COMPLETED", "1", STEPS)


@pytest.mark.full
def test_a_cancelled_job_saves_and_is_not_requeued(jobs: Jobs) -> None:
    job = jobs.submit()
    jobs.wait_for_step(job, 20)
    jobs.cluster.run("scancel", job)
    ended = jobs.end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0")
    saved = list((jobs.folder / "runs" / f"pretrain-{job}" / "checkpoints").glob("*"))
    assert saved, jobs.output(job)
    assert [state for state, _ in jobs.cluster.accounts(job)] == ["CANCELLED"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("option", "replace", "message"),
    [
        ("--ntasks-per-node=3", ("", ""), "batch.global_size"),
        (
            "--ntasks-per-node=2",
            ("data_parallel_shard -1", "data_parallel_shard 8"),
            "make 32 ranks, but the job has 8",
        ),
    ],
    ids=["batch", "mesh"],
)
def test_tasks_that_do_not_match_the_configuration_fail_the_job(
    option: str, replace: tuple[str, str], message: str, jobs: Jobs
) -> None:
    job = jobs.submit(option, replace=replace)
    ended = jobs.end(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", f"{ExitCode.USER_ERROR}:0", "0")
    assert message in jobs.output(job)
    assert jobs.cluster.accounts(job) == [("FAILED", f"{ExitCode.USER_ERROR}:0")]
