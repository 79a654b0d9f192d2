"""Jobs with experts on several ranks: the curves of one process, balanced loads, resuming with other degrees."""

from pathlib import Path

import pytest
from jobs import EXAMPLES, TINY_MODEL, copy_run, curve, on_ranks, options
from moe_job import train

from d9d_dist.testing import run_ranks
from d9d_loop.testing import parse_layout

STEPS, RATE, SAVED = 24, 0.02, 4
REPORTED = ("loss", "grad_norm", "evaluation_loss", *(f"experts/{name}" for name in ("max_over_mean", "entropy")))


def _train(layout: str, folder: Path, *, steps: int = STEPS, rate: float = RATE) -> Path:
    run_ranks(train, layout, str(folder), steps, rate, world_size=parse_layout(layout).world_size)
    return folder


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _train("", tmp_path_factory.mktemp("balanced") / "one")


@pytest.mark.slow
def test_biases_balance_an_unbalanced_router(one_process: Path, tmp_path: Path) -> None:
    alone = curve(_train("", tmp_path / "unbalanced", rate=0.0), "experts/max_over_mean")
    balanced = curve(one_process, "experts/max_over_mean")
    assert alone[0] == balanced[0]
    assert min(alone[-3:]) > 1.5
    assert max(balanced[-3:]) <= 1.3
    assert curve(one_process, "experts/dropped") == [0.0] * STEPS


@pytest.mark.parametrize("layout", ["ep=4,dp_shard=4", "pp=2,ep=2,dp_shard=2,microbatch=2"])
@pytest.mark.full
def test_a_balanced_job_is_the_same_in_every_layout(layout: str, one_process: Path, tmp_path: Path) -> None:
    found = _train(layout, tmp_path / "ranks")
    for name in REPORTED:
        assert curve(found, name) == pytest.approx(curve(one_process, name), rel=1e-9), name
    assert len(curve(found, "loss")) == STEPS
    assert curve(found, "experts/max_over_mean")[-1] <= 1.3


@pytest.mark.full
def test_a_checkpoint_resumes_with_other_degrees(one_process: Path, tmp_path: Path) -> None:
    saved = _train("ep=4,dp_shard=4", tmp_path / "saved", steps=SAVED)
    for layout in ("ep=2,dp_shard=2", "ep=8,dp_shard=4,tp=2"):
        found = _train(layout, copy_run(saved, tmp_path / f"from {layout}"), steps=SAVED + 2)
        for name in ("loss", "grad_norm", "experts/max_over_mean"):
            expected = curve(one_process, name)[: SAVED + 2]
            assert curve(found, name) == pytest.approx(expected, rel=1e-9), f"{name} of {layout}"


@pytest.mark.full
def test_the_main_job_has_the_curve_of_one_process(tmp_path: Path) -> None:
    layouts = {
        "one": {},
        "experts": {"mesh.data_parallel_shard": 4, "mesh.expert_parallel": 4},
        "stages": {"mesh.pipeline_parallel": 2, "mesh.data_parallel_shard": 2, "mesh.expert_parallel": 2},
    }
    for name, mesh in layouts.items():
        job = {"run.folder": tmp_path, "run.name": name, "steps": 6, "evaluation.every": 3, "logging.every": 1}
        cut = {"batch.microbatch_size": 2} if mesh else {}
        arguments = [str(EXAMPLES / "pretrain_moe.toml"), *options(TINY_MODEL, job, mesh, cut)]
        # In float32 a rounding error can send a token to another expert.
        ended = on_ranks("pretrain", arguments, world_size=4 if mesh else 1, double=True)
        assert [each.code for each in ended] == [0] * len(ended), ended[0].errors
    for name in layouts:
        for values in ("loss", "grad_norm", "evaluation_loss"):
            assert curve(tmp_path / name, values) == pytest.approx(curve(tmp_path / "one", values), rel=1e-9), name
    assert len(curve(tmp_path / "one", "loss")) == 6
