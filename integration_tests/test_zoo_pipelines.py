"""Decoders of `transformers` train in pipeline stages as in a plain loop: a sample, and the bugs that must be found.

`test_compared_types.py` compares all.
"""

from pathlib import Path

import pytest
from compared_types import pipelines
from zoo_jobs import mutant_stage_differences, plain_traces

from d9d_dist.testing import run_ranks

_SAMPLE = ("bloom", "granite")


@pytest.mark.full
@pytest.mark.parametrize("name", _SAMPLE)
def test_a_sample_of_decoders_trains_in_stages_as_in_a_plain_loop(name: str, tmp_path: Path) -> None:
    assert pipelines([name], str(tmp_path)) == {name: "equal"}


@pytest.mark.full
@pytest.mark.parametrize("bug", ["block", "rotary table", "tied head"])
def test_a_mutant_is_found(bug: str, tmp_path: Path) -> None:
    name = "decoders:gemma3_text"  # its head is tied
    run_ranks(plain_traces, [name], str(tmp_path), world_size=1)
    [found] = run_ranks(mutant_stage_differences, name, str(tmp_path), bug, world_size=1)
    assert "error" in found[name]
    assert "bound" in found[name]
