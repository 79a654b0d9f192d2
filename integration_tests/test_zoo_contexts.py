"""Decoders of `transformers` train on context-parallel ranks as on whole rows: a sample, compositions and bugs.

`test_compared_types.py` compares all.
"""

import pytest
from zoo_jobs import context_differences

from d9d_dist.testing import run_ranks

_SAMPLE = ("gemma3_text", "gpt_oss")
"""Full and sliding masks, with the norms of Gemma; sinks and experts."""

_OF_WHOLE_ROWS = ("mamba", "gptj")
"""Modules that compute whole rows."""


@pytest.mark.slow("whole rows")
@pytest.mark.parametrize("sample", [_SAMPLE, _OF_WHOLE_ROWS], ids=["parts", "whole rows"])
def test_a_sample_of_decoders_trains_on_parts_of_rows_as_on_whole_rows(sample: tuple[str, ...]) -> None:
    names = [f"contexts:{name}" for name in sample]
    assert run_ranks(context_differences, names, {"context_parallel_shard": 2}, world_size=2)[0] == {}


@pytest.mark.full
@pytest.mark.parametrize("axis", ["data_parallel_shard", "tensor_parallel", "context_parallel_replicate"])
def test_context_parallelism_composes(axis: str) -> None:
    names = [f"contexts:{name}" for name in ("llama", "gemma3_text")]
    mesh = {"context_parallel_shard": 2, axis: 2}
    assert run_ranks(context_differences, names, mesh, world_size=4)[0] == {}


@pytest.mark.slow("rotary tables", "gradients")
@pytest.mark.parametrize("bug", ["masks", "rotary tables", "gradients"])
def test_a_mutant_is_found(bug: str) -> None:
    [found, _] = run_ranks(
        context_differences, ["contexts:gemma3_text"], {"context_parallel_shard": 2}, bug, world_size=2
    )
    assert "error" in found["contexts:gemma3_text"]
    assert "bound" in found["contexts:gemma3_text"]
