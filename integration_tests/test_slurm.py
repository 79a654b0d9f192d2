"""`sbatch examples/clusters/slurm.sh` on a real Slurm: four nodes of two ranks, signals, requeues and lost nodes."""

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from slurm_cluster import NUM_NODES, SlurmCluster, why_no_slurm

from d9d_loop.resilience import ExitCode

ROOT = Path(__file__).resolve().parents[1]
STEPS = 300
_SMALLER = {
    "steps": STEPS,
    "length": 32,
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
    "every": 1,
    "num_samples": 64,
    "warmup_steps": 3,
}
_RANKS = ("--nodes=4", "--ntasks-per-node=2")
_ACTIVE = ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING")


class Jobs:
    """Jobs of the batch script in a folder with smaller models."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        shutil.copytree(ROOT / "examples", folder / "examples")
        path = folder / "examples" / "pretrain.toml"
        text = path.read_text()
        for name, value in _SMALLER.items():
            text = re.sub(rf"^{name} = \d+", f"{name} = {value}", text, flags=re.MULTILINE)
        text = re.sub(r"(\[(?:evaluation|checkpoint)\]\nevery = )1\n", rf"\g<1>{10 * STEPS}\n", text)
        path.write_text(text + "\n[resilience.health]\nmemory_mib = 1\nmessage_mib = 1\nmatrix_size = 32\n")
        self._variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def submit(self, *options: str) -> str:
        words = ["sbatch", "--parsable", *_RANKS, *options, "examples/clusters/slurm.sh"]
        return self.cluster.run(*words, cwd=self.folder, variables=self._variables).strip()

    def losses(self, job: str) -> dict[int, float]:
        path = self.folder / "runs" / f"pretrain-{job}" / "metrics.jsonl"
        lines = map(json.loads, path.read_text().splitlines()) if path.exists() else []
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    def wait_for_step(self, job: str, step: int) -> None:
        self.wait(job, lambda: max(self.losses(job), default=0) >= step)

    def wait(self, job: str, is_done: Callable[[], bool]) -> None:
        try:
            self.cluster.wait(is_done, seconds=400)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.cluster.job(job)}\n{self.output(job)[-5000:]}") from None

    def end(self, job: str) -> dict[str, str]:
        """Wait until a job has ended, and return its fields."""
        self.wait(job, lambda: self.cluster.job(job)["JobState"] not in _ACTIVE)
        return dict(self.cluster.job(job))

    def output(self, job: str) -> str:
        return (self.folder / f"slurm-{job}.out").read_text()


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
    jobs.cluster.run("scontrol", "update", f"nodename=node{NUM_NODES}", "state=down", "reason=test")


def _signal(jobs: Jobs, job: str) -> None:
    jobs.cluster.run("scancel", "--signal=USR1", job)


FAULTS: dict[str, Callable[[Jobs, str], None]] = {
    "scontrol requeue": _requeued_by_slurm,
    "a node is down": _lost_node,
    "SIGUSR1, as at the time limit": _signal,
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


@pytest.mark.full
def test_a_cancelled_job_saves_and_is_not_requeued(jobs: Jobs) -> None:
    job = jobs.submit()
    jobs.wait_for_step(job, 20)
    jobs.cluster.run("scancel", job)
    ended = jobs.end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0")
    saved = list((jobs.folder / "runs" / f"pretrain-{job}" / "checkpoints").glob("*"))
    assert saved, jobs.output(job)


@pytest.mark.full
def test_an_error_of_the_configuration_fails_the_job(jobs: Jobs) -> None:
    job = jobs.submit("--ntasks-per-node=3")
    ended = jobs.end(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", f"{ExitCode.USER_ERROR}:0", "0")
    assert "batch.global_size" in jobs.output(job)
