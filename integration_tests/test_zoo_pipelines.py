"""Decoders of `transformers` train in pipeline stages as in a plain loop, or are an error in the record.

`--all` compares losses, each gradient and trained values of all causal language models that run on a small
configuration, in 2 and 3 stages.
"""

from pathlib import Path

import pytest
from compared_types import pipelines, read
from zoo_jobs import mutant_stage_differences, plain_traces

from d9d_dist.testing import run_ranks

_SAMPLE = ("bloom", "granite")
_CHUNK = 8


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """List the types only where they are tested, because the imports of `transformers` take seconds."""
    if "decoders" not in metafunc.fixturenames:
        return
    chunks: list[tuple[str, ...]] = [()]
    if metafunc.config.option.all:
        from zoo_libraries import LANGUAGE_MODELS  # noqa: PLC0415

        rest = [name for name in LANGUAGE_MODELS if name not in _SAMPLE]
        chunks = [tuple(rest[start : start + _CHUNK]) for start in range(0, len(rest), _CHUNK)]
    cases = [pytest.param(names, id="".join(names[:1]), marks=pytest.mark.full) for names in chunks]
    metafunc.parametrize("decoders", cases)


def _check(types: tuple[str, ...], folder: Path) -> None:
    record = read()["pipelines"]
    assert pipelines(types, str(folder)) == {name: record.get(name, "equal") for name in types}


def test_decoders_train_in_stages_as_in_a_plain_loop(decoders: tuple[str, ...], tmp_path: Path) -> None:
    _check(decoders, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", _SAMPLE)
def test_a_sample_of_decoders_trains_in_stages_as_in_a_plain_loop(name: str, tmp_path: Path) -> None:
    _check((name,), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("bug", ["block", "rotary table", "tied head"])
def test_a_mutant_is_found(bug: str, tmp_path: Path) -> None:
    name = "decoders:gemma3_text"  # its head is tied
    run_ranks(plain_traces, [name], str(tmp_path), world_size=1)
    [found] = run_ranks(mutant_stage_differences, name, str(tmp_path), bug, world_size=1)
    assert "error" in found[name]
    assert "bound" in found[name]
