"""The main job as a pipeline: every schedule on 2 and 4 ranks, resuming with other stages, and user errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import TINY_MODEL, Ended, assert_same_export, copy_run, curve, curve_rounding, on_ranks, options
from safetensors.torch import load_file

from d9d_loop.config.schedule_config import KINDS

SIZES = {**TINY_MODEL, "model.num_layers": 8, "model.tie_word_embeddings": True, "evaluation.num_samples": 5}
NAMES = ("loss", "grad_norm", "perplexity", "evaluation_loss", "evaluation_perplexity")


def _run(folder: Path, name: str, *more: dict[str, Any], world_size: int = 1, **options_: Any) -> Ended:
    # The learning rate depends on the number of steps, so all runs have the same length.
    given = {"run.folder": folder, "run.name": name, "logging.every": 1, "steps": 2, "checkpoint.every": 1}
    ended = on_ranks("pretrain", options(SIZES, given, *more, **options_), world_size=world_size)
    assert [each.code for each in ended] == [0] * world_size, ended[0].errors
    return ended[0]


def _pipeline(num_ranks: int, schedule: str) -> dict[str, Any]:
    return {"mesh.pipeline_parallel": num_ranks, "pipeline.schedule": schedule, "batch.microbatch_size": 1}


def _export(folder: Path) -> dict[str, torch.Tensor]:
    tensors = [load_file(path) for path in sorted((folder / "export").glob("*.safetensors"))]
    return {name: tensor for each in tensors for name, tensor in each.items()}


def _assert_same(folder: Path, expected: Path) -> None:
    for name in NAMES:
        assert curve(folder, name) == pytest.approx(curve(expected, name), rel=curve_rounding(2)), name
    assert_same_export(_export(folder), _export(expected))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("one")
    return folder / "one", _run(folder, "one").output


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("schedule", KINDS)
@pytest.mark.sample("1f1b-2")
def test_every_schedule_has_the_curve_export_and_text_of_one_process(
    tmp_path: Path, num_ranks: int, schedule: str, one_process: tuple[Path, str]
) -> None:
    folder, text = one_process
    draws = num_ranks == 2
    ended = _run(tmp_path, "run", _pipeline(num_ranks, schedule), pipeline__draw=draws, world_size=num_ranks)
    _assert_same(tmp_path / "run", folder)
    assert _written(ended.output) == _written(text)
    for name in ("schedule", "schedule_measured"):
        if not draws:
            assert not (tmp_path / "run" / f"{name}.txt").exists()
            continue
        assert (tmp_path / "run" / f"{name}.png").stat().st_size > 10_000
        assert (tmp_path / "run" / f"{name}.txt").read_text().count("\nrank ") == num_ranks


def _written(output: str) -> str:
    """Return the generated text, between the progress and the summary."""
    return output[output.index("\ndef ") :].rpartition("\n{")[0]


@pytest.mark.full
def test_a_checkpoint_resumes_with_other_stages(tmp_path: Path, one_process: tuple[Path, str]) -> None:
    folder, _ = one_process
    first = {**_pipeline(2, "zbv"), "mesh.data_parallel_shard": 2}
    _run(tmp_path, "run", first, world_size=4)
    expected = _export(tmp_path / "run")
    for layout, world_size in ((_pipeline(4, "1f1b"), 4), (first, 4), ({}, 1)):
        again = copy_run(tmp_path / "run", tmp_path / "again")
        for path in sorted((again / "checkpoints").glob("*2/*")):
            path.unlink()
        *_, last = sorted((again / "checkpoints").iterdir())
        last.rmdir()
        _run(tmp_path, "again", layout, world_size=world_size)
        _assert_same(again, folder)
        if layout == first:  # the same mesh: the same bits
            assert all(torch.equal(tensor, expected[name]) for name, tensor in _export(again).items())
        for path in sorted(again.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        again.rmdir()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"pipeline.schedule": "dualpipev", "batch.microbatch_size": 4},
            "A step has 2 microbatches per data-parallel rank (batch.global_size / data-parallel ranks / "
            "batch.microbatch_size) and mesh.pipeline_parallel = 2.",
        ),
        ({"pipeline.schedule": "zb-v"}, "pipeline.schedule.kind = 'zb-v'; expected 'gpipe', 'looped_bfs', '1f1b',"),
        ({"model.num_layers": 1}, "1 layers (+ 0 virtual) are too few for 2 pipeline stages; use at most 1 stages."),
    ],
    ids=["microbatches", "name", "layers"],
)
def test_a_user_error_is_one_message_before_anything_starts(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    arguments = options(SIZES, {"run.folder": tmp_path, "mesh.pipeline_parallel": 2}, given)
    first, second = on_ranks("pretrain", arguments, world_size=2)
    assert (first.code, second.code) == (2, 2)
    assert message in first.errors
    assert "Traceback" not in first.errors
    assert not list(tmp_path.iterdir())
