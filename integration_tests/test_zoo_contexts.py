"""Decoders of `transformers` train on context-parallel ranks as on whole rows, or are an error that names the reason.

`--all` compares losses and each gradient of all causal language models that run on a small configuration.
"""

import re
from pathlib import Path

import pytest
from test_zoo_experts import ERRORS as EXPERT_ERRORS
from zoo_jobs import context_differences

from d9d_dist.testing import run_ranks

_SAMPLE = ("gemma3_text", "gpt_oss", "mamba", "gptj")
"""Full and sliding masks, with the norms of Gemma; sinks and experts; modules that compute whole rows."""
_CHUNK = 10

ERRORS = {
    "cpmant": "receives no tensor with the positions of the tokens",
    "gpt_neox_japanese": "an output has values of whole rows",
    "hrm_text": "has no list of blocks that are called once each, in order",
    "jetmoe": "Cannot copy out of meta tensor",
    "mllama": "has no list of blocks that are called once each, in order",
    "prophetnet": "a block receives a tensor",
    "xlm": "a part of each row fails",
    "xlnet": "a block receives a tensor",
    "xlstm": "is not divisible by chunk size",
}
"""Types that cannot be split, with the error before the start."""


def _check(types: tuple[str, ...]) -> None:
    names = [f"contexts:{name}" for name in types]
    found, _ = run_ranks(context_differences, names, {"context_parallel_shard": 2}, world_size=2, timeout=1800)
    failed = {name for name, line in found.items() if line.startswith("not run: ")}
    errors = {name: ERRORS[kind] for name in names if (kind := name.partition(":")[2]) in ERRORS}
    assert found.keys() - failed == errors.keys() - failed, found
    assert all(errors[name] in found[name] and "mesh.context_parallel_shard" in found[name] for name in errors), found
    print(f"context parallelism: {len(names) - len(found)} equal, {len(errors)} errors, {len(failed)} not run; {found}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """List the types only where they are tested, because the imports of `transformers` take seconds."""
    if "decoders" not in metafunc.fixturenames:
        return
    chunks: list[tuple[str, ...]] = [()]
    if metafunc.config.option.all:
        from zoo_libraries import LANGUAGE_MODELS  # noqa: PLC0415

        chunks = [LANGUAGE_MODELS[start : start + _CHUNK] for start in range(0, len(LANGUAGE_MODELS), _CHUNK)]
    cases = [pytest.param(names, id="".join(names[:1]), marks=pytest.mark.full) for names in chunks]
    metafunc.parametrize("decoders", cases)


def test_decoders_train_on_parts_of_rows_as_on_whole_rows(decoders: tuple[str, ...]) -> None:
    _check(decoders)


def test_a_sample_of_decoders_trains_on_parts_of_rows_as_on_whole_rows() -> None:
    names = [f"contexts:{name}" for name in _SAMPLE]
    assert run_ranks(context_differences, names, {"context_parallel_shard": 2}, world_size=2)[0] == {}


@pytest.mark.full
@pytest.mark.parametrize("axis", ["data_parallel_shard", "tensor_parallel", "context_parallel_replicate"])
def test_context_parallelism_composes(axis: str) -> None:
    names = [f"contexts:{name}" for name in ("llama", "gemma3_text")]
    mesh = {"context_parallel_shard": 2, axis: 2}
    assert run_ranks(context_differences, names, mesh, world_size=4)[0] == {}


@pytest.mark.parametrize("bug", ["masks", "rotary tables", "gradients"])
def test_a_mutant_is_found(bug: str) -> None:
    [found, _] = run_ranks(
        context_differences, ["contexts:gemma3_text"], {"context_parallel_shard": 2}, bug, world_size=2
    )
    assert "error" in found["contexts:gemma3_text"]
    assert "bound" in found["contexts:gemma3_text"]


def test_the_page_names_the_types_that_are_an_error() -> None:
    page = (Path(__file__).parents[1] / "docs" / "hugging_face_model.md").read_text(encoding="utf-8")
    for axis, errors in {"context_parallel_shard": ERRORS, "expert_parallel": EXPERT_ERRORS}.items():
        [row] = [line for line in page.splitlines() if line.startswith(f"| `mesh.{axis}` |")]
        assert re.findall(r"`(\w+)`", row.split("|")[3]) == sorted(errors)
