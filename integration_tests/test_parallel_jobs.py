"""Whole jobs with tensor and context parallelism: curves, exports, resuming in other layouts, and user errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import TINY_MODEL, Ended, assert_same_export, copy_run, curve, curve_rounding, on_ranks, options
from safetensors.torch import load_file

SIZES = {**TINY_MODEL, "model.num_heads": 4, "model.num_kv_heads": 2}
LAYOUTS = {
    "tensor and sharded": {"mesh.tensor_parallel": 2, "mesh.data_parallel_shard": 2},
    "context and replicated": {"mesh.context_parallel_shard": 2, "mesh.data_parallel_replicate": 2},
    "tensor and context": {
        "mesh.tensor_parallel": 2,
        "mesh.context_parallel_replicate": 2,
        "context_method": "ring",
        "activation_checkpointing": "blocks",
    },
}


def _arguments(folder: Path, name: str, **more: Any) -> list[str]:
    return options(SIZES, {"run.folder": folder, "run.name": name, "logging.every": 1}, **more)


def _run(arguments: list[str], world_size: int = 1) -> Ended:
    ended = on_ranks("pretrain", arguments, world_size=world_size)
    assert [each.code for each in ended] == [0] * world_size, ended[0].errors
    return ended[0]


def _export(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / name / "export" / "model.safetensors")


def _written(output: str) -> str:
    """Return the generated text, between the progress and the summary."""
    return output[output.index("\ndef ") :].rpartition("\n{")[0]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("one")
    return folder, _run(_arguments(folder, "one", steps=6, evaluation__every=3)).output


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.full
def test_a_layout_has_the_curve_export_and_text_of_one_process(
    tmp_path: Path, layout: str, one_process: tuple[Path, str]
) -> None:
    folder, text = one_process
    ended = _run(_arguments(tmp_path, "four", steps=6, evaluation__every=3) + options(LAYOUTS[layout]), world_size=4)
    for name in ("loss", "grad_norm", "perplexity", "evaluation_loss", "evaluation_perplexity"):
        assert curve(tmp_path / "four", name) == pytest.approx(curve(folder / "one", name), rel=curve_rounding(6)), name
    assert_same_export(_export(tmp_path, "four"), _export(folder, "one"))
    assert _written(ended.output) == _written(text)


@pytest.mark.full
def test_a_checkpoint_resumes_in_another_layout(tmp_path: Path, one_process: tuple[Path, str]) -> None:
    folder, _ = one_process
    first = LAYOUTS["tensor and sharded"]
    # The learning rate depends on the number of steps, so the run has the full length and is resumed from its middle.
    _run(_arguments(tmp_path, "run", steps=6, checkpoint__every=3) + options(first), world_size=4)
    for layout, world_size in ((LAYOUTS["context and replicated"], 4), (first, 4), ({}, 1)):
        again = copy_run(tmp_path / "run", tmp_path / "again")
        _forget_last_checkpoint(again)
        _run(_arguments(tmp_path, "again", steps=6, checkpoint__every=3) + options(layout), world_size)
        export = _export(tmp_path, "again")
        assert_same_export(export, _export(folder, "one"))
        if layout == first:  # the same mesh: the same bits
            assert all(torch.equal(tensor, export[name]) for name, tensor in _export(tmp_path, "run").items())
        _remove(again)


def _forget_last_checkpoint(run_dir: Path) -> None:
    *_, last = sorted((run_dir / "checkpoints").iterdir())
    _remove(last)


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def test_a_degree_that_does_not_fit_is_one_message_on_every_rank(tmp_path: Path) -> None:
    message = (
        "the tp degree = 4 does not divide dim 0 of backbone.layers.0.attention.k_proj.weight, which is 2 blocks "
        "of 16. Use a degree that divides 2."
    )
    arguments = _arguments(tmp_path, "run", steps=2) + options({"mesh.tensor_parallel": 4})
    for rank, each in enumerate(on_ranks("pretrain", arguments, world_size=4)):
        assert each.code == 2
        assert message in each.errors, f"rank {rank}: {each.errors}"
        assert "Traceback" not in each.errors
