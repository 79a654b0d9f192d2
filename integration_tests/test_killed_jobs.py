"""The main job, killed at any moment, resumes bitwise on the same ranks, and also resumes on other ranks."""

import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_jobs import NEVER, When, forked_job
from jobs import TINY_MODEL, Ended, curve, curve_rounding, options, records

_STEPS = {"steps": 12, "checkpoint__every": 2, "evaluation__every": 5}
_MESHES: dict[int, dict[str, Any]] = {
    1: {},
    2: {"mesh.data_parallel_shard": 2},
    4: {"mesh.data_parallel_replicate": 2, "mesh.data_parallel_shard": 2},
}


def _run(runs: Path, name: str, world_size: int, *, killed: When = NEVER, seed: int = 0, **more: Any) -> bool:
    """Run the job, and return True if it finished."""
    settings = {"run.folder": runs, "run.name": name, "logging.every": 1}
    arguments = options(TINY_MODEL, settings, _MESHES[world_size], **{**_STEPS, **more})
    ended = forked_job("pretrain", arguments, world_size=world_size, killed=killed, seed=seed, folder=runs / name)
    if ended is not None:
        assert [each.code for each in ended] == [0] * world_size, _first_error(ended)
    return ended is not None


def _first_error(ended: list[Ended]) -> str:
    return next(each.errors for each in ended if each.code)


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.sample("1")
def test_a_killed_run_ends_with_the_bits_of_an_uninterrupted_one(tmp_path: Path, world_size: int) -> None:
    start = time.monotonic()
    assert _run(tmp_path, "calm", world_size)
    life, seed = time.monotonic() - start, time.time_ns()
    choice = random.Random(seed)  # noqa: S311 - no secret
    # Times to the kill grow, so that a job that makes no progress between two kills ends too.
    moments: list[When] = ["in a save", *(choice.uniform(0, 0.4 * life * 1.3**life_) for life_ in range(3))]
    kills = sum(not _run(tmp_path, "killed", world_size, killed=at, seed=choice.randrange(9)) for at in moments)
    assert kills > 0, f"seed {seed} killed nothing"
    assert _run(tmp_path, "killed", world_size)
    assert records(tmp_path / "killed") == records(tmp_path / "calm"), f"seed {seed}"
    for file in ("export/model.safetensors", "export/config.json"):
        assert (tmp_path / "killed" / file).read_bytes() == (tmp_path / "calm" / file).read_bytes(), file


@pytest.mark.full
def test_a_job_killed_in_a_save_resumes_on_other_ranks_and_its_export_loads(tmp_path: Path) -> None:
    assert _run(tmp_path, "calm", 1)
    assert not _run(tmp_path, "start", 2, killed="in a save", checkpoint__every=3)
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    logits = _logits(tmp_path / "calm", tokens)
    for world_size in _MESHES:
        name = f"on-{world_size}"
        shutil.copytree(tmp_path / "start", tmp_path / name)
        assert _run(tmp_path, name, world_size, checkpoint__every=3)
        for value in ("loss", "grad_norm"):
            assert curve(tmp_path / name, value) == pytest.approx(
                curve(tmp_path / "calm", value), rel=curve_rounding(_STEPS["steps"])
            ), value
        torch.testing.assert_close(_logits(tmp_path / name, tokens), logits, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def _logits(run_dir: Path, tokens: torch.Tensor) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(run_dir / "export", dtype=torch.float32).eval()
    return model(tokens).logits
