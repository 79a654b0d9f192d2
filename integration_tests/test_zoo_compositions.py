"""Decoders of `transformers` train in random compositions of axes as in a plain loop: a sample, and a bug to find.

`test_compared_types.py` compares all.
"""

from pathlib import Path

import pytest
from compared_types import compositions
from zoo_compositions import Composition, difference, draw, write_plain

from d9d_dist.testing import run_ranks

_MESH = {"pipeline_parallel": 2, "context_parallel_shard": 2}


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_a_sample_of_decoders_trains_in_its_compositions_as_in_a_plain_loop(name: str, tmp_path: Path) -> None:
    assert compositions([name], str(tmp_path)) == {name: "equal"}


@pytest.mark.full
@pytest.mark.parametrize("bug", [None, "masks", "gradients"])
def test_a_mutant_is_found(bug: str | None, tmp_path: Path) -> None:
    assert run_ranks(write_plain, "gemma3_text", str(tmp_path), world_size=1) == [""]
    found = difference("gemma3_text", Composition(_MESH, "zb1p"), str(tmp_path), bug)
    assert ("bound" in found) == bool(found) == (bug is not None)


def test_compositions_have_four_ranks_and_only_supported_axes() -> None:
    assert draw("a", ()) == [Composition({"data_parallel_shard": 2, "data_parallel_replicate": 2}, None)]
    drawn = [each for name in "abcdefgh" for each in draw(name, ("pipelines", "experts"))]
    assert len(drawn) == 3 * 8
    for mesh, schedule in drawn:
        sizes = {axis: size for axis, size in mesh.items() if axis != "expert_parallel"}
        assert list(sizes.values()) == [2, 2]
        assert sizes.keys() <= {"pipeline_parallel", "data_parallel_shard", "data_parallel_replicate"}
        assert mesh.get("expert_parallel", 1) <= (4 if "pipeline_parallel" not in mesh else 2)
        assert (schedule is not None) == ("pipeline_parallel" in mesh)
    assert any("expert_parallel" in mesh for mesh, _ in drawn)
    assert draw("a", ("pipelines",)) == draw("a", ("pipelines",)) != draw("b", ("pipelines",))
