"""The examples of a few lines run, on one rank and on several, with equal losses."""

from pathlib import Path

import pytest
from jobs import EXAMPLES, curve, curve_rounding, on_ranks, options


def test_the_quickstart_shows_the_example() -> None:
    page = (EXAMPLES.parent / "docs" / "quickstart.md").read_text(encoding="utf-8")
    assert (EXAMPLES / "sft.toml").read_text(encoding="utf-8") in page


@pytest.mark.parametrize("name", ["tensor_parallel", "image_classifier"])
@pytest.mark.slow
def test_losses_on_two_ranks_are_those_of_one(name: str, tmp_path: Path) -> None:
    steps = {"run.folder": tmp_path, "steps": 4, "logging.every": 1}
    split = {"mesh.tensor_parallel": 2} if name == "tensor_parallel" else {"mesh.data_parallel_shard": 2}
    for world_size, more in ((1, {}), (2, split)):
        ended = on_ranks(name, options(steps, more, run__name=str(world_size)), world_size=world_size)
        assert [each.code for each in ended] == [0] * world_size, ended[0].errors
    losses = curve(tmp_path / "1", "loss")
    assert len(losses) == 4
    assert curve(tmp_path / "2", "loss") == pytest.approx(losses, rel=curve_rounding(4))


def test_the_loop_of_the_engine_learns(tmp_path: Path) -> None:
    (ended,) = on_ranks("engine_loop", options({"run.folder": tmp_path}))
    assert ended.code == 0, ended.errors
    losses = [float(line.split("loss ")[1]) for line in ended.output.splitlines() if line.startswith("step ")]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 10
