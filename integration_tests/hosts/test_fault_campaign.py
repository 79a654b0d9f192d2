"""A short campaign of faults, and a job that continues with fewer replicas: losses equal a run without faults."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from jobs import curve_rounding

from d9d_loop import warm_rank
from d9d_loop.report.run_history import read_history
from d9d_state import CheckpointStore
from hosts.elastic_job import IMPATIENT, ElasticJob, Settings, Step
from hosts.fault_campaign import END, FAULTS, Bits, Outcome, bits_of, campaign, summarize, wrong_bits
from hosts.forked_hosts import warm_process
from hosts.hosts import Hosts

pytestmark = pytest.mark.full


def _outcomes(layout: str, faults: list[str], seed: int) -> list[Outcome]:
    return list(campaign(layout, faults, seed))


def test_after_three_faults_values_are_bitwise_equal_and_logs_name_the_culprits() -> None:
    faults = [FAULTS[0], "host without power", "rank killed in a recovery"]
    (outcomes,) = warm_process().run(_outcomes, "dp_replicate=3,dp_shard=2,ep=2", faults, 3, world_size=1, timeout=900)
    assert [each.fault for each in outcomes] == [*faults, END]
    assert all(each.is_good for each in outcomes), outcomes


def _continue_with_fewer() -> tuple[list[Step], list[Step], str]:
    """Lose one of three hosts for some steps, and get it back; return the steps without and with the loss."""
    warm_rank.import_for(["-m", "hosts.elastic_job"])
    checkpoint = {"every": 1000, "memory_every": 1, "replicas": 1}
    settings = Settings(
        "", 24, 2, (2, 3), 20.0, {"checkpoint": checkpoint, "batch": {"global_size": 24, "microbatch_size": 1}}
    )
    with Hosts(3, sysctls=IMPATIENT) as hosts:
        with ElasticJob(hosts, "calm", settings) as job:
            _wait(job, 24)
            calm = job.steps()
        with ElasticJob(hosts, "faults", settings) as job:
            job.allow(6)
            _wait(job, 5)
            hosts.power_off(2)
            job.is_off.add(2)
            job.allow(14)
            _wait(job, 12)
            hosts.reboot(2)
            job.is_off.remove(2)
            job.allow(18)
            deadline = time.monotonic() + 200
            while job.steps()[-1].num_ranks < 6:
                assert time.monotonic() < deadline, job.errors()
                job.start_missing()
                time.sleep(0.05)
            job.allow(24)
            _wait(job, 24)
            history = read_history(hosts.shared / "faults")
            assert history is not None
            return calm, job.steps(), history.describe()


def _wait(job: ElasticJob, step: int) -> None:
    deadline = time.monotonic() + 200
    while not any(each.step >= step for each in job.steps()):
        assert time.monotonic() < deadline, job.errors()
        job.start_missing()
        time.sleep(0.05)


def test_a_job_continues_with_fewer_replicas_and_the_same_losses_until_the_host_is_back() -> None:
    ((calm, steps, history),) = warm_process().run(_continue_with_fewer, world_size=1, timeout=900)
    assert {each.num_ranks for each in calm} == {6}
    assert sorted({each.num_ranks for each in steps}) == [4, 6]
    assert steps[0].num_ranks == steps[-1].num_ranks == 6
    assert "host2" in history
    expected = {each.step: each.loss for each in calm}
    assert {each.step for each in steps} == set(range(1, 25))
    rounding = curve_rounding(24) * 2.0**-29  # of float64 instead of float32
    assert [each.loss for each in steps] == pytest.approx([expected[each.step] for each in steps], rel=rounding)


def test_wrong_losses_and_wrong_tensors_are_found(tmp_path: Path) -> None:
    for step in (4, 8):
        CheckpointStore(tmp_path).save(step, {"weight": torch.full((3,), float(step))})
    steps = [Step(step, values, 0.0, 6, "life") for step, values in ((1, "a,b"), (2, "c,d"), (2, "c,d"))]
    expected = bits_of(steps, tmp_path)
    assert wrong_bits(steps, tmp_path, expected) == ([], [])
    assert wrong_bits([*steps, replace(steps[1], values="c,e")], tmp_path, expected) == ([2], [])
    CheckpointStore(tmp_path / "other").save(8, {"weight": torch.tensor([8.0, 8.0, 7.999999])})
    assert wrong_bits(steps, tmp_path / "other", expected) == ([], [8])
    path = tmp_path / "bits.json"
    path.write_text(json.dumps(asdict(expected)), encoding="ascii")
    assert Bits.read(path) == expected


def test_summary_counts_wrong_bits_unnamed_culprits_and_jobs_that_did_not_resume() -> None:
    good = Outcome("tp=2", FAULTS[0], 1.0, 8.0, 1)
    unnamed, lost = replace(good, detection=None, seconds=12.0), replace(good, layout="pp=2", seconds=None)
    wrong, end = replace(good, wrong_steps=[3]), replace(good, fault=END, wrong_checkpoints=[4], lost_steps=9)
    found = summarize([good, unnamed, lost, wrong, end])
    assert (found["faults"], found["layouts"], found["good"]) == (4, 2, 1)
    assert (found["unnamed"], found["unresumable"], found["wrong"]) == (1, 1, 2)
    assert (found["median_seconds"], found["most_seconds"], found["most_lost_steps"]) == (8.0, 12.0, 1)
